"""The tiers that the consolidator follows: what changes, what is counted, and who is asked when."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.block_lookup import WHOLE_MAX
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.follow import FollowLimits
from kvbm_common.wire.events import Event, Run
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core.block_books import pairs_of
from kvbm_connectors.consolidator.core.replaced_books import Change
from kvbm_connectors.consolidator.core.tier_views import FORGET_MS, TIER_BLOCKS_MAX, TierViews

from tests.libs.lost_events import Follower, Move, plays

LIMITS = FollowLimits()

DISK = "disk-tier-0"
NAMESPACE = bytes(32)


def block(number: int) -> Block:
    """Return a block of a small number."""
    name = SequenceHash(number.to_bytes(16, "big"))
    return Block(
        hash=name, parent=SequenceHash(bytes(16)), namespace=NAMESPACE, checksum=0, bytes=1
    )


def announcer(epoch: int = 1) -> Announcer:
    """Return a disk tier's voice that has not spoken yet."""
    return Announcer(host="h", source=DISK, tier="disk", epoch=epoch)


def stored(disk: Announcer, number: int) -> Event:
    """Return its next event: one more block."""
    [event] = disk.stored([block(number)])
    return event


def snapshot(disk: Announcer, *numbers: int) -> SnapshotReply:
    """Return what it holds as of its last event."""
    return disk.snapshot([block(number) for number in numbers])


@dataclass
class Following:
    """The views, the blocks that their changes add up to, and the counters."""

    drops: Counter[str] = field(default_factory=Counter)
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.views = TierViews(self.drops)

    def hear(self, *events: Event, now_ms: int = 0) -> None:
        """Events come."""
        for event in events:
            self.change(self.views.take(event, now_ms))

    def change(self, changes: list[Change]) -> None:
        """Add up changes; none takes what is not held, or brings what is."""
        for change in changes:
            new = {int.from_bytes(name, "big") for name, _ in change.stored}
            gone = {int.from_bytes(name, "big") for name in change.removed}
            assert self.held.isdisjoint(new)
            assert self.held >= gone
            self.held = (self.held | new) - gone
        self.views.check()

    def go_on(self, now_ms: int) -> list[int]:
        """Have all the rest read, applied and announced; returns by how many blocks at a time."""
        counts: list[int] = []
        while self.views.is_going_on:
            before = len(self.held)
            self.change(self.views.go_on(now_ms))
            counts.append(len(self.held) - before)
        return counts


def test_a_missing_event_that_comes_late_closes_the_gap() -> None:
    """1. Event 3 overtakes 2. 2. It waits. 3. With 2 both are applied, and no snapshot is due."""
    disk, following = announcer(), Following()
    first, second, third = disk.cleared("start"), stored(disk, 1), stored(disk, 2)
    following.hear(first, third)
    assert following.held == set()
    assert following.views.behind_count == 1
    following.hear(second)
    assert following.held == {1, 2}
    assert following.views.ask(10**6) == []
    assert following.drops == {"tier_gap": 1}


def test_a_clear_needs_no_history() -> None:
    """What was missed before it does not matter; what follows it applies."""
    disk, following = announcer(), Following()
    following.hear(disk.cleared("start"), stored(disk, 1))
    stored(disk, 2)
    following.hear(stored(disk, 3), disk.cleared("reformatted"), stored(disk, 4))
    assert following.held == {4}
    assert following.views.behind_count == 0


def test_a_life_that_the_registry_names_ends_the_one_before() -> None:
    """Its blocks are gone at once, and come back with the new life's own words."""
    disk, following = announcer(), Following()
    following.hear(disk.cleared("start"), stored(disk, 1))
    following.change(following.views.joined(DISK, "disk", 2, 5))
    assert following.held == set()
    assert following.views.ask(5) == [DISK]
    again = announcer(2)
    following.hear(again.cleared("start"), stored(again, 1))
    assert following.held == {1}
    following.change(following.views.snapshot(snapshot(announcer(1)), 6))
    assert following.held == {1}, "the answer of the life before"


def test_an_old_or_malformed_snapshot_is_asked_for_again_after_a_pause() -> None:
    """Neither changes anything; the third one does, and what has waited comes after it."""
    disk, following = announcer(), Following()
    old = snapshot(disk)
    following.hear(disk.cleared("start"), stored(disk, 1))
    lost = stored(disk, 2)
    third = snapshot(disk, 1, 2)
    following.hear(stored(disk, 3))
    assert following.views.ask(0) == [DISK]
    following.change(following.views.snapshot(old, 0))
    assert following.views.ask(499) == []
    assert following.views.ask(500) == [DISK]
    third.parts[0].runs[0].hashes[0] = "no hash"
    following.change(following.views.snapshot(third, 500))
    assert following.held == {1}
    assert following.views.ask(1499) == []
    assert following.views.ask(1500) == [DISK]
    following.change(following.views.snapshot(snapshot(disk, 1, 2, 3), 1500))
    assert following.held == {1, 2, 3}
    following.hear(lost)
    assert following.drops == {"tier_gap": 1, "tier_malformed": 1, "tier_duplicate": 1}


def test_what_waits_for_a_snapshot_is_bounded() -> None:
    """Three too many are left out and counted. A snapshot without them is not the last that is
    asked for, although the tier says nothing more."""
    disk, following = announcer(), Following()
    following.hear(disk.cleared("start"))
    stored(disk, 1)
    early = snapshot(disk, 1)
    following.hear(*(stored(disk, 2 + n) for n in range(LIMITS.waiting_max + 3)))
    assert following.drops == {"tier_gap": 1, "tier_waiting_full": 3}
    assert following.views.ask(0) == [DISK]
    following.change(following.views.snapshot(early, 0))
    assert len(following.held) <= 1 + TIER_BLOCKS_MAX
    assert max(following.go_on(0)) <= TIER_BLOCKS_MAX
    assert len(following.held) == 1 + LIMITS.waiting_max
    assert following.views.behind_count == 1
    assert following.views.ask(LIMITS.retry_ms) == [DISK]
    whole = snapshot(disk, *range(1, LIMITS.waiting_max + 5))
    following.change(following.views.snapshot(whole, LIMITS.retry_ms))
    following.go_on(LIMITS.retry_ms)
    assert len(following.held) == LIMITS.waiting_max + 4
    assert (following.views.behind_count, following.drops["tier_gap"]) == (0, 1)


def test_a_lost_stream_asks_at_once_though_a_question_has_just_failed() -> None:
    """The pause was for a source that did not answer; another stream is news."""
    disk, following = announcer(), Following()
    following.change(following.views.joined(DISK, "disk", 1, 0))
    for at_ms in (0, 500):
        assert following.views.ask(at_ms) == [DISK]
        following.views.snapshot_failed(DISK, at_ms)
    assert following.views.ask(600) == []
    following.views.stream_lost(DISK, 600)
    assert following.views.ask(600) == [DISK]
    following.hear(disk.cleared("start"))
    following.views.stream_lost("disk-tier-9", 600)


def test_a_source_that_left_is_heard_again_when_it_is_back() -> None:
    """Goal: a tier that was taken away is not behind until the end of the consolidator.

    1. It leaves, and holds nothing. 2. What was under way then, events and a snapshot, brings no
    ghost. 3. The same life is back in the registry: it is asked, and answers.
    """
    disk, following = announcer(), Following()
    views = following.views
    following.change(views.joined(DISK, "disk", 1, 0))
    assert views.ask(0) == [DISK]
    following.hear(disk.cleared("start"), stored(disk, 1))
    late = snapshot(disk, 1)
    following.change(views.left(DISK, 1, 100))
    following.change(views.left("disk-tier-9", 1, 100))
    following.hear(stored(disk, 2), disk.cleared("stop"), stored(disk, 3), now_ms=100)
    following.change(views.snapshot(late, 100))
    views.snapshot_failed(DISK, 100)
    views.stream_lost(DISK, 100)
    assert following.held == set()
    assert (views.behind_count, views.is_current, views.ask(10**6)) == (0, True, [])


def test_a_source_comes_back_in_the_same_life_or_in_another() -> None:
    disk, following = announcer(), Following()
    views = following.views
    following.hear(disk.cleared("start"), stored(disk, 1))
    following.change(views.left(DISK, 1, 100))
    following.change(views.joined(DISK, "disk", 1, 200))
    assert views.ask(200) == [DISK]
    following.change(views.snapshot(snapshot(disk, 1), 200))
    assert following.held == {1}
    following.change(views.left(DISK, 1, 300))
    again = announcer(2)
    following.hear(again.cleared("start"), stored(again, 5))
    assert following.held == {5}


def test_a_source_that_left_before_anything_was_heard_is_no_other_life() -> None:
    """Its first event comes when it has left: it is of the life that the registry has named."""
    disk, following = announcer(7), Following()
    following.change(following.views.joined(DISK, "disk", 6, 0))
    following.change(following.views.left(DISK, 7, 100))
    following.hear(disk.cleared("start"), stored(disk, 1))
    assert following.held == set()


def test_a_source_that_left_long_ago_is_forgotten() -> None:
    following = Following()
    following.change(following.views.joined(DISK, "disk", 1, 0))
    following.change(following.views.left(DISK, 1, 100))
    for now_ms, count in ((100 + FORGET_MS, 1), (101 + FORGET_MS, 0)):
        assert following.views.ask(now_ms) == []
        assert following.views.source_count == count


def test_an_empty_run_has_no_block() -> None:
    """It names a parent alone."""
    name = block(7).hash
    runs = [Run(parent="0" * 32, hashes=[]), Run(parent="0" * 32, hashes=[name.hex()])]
    assert pairs_of(runs) == [(name, bytes(16))]


def test_the_registered_life_is_believed_with_a_lower_epoch() -> None:
    """The registry is another one, and counts from another start.

    1. A tier joins. 2. The stream still has the last event of a life with a higher epoch. 3. The
    registered life speaks.
    """
    before, disk, following = announcer(9), announcer(3), Following()
    following.change(following.views.joined(DISK, "disk", 3, 0))
    following.hear(before.cleared("start"), stored(before, 1))
    assert following.held == {1}
    following.hear(disk.cleared("start"), stored(disk, 2))
    assert following.held == {2}


def test_the_registered_life_answers_with_a_lower_epoch() -> None:
    """The event of the life before leaves a gap; the tier of today answers, and goes on."""
    before, disk, following = announcer(9), announcer(3), Following()
    disk.cleared("start")
    following.change(following.views.joined(DISK, "disk", 3, 0))
    before.cleared("start")
    following.hear(stored(before, 1))
    assert following.views.ask(0) == [DISK]
    following.change(following.views.snapshot(snapshot(disk, 2), 0))
    assert following.held == {2}
    following.hear(stored(disk, 3))
    assert following.held == {2, 3}


@pytest.mark.parametrize("has_left", [False, True])
def test_a_registered_life_is_asked_for_though_its_events_came_before_its_entry(
    has_left: bool,
) -> None:
    """Lives count from a lower epoch after the loss of a registry. What the new one says before it
    is named is taken for old."""
    old, new, following = announcer(50), announcer(20), Following()
    views = following.views
    following.change(views.joined(DISK, "disk", 50, 0))
    following.hear(old.cleared("start"), stored(old, 1), new.cleared("start"), stored(new, 2))
    assert (views.is_current, following.held) == (True, {1})
    if has_left:
        following.change(views.left(DISK, 50, 1))
    following.change(views.joined(DISK, "disk", 20, 2))
    assert views.ask(2) == [DISK]
    following.change(views.snapshot(snapshot(new, 2), 3))
    assert (views.is_current, following.held) == (True, {2})


@pytest.mark.parametrize("answers_as", [20, 50])
def test_an_answer_from_before_the_entry_of_a_life_with_a_lower_epoch_is_not_the_last(
    answers_as: int,
) -> None:
    """Its events came before its entry, and were taken for old ones. What was asked before may
    lack them, or be the answer of the life before."""
    old, new, following = announcer(50), announcer(20), Following()
    views = following.views
    following.change(views.joined(DISK, "disk", 50, 0))
    assert views.ask(0) == [DISK]
    following.hear(old.cleared("start"), stored(old, 1), new.cleared("start"))
    answers = {50: snapshot(old, 1), 20: snapshot(new)}
    following.hear(stored(new, 2))
    following.change(views.joined(DISK, "disk", 20, 2))
    following.change(views.snapshot(answers[answers_as], 3))
    assert views.ask(3) == [DISK]
    following.change(views.snapshot(snapshot(new, 2), 4))
    assert (views.is_current, following.held) == (True, {2})


def test_a_registered_life_takes_with_it_what_is_left_of_one_with_a_higher_epoch() -> None:
    """Goal: a tier that is gone does not keep the blocks of a former life.

    1. A life with a lower epoch is named, and leaves before it was heard. 2. Its events are late.
    3. A life with a higher epoch is asked for when it is named, though it was heard before.
    """
    old, new, following = announcer(50), announcer(20), Following()
    views = following.views
    following.change(views.joined(DISK, "disk", 50, 0))
    following.hear(old.cleared("start"), stored(old, 1))
    following.change(views.joined(DISK, "disk", 20, 1))
    following.change(views.left(DISK, 20, 2))
    following.hear(new.cleared("start"), stored(new, 2))
    assert (views.is_current, following.held) == (True, set())
    following.change(views.joined(DISK, "disk", 50, 3))
    assert views.ask(3) == [DISK]


def test_an_event_of_a_life_that_has_left_the_registry_is_late() -> None:
    disk, following = announcer(3), Following()
    following.change(following.views.joined(DISK, "disk", 3, 0))
    following.hear(disk.cleared("start"), stored(disk, 1))
    following.change(following.views.left(DISK, 3, 0))
    following.hear(stored(disk, 2))
    assert following.held == set()
    assert following.views.is_current


def test_a_large_book_of_an_ended_life_is_kept_until_its_memory_is_given_back_in_parts() -> None:
    """All at once it took 90 ms for a million blocks, when the last one was announced."""
    views, tier = TierViews(Counter()), announcer()
    views.take(tier.cleared("start"), 0)
    for event in tier.stored([block(number) for number in range(WHOLE_MAX + 1)]):
        views.take(event, 0)
    views.left(DISK, 1, 1)
    while views.is_going_on:
        assert not views.replaced.discarded
        views.go_on(1)
    steps = 0
    while views.replaced.discarded:
        views.replaced.discarded.shed(1_000)
        steps += 1
    assert steps > WHOLE_MAX // 2_000


def test_what_a_life_had_is_told_in_parts() -> None:
    """1. A tier with many blocks begins another life: it has none. 2. No step tells of more than
    some. 3. What it has again meanwhile is not told of.
    """
    count = 3 * TIER_BLOCKS_MAX
    views, first, second = TierViews(Counter()), announcer(1), announcer(2)
    views.take(first.cleared("start"), 0)
    for event in first.stored([block(number) for number in range(count)]):
        views.take(event, 0)
    assert views.block_count == count
    parts = [views.take(second.cleared("start"), 1)]
    assert views.block_count == 0
    back = count - 1
    views.take(stored(second, back), 2)
    while views.is_going_on:
        parts.append(views.go_on(2))
    gone = [name for part in parts for change in part for name in change.removed]
    assert max(sum(len(change.removed) for change in part) for part in parts) == TIER_BLOCKS_MAX
    assert sorted(gone) == sorted(block(number).hash for number in range(count - 1))
    assert len(parts) >= 3


# ---- lost events -----------------------------------------------------------------------------


class Viewer(Follower):
    """The views of a consolidator with one disk tier, and what their changes add up to."""

    def __init__(self, blocks_max: int = TIER_BLOCKS_MAX) -> None:
        self.views = TierViews(Counter(), blocks_max)
        self.told: set[SequenceHash] = set()
        super().__init__()

    def hear(self, event: Event) -> None:
        self.note(self.views.take(event, self.now_ms) + self.views.go_on(self.now_ms))

    def lose(self) -> None:
        self.views.stream_lost(DISK, self.now_ms)
        self.note([])

    def land(self, answer: SnapshotReply) -> None:
        self.note(self.views.snapshot(answer, self.now_ms))

    def leave(self) -> None:
        self.note(self.views.left(DISK, self.epoch, self.now_ms))

    def join(self) -> None:
        self.note(self.views.joined(DISK, "disk", self.epoch, self.now_ms))

    def wait(self) -> None:
        self.now_ms += 1_000
        while self.views.is_going_on:
            self.note(self.views.go_on(self.now_ms))
        self.note([])

    def note(self, changes: list[Change]) -> None:
        """Add up changes, and note a question that is due."""
        for change in changes:
            self.told.update(name for name, _ in change.stored)
            self.told.difference_update(change.removed)
        self.ask()

    def is_current(self) -> bool:
        return self.views.is_current

    def held(self) -> set[SequenceHash]:
        while self.views.is_going_on:
            self.note(self.views.go_on(self.now_ms))
        held = {name for name in self.views.blocks(NAMESPACE.hex()) if name is not None}
        assert self.told == held, "what the changes add up to"
        return held

    def ask(self) -> None:
        """Note a question that is due, and check the views."""
        questions = self.views.ask(self.now_ms)
        assert not (self.asked and questions), "a question is in flight"
        self.asked = self.asked or bool(questions)
        self.views.check()


MOVES: list[Move] = ["said", "waits", "lost", "notice", "flap", "answered", "lands"]


def test_lost_events_are_mended_whatever_snapshot_is_in_flight() -> None:
    """Goal: after each of 902 plays of four moves the views have what the disk tier has.

    Events are lost while a snapshot of before is in flight, or the tier leaves and joins.
    """
    assert sum(Viewer().play(moves) for moves in plays(MOVES, 4)) == 902


def test_snapshots_that_are_read_block_by_block_mend_as_much() -> None:
    """A step reads one block of a snapshot, or tells of one; an event comes after each."""
    for moves in plays([*MOVES, "clear waits", "life waits"], 4):
        Viewer(1).play(moves)


@pytest.mark.parametrize("seed", range(60))
def test_a_snapshot_that_is_read_in_parts_is_one_that_came_late(seed: int) -> None:
    """Goal: the same blocks as of a snapshot that is read at once, when its last part is read.

    Between the parts the tier stores and drops blocks; its events wait, and come in their order.
    """
    rng, disk = random.Random(seed), announcer()
    parts_of_it, at_once = Viewer(rng.randint(1, 4)), Viewer()
    there = set(rng.sample(range(1, 30), 12))
    first: list[Event] = [
        disk.cleared("start"),
        *disk.stored([block(number) for number in sorted(there)]),
    ]
    for viewer in (parts_of_it, at_once):
        for event in first:
            viewer.hear(event)
        viewer.views.stream_lost(DISK, 0)
        viewer.views.ask(0)
    lost = set(rng.sample(range(30, 60), 5))
    disk.stored([block(number) for number in lost])
    there = {number for number in there | lost if rng.random() < 0.7}
    answer = snapshot(disk, *there)
    parts_of_it.note(parts_of_it.views.snapshot(answer, 1))
    events: list[Event] = []
    while parts_of_it.views.is_going_on:
        number = rng.randint(1, 60)
        if number in there:
            events += disk.removed([block(number)], "evicted")
        else:
            events += disk.stored([block(number)])
        there ^= {number}
        parts_of_it.hear(events[-1])
    for event in events:
        at_once.hear(event)
    at_once.note(at_once.views.snapshot(answer, 1))
    assert parts_of_it.held() == at_once.held() == {block(number).hash for number in there}
    assert parts_of_it.is_current()


def test_a_clear_or_a_life_from_before_a_loss_does_not_hide_it() -> None:
    """The notice overtakes what waits in the inbox; what was lost came after that."""
    moves: list[Move] = [*MOVES, "clear waits", "life waits"]
    assert sum(Viewer().play(play) for play in plays(moves, 3)) == 384
