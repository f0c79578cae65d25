"""The lower tiers: what each has, how it is followed, and where a block is taken from."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.follow import FollowLimits
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.lower_tier_view import (
    AVOID_MAX,
    AVOID_MS,
    GONE_INSTANCES_MAX,
    LowerTierView,
)
from kvbm_host_tier.core.lower_tiers import LowerTiers, tier_of
from kvbm_host_tier.core.messages import AskLowerTierSnapshot

from tests.libs.lost_events import Follower, Move, block, plays
from tests.services.host_tier.helpers import name, on_disk

LIMITS = FollowLimits()


def has(below: LowerTiers, tier: Tier, *wanted: int) -> None:
    """A tier announces blocks."""
    source = Announcer(host="h", source=f"{tier}-tier-0", tier=tier, epoch=1)
    events: list[Event] = [source.cleared("start")]
    events += source.stored([on_disk(n) for n in wanted])
    for event in events:
        below.views[tier].apply("0", event)


def test_the_disk_is_nearer_and_the_bucket_stands_in_for_it() -> None:
    """While the disk is avoided, or when it has lost the block."""
    below = LowerTiers()
    has(below, "disk", 1)
    has(below, "object", 1, 2)
    assert below.source(name(1), 0) == ("disk", "0")
    assert below.source(name(2), 0) == ("object", "0")
    below.views["disk"].avoid(name(1), 0)
    assert below.source(name(1), 0) == ("object", "0")
    assert below.source(name(1), AVOID_MS) == ("disk", "0")
    below.views["disk"].forget(name(1))
    assert below.source(name(1), AVOID_MS) == ("object", "0")
    below.views["object"].avoid(name(2), 0)
    assert below.source(name(2), 0) is None
    assert name(2) in below


def test_hits_are_told_while_any_tier_lacks_the_block() -> None:
    """Without tiers there may be some that we have not heard of: then all are told."""
    below = LowerTiers()
    assert below.missing([name(1)]) == [name(1)]
    has(below, "disk", 1, 2)
    assert below.missing([name(1), name(3)]) == [name(3)]
    has(below, "object", 1)
    assert below.missing([name(1), name(2), name(3)]) == [name(2), name(3)]


def test_each_tier_is_asked_for_its_own_snapshot() -> None:
    """They are told apart by the tier, not by the instance."""
    below = LowerTiers()
    assert below.views["disk"].joined("0") == [AskLowerTierSnapshot("0", "disk")]
    assert below.views["object"].joined("0") == [AskLowerTierSnapshot("0", "object")]
    below.views["object"].left("0")
    assert below.views["disk"].is_followed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("disk-tier-0", ("disk", "0")),
        ("disk-tier-0-1", ("disk", "0-1")),
        ("object-tier-a", ("object", "a")),
        ("host-tier-0", None),
        ("index-0", None),
        ("disk-tier-", None),
        ("disk-tier", None),
    ],
)
def test_a_source_names_its_tier(source: str, expected: tuple[str, str] | None) -> None:
    """Instances may have dashes."""
    assert tier_of(source) == expected


def disk(*, epoch: int = 1, instance: str = "0") -> Announcer:
    """A disk tier's voice; its first event, `cleared`, has been said."""
    source = Announcer(host="h", source=f"disk-tier-{instance}", tier="disk", epoch=epoch)
    source.cleared("start")
    return source


def stored(source: Announcer, *wanted: int) -> Event:
    """Its next event."""
    [event] = source.stored([on_disk(number) for number in wanted])
    return event


def removed(source: Announcer, *wanted: int) -> Event:
    """Its next event."""
    [event] = source.removed([on_disk(number) for number in wanted], "evicted")
    return event


def snapshot(source: Announcer, *wanted: int) -> LowerSnapshot:
    """What it says it holds, as of its last event."""
    return LowerSnapshot.of(source.snapshot([on_disk(number) for number in wanted]))


def following(source: Announcer, *wanted: int) -> LowerTierView:
    """A view that has followed a disk tier from its first event on."""
    view = LowerTierView()
    first = Announcer(host="h", source=source.source, tier="disk", epoch=source.epoch)
    assert view.apply("0", first.cleared("start")) == (0, [])
    if wanted:
        view.apply("0", stored(source, *wanted))
    return view


def content(view: LowerTierView) -> set[int]:
    """Which of blocks 1 to 9 it believes to be on disk."""
    view.check()
    return {number for number in range(1, 10) if name(number) in view}


def test_it_follows_events() -> None:
    """Stored, stored again, removed, cleared. New blocks are counted once."""
    source = disk()
    view = following(source)
    assert view.apply("0", stored(source, 1, 2)) == (2, [])
    assert view.apply("0", stored(source, 2, 3)) == (1, [])
    assert view.apply("0", removed(source, 1)) == (0, [])
    assert content(view) == {2, 3}
    assert view.source(name(2), 0) == "0"
    assert view.apply("0", source.cleared("reformatted")) == (0, [])
    assert content(view) == set()


def test_a_repeated_event_changes_nothing() -> None:
    """The bus delivers `stored 1` again after `removed 1`."""
    source = disk()
    view = following(source)
    again = stored(source, 1)
    view.apply("0", again)
    view.apply("0", removed(source, 1))
    assert view.apply("0", again) == (0, [])
    assert content(view) == set()


def test_a_gap_asks_for_a_snapshot_once() -> None:
    """Event 3 is missed. 4 is applied and asks; 6, after another gap, does not ask again."""
    source = disk()
    view = following(source, 1)
    stored(source, 2)
    assert view.apply("0", stored(source, 3)) == (1, [AskLowerTierSnapshot("0")])
    stored(source, 4)
    assert view.apply("0", stored(source, 5)) == (1, [])
    view.snapshot("0", snapshot(source, 1, 2, 3, 4, 5))
    assert content(view) == {1, 2, 3, 4, 5}
    assert view.apply("0", stored(source, 6)) == (1, []), "the gap is healed"


def test_who_comes_late_asks_for_what_was_before() -> None:
    """The host tier was restarted beside a disk tier that is at event 3."""
    source = disk()
    stored(source, 1)
    view = LowerTierView()
    assert view.joined("0") == [AskLowerTierSnapshot("0")]
    assert view.joined("0") == [], "one question at a time"
    view.snapshot("0", snapshot(source, 1))
    assert content(view) == {1}
    assert view.apply("0", stored(source, 2)) == (1, [])


def test_a_snapshot_that_events_have_overtaken_still_counts() -> None:
    """1. A snapshot of 1, 2 leaves the disk tier. 2. `stored 3` is faster. 3. Nothing is lost.

    Otherwise a busy disk tier would never be known: every snapshot is overtaken.
    """
    source = disk()
    stored(source, 1, 2)
    view = LowerTierView()
    view.joined("0")
    reply = snapshot(source, 1, 2)
    view.apply("0", stored(source, 3))
    view.snapshot("0", reply)
    assert content(view) == {1, 2, 3}
    assert view.apply("0", stored(source, 4)) == (1, []), "the position did not go back"


def test_a_newer_snapshot_is_the_whole_truth() -> None:
    """What it does not list is gone; an event that it covers is old."""
    source = disk()
    view = following(source, 1, 2)
    view.joined("0")
    late = removed(source, 1)
    view.snapshot("0", snapshot(source, 2, 3))
    assert content(view) == {2, 3}
    assert view.apply("0", late) == (0, [])


def test_a_snapshot_of_a_former_life_is_ignored() -> None:
    """It was on its way when the disk tier restarted."""
    old, new = disk(), disk(epoch=2)
    view = following(old)
    view.joined("0")
    view.apply("0", stored(new, 5))
    view.snapshot("0", snapshot(old, 1))
    assert content(view) == {5}


def test_no_snapshot_changes_nothing_and_may_be_asked_again() -> None:
    """The disk tier did not answer."""
    view = following(disk(), 1)
    view.joined("0")
    view.snapshot("0", None)
    assert content(view) == {1}
    assert view.joined("0") == [AskLowerTierSnapshot("0")]


def test_a_new_life_begins_empty() -> None:
    """`cleared` with a higher epoch; after that, events of the old life are old."""
    old, new = disk(), Announcer(host="h", source="disk-tier-0", tier="disk", epoch=2)
    view = following(old, 1)
    assert view.epoch("0") == 1
    assert view.apply("0", new.cleared("start")) == (0, [])
    assert view.apply("0", stored(old, 2)) == (0, [])
    assert content(view) == set()
    assert view.epoch("0") == 2


def test_a_new_life_whose_first_word_got_lost_has_none_of_the_old_blocks() -> None:
    """Event 2 of life 2 comes, event 1 has not: what life 1 had is gone all the same."""
    view = following(disk(), 1)
    assert view.apply("0", stored(disk(epoch=2), 5)) == (1, [AskLowerTierSnapshot("0")])
    assert content(view) == {5}


def test_a_missing_event_that_comes_late_is_applied_below_what_has_waited() -> None:
    """1. `removed 1` overtakes `stored 1, 2`. 2. Block 2 comes, and block 1 does not come back."""
    source = disk()
    view = following(source)
    late = stored(source, 1, 2)
    assert view.apply("0", removed(source, 1)) == (0, [AskLowerTierSnapshot("0")])
    assert view.apply("0", late) == (2, [])
    assert content(view) == {2}
    view.snapshot("0", snapshot(source))
    assert content(view) == {2}, "nothing was missing any more when the answer came"


def test_a_block_that_leaves_while_a_snapshot_is_on_its_way_is_gone() -> None:
    """1. A snapshot of 1, 2 leaves the disk tier. 2. `removed 1` is faster. 3. It stays removed."""
    source = disk()
    stored(source, 1, 2)
    view = LowerTierView()
    view.joined("0")
    reply = snapshot(source, 1, 2)
    view.apply("0", removed(source, 1))
    view.snapshot("0", reply)
    assert content(view) == {2}


def test_an_event_after_another_gap_outlasts_a_snapshot() -> None:
    """The snapshot closes the first gap, not the second: what is behind that is believed on."""
    source = disk()
    view = following(source)
    stored(source, 1)
    view.apply("0", stored(source, 2))
    reply = snapshot(source, 1, 2)
    stored(source, 3)
    view.apply("0", stored(source, 4))
    view.snapshot("0", reply)
    assert content(view) == {1, 2, 4}


def test_a_snapshot_that_did_not_come_is_asked_for_again_after_a_pause() -> None:
    """At 499 ms the next event is too early; one question is in flight at a time; pauses double."""
    source = disk()
    view = following(source)
    stored(source, 1)
    assert view.joined("0", 0) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", None, 0)
    assert view.apply("0", stored(source, 2), 499) == (1, [])
    assert view.apply("0", stored(source, 3), 500) == (1, [AskLowerTierSnapshot("0")])
    assert view.apply("0", stored(source, 4), 9_999) == (1, [])
    view.snapshot("0", None, 10_000)
    assert view.apply("0", stored(source, 5), 10_999) == (1, [])
    assert view.apply("0", stored(source, 6), 11_000) == (1, [AskLowerTierSnapshot("0")])
    view.snapshot("0", snapshot(source, 1, 2, 3, 4, 5, 6), 11_000)
    assert view.apply("0", stored(source, 7), 99_999) == (1, [])
    assert content(view) == {1, 2, 3, 4, 5, 6, 7}


def test_a_malformed_event_or_snapshot_is_passed_over_and_asked_about() -> None:
    """Valid JSON without a valid hash in it: the view goes on as it was."""
    source = disk()
    view = following(source, 1)
    wrong = msgspec.structs.replace(source.removed([on_disk(1)], "evicted")[0], hashes=["no"])
    assert view.apply("0", wrong) == (0, [AskLowerTierSnapshot("0")])
    view.snapshot("0", None)  # As if nothing had come: the shell has read a bad hash.
    assert content(view) == {1}
    assert view.apply("0", stored(source, 3), 500) == (1, [AskLowerTierSnapshot("0")])
    view.snapshot("0", snapshot(source, 3), 500)
    assert content(view) == {3}


def test_a_malformed_event_that_waits_is_passed_over_as_well() -> None:
    """A snapshot from before it came leaves it behind a gap; the next one covers it."""
    source = disk()
    view = following(source)
    early = snapshot(source, 1)
    stored(source, 1)
    wrong = msgspec.structs.replace(source.removed([on_disk(1)], "evicted")[0], hashes=["no"])
    assert view.apply("0", wrong) == (0, [AskLowerTierSnapshot("0")])
    view.snapshot("0", early)
    assert content(view) == {1}
    assert view.apply("0", stored(source, 2), 500) == (1, [AskLowerTierSnapshot("0")])
    view.snapshot("0", snapshot(source, 2), 500)
    assert content(view) == {2}


def test_events_that_find_no_room_to_wait_are_believed_until_the_snapshot() -> None:
    """One too many after a gap: it is applied, and only a snapshot says what is true."""
    source = disk()
    view = following(source)
    late = stored(source, 1)
    for number in range(10, LIMITS.waiting_max + 10):
        view.apply("0", stored(source, number))
    assert view.apply("0", stored(source, 2)) == (1, [])
    assert view.apply("0", late) == (1, [])
    assert content(view) == {1, 2}
    view.snapshot("0", snapshot(source, 2))
    assert content(view) == {2}
    assert view.apply("0", stored(source, 3)) == (1, [])


def test_the_answer_of_an_instance_that_has_left_is_ignored() -> None:
    """Its blocks can no longer be had."""
    source = disk()
    view = following(source)
    view.joined("0")
    view.left("0")
    view.snapshot("0", snapshot(source, 1))
    assert content(view) == set()
    assert view.instances == []


def test_a_lost_disk_tier_takes_its_blocks_only() -> None:
    """Instances 0 and 1; 0 leaves. What both had belongs to who said it last."""
    zero, one = disk(), disk(instance="1")
    view = following(zero, 1, 2)
    view.apply("1", stored(one, 2, 3))
    assert view.apply("0", removed(zero, 2)) == (0, [])
    assert content(view) == {1, 2, 3}, "instance 1 has it still"
    view.left("0")
    assert content(view) == {2, 3}
    assert view.instances == ["1"]


def test_an_event_that_was_under_way_brings_no_instance_back() -> None:
    """Its own life's events are passed over until it joins; those of a new life are heard."""
    source = disk()
    view = following(source, 1)
    view.left("0")
    for event in (stored(source, 2), stored(source, 3), removed(source, 3), source.cleared("stop")):
        assert view.apply("0", event) == (0, [])
    assert (content(view), view.instances, view.is_followed) == (set(), [], False)
    assert view.tick(3_600_000) == []
    assert view.joined("0", 3_600_000) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(source, 2), 3_600_000)
    assert (content(view), view.is_current) == ({2}, True)
    view.left("0")
    again = disk(epoch=2)
    view.apply("0", stored(again, 4))
    assert (content(view), view.instances, view.epoch("0")) == ({4}, ["0"], 2)


def test_an_instance_that_left_unheard_is_brought_back_by_no_event() -> None:
    """It joined, and its first event comes when it has left: the registry has named that life."""
    source = disk()
    view = LowerTierView()
    view.joined("0")
    view.left("0", epoch=1)
    assert view.apply("0", source.cleared("start")) == (0, [])
    assert view.apply("0", stored(source, 1)) == (0, [])
    assert (content(view), view.instances, view.tick(3_600_000)) == (set(), [], [])


def test_instances_that_came_and_went_are_remembered_up_to_a_bound() -> None:
    """The ones that left last; one that is there is none of them."""
    view = following(disk(), 1)
    for number in range(1, GONE_INSTANCES_MAX + 3):
        view.apply(f"{number}", disk(instance=f"{number}").cleared("start"))
        view.left(f"{number}")
    known = [number for number in range(GONE_INSTANCES_MAX + 3) if view.epoch(f"{number}")]
    assert known == [0, *range(3, GONE_INSTANCES_MAX + 3)]
    assert view.instances == ["0"]


def test_forgotten_until_it_is_announced_anew() -> None:
    """The disk tier said that it does not have it."""
    source = disk()
    view = following(source, 1)
    view.forget(name(1))
    view.forget(name(1))
    assert view.source(name(1), 0) is None
    view.apply("0", stored(source, 1))
    assert view.source(name(1), 0) is not None


def test_avoided_for_a_while_or_until_it_is_announced_anew() -> None:
    """A fill of 1 failed at 100."""
    source = disk()
    view = following(source, 1)
    view.avoid(name(1), 100)
    assert name(1) in view, "it is there, most likely"
    assert view.source(name(1), 99 + AVOID_MS) is None
    assert view.source(name(1), 100 + AVOID_MS) is not None
    view.avoid(name(1), 100)
    view.apply("0", stored(source, 1))
    assert view.source(name(1), 100) is not None


def test_what_is_avoided_is_bounded() -> None:
    """The oldest failure is forgiven first."""
    view = following(disk(), 1)
    view.avoid(name(1), 0)
    for number in range(10, AVOID_MAX + 10):
        view.avoid(name(number), 0)
    assert view.source(name(1), 0) is not None


def test_a_block_that_left_without_a_reason_is_remembered() -> None:
    """The wire's default of `reason` is empty."""
    source = disk()
    view = following(source, 1)
    view.apply("0", msgspec.structs.replace(removed(source, 1), reason=""))
    fate = view.departures.get(name(1))
    assert fate is not None
    assert fate.why == "unknown"


# ---- lives with lower epochs -----------------------------------------------------------------


def test_the_registered_life_is_believed_with_a_lower_epoch() -> None:
    """The registry is another one, and counts from another start.

    1. The last word of a life before, with a higher epoch. 2. The registry names a life with a
    lower one. 3. That life speaks.
    """
    before, today = disk(epoch=9), Announcer(host="h", source="disk-tier-0", tier="disk", epoch=3)
    view = LowerTierView()
    view.apply("0", stored(before, 1))
    view.apply("0", before.cleared("stop"))
    assert view.joined("0", 0, 3) == []
    view.apply("0", today.cleared("start"))
    view.apply("0", stored(today, 2))
    assert (content(view), view.epoch("0"), view.is_current) == ({2}, 3, True)


def test_the_registered_life_answers_with_a_lower_epoch() -> None:
    """It is silent at first, and what the life before said last is not there any more."""
    before, today = disk(epoch=9), disk(epoch=3)
    view = following(before, 1)
    assert view.joined("0", 0, 3) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(today, 2))
    assert (content(view), view.epoch("0"), view.is_current) == ({2}, 3, True)
    view.check()
    assert view.apply("0", stored(today, 4)) == (1, [])
    assert content(view) == {2, 4}
    assert view.apply("0", stored(disk(epoch=2), 5)) == (0, [])
    assert content(view) == {2, 4}


def test_a_life_that_stops_late_does_not_hide_the_registered_one() -> None:
    """The registered life was followed already, and is silent."""
    before, today = disk(epoch=9), disk(epoch=3)
    view = following(today, 1)
    assert view.joined("0", 0, 3) == [], "all is known of it"
    assert view.apply("0", before.cleared("stop")) == (0, [AskLowerTierSnapshot("0")])
    view.snapshot("0", snapshot(today, 1))
    assert (content(view), view.epoch("0"), view.is_current) == ({1}, 3, True)


def test_an_event_of_the_registered_life_ends_another_one() -> None:
    """What it said before is missing then."""
    before, today = disk(epoch=9), disk(epoch=3)
    view = following(today, 1)
    view.joined("0", 0, 3)
    view.apply("0", stored(before, 5))
    view.snapshot("0", None)
    assert view.apply("0", stored(today, 2)) == (1, [AskLowerTierSnapshot("0")])
    assert content(view) == {2}
    view.snapshot("0", snapshot(today, 1, 2))
    assert (content(view), view.epoch("0"), view.is_current) == ({1, 2}, 3, True)


def test_a_life_that_is_named_again_while_another_is_followed_is_asked() -> None:
    before, today = disk(epoch=9), disk(epoch=3)
    view = following(before, 1)
    view.joined("0", 0, 3)
    view.snapshot("0", snapshot(before, 1))
    assert view.is_current, "the other one has answered"
    assert view.joined("0", 0, 3) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(today, 2))
    assert (content(view), view.epoch("0")) == ({2}, 3)


def test_the_late_entry_of_an_old_life_does_not_end_a_newer_one() -> None:
    """The registry lags behind the events. 1. An old life joins late. 2. Its source answers as the
    newer one. 3. The entry of that one comes, and nothing of the old life counts."""
    old, newer = disk(epoch=3), disk(epoch=9)
    view = following(newer, 1)
    assert view.joined("0", 0, 3) == [AskLowerTierSnapshot("0")]
    assert content(view) == {1}
    view.snapshot("0", snapshot(newer, 1))
    assert (content(view), view.epoch("0"), view.is_current) == ({1}, 9, True)
    assert view.joined("0", 0, 9) == [], "all is known of it"
    assert view.apply("0", stored(old, 7)) == (0, [])
    assert view.apply("0", stored(newer, 2)) == (1, [])
    assert (content(view), view.epoch("0")) == ({1, 2}, 9)


@pytest.mark.parametrize("answers_as", [3, 9])
def test_an_answer_from_before_the_entry_of_a_life_with_a_lower_epoch_is_not_the_last(
    answers_as: int,
) -> None:
    """Its events came before its entry, and were taken for old ones. What was asked before may
    lack them, or be the answer of the life before."""
    before, today = disk(epoch=9), disk(epoch=3)
    view = LowerTierView()
    assert view.joined("0", 0, 9) == [AskLowerTierSnapshot("0")]
    view.apply("0", stored(before, 1))
    answer = snapshot(before, 1) if answers_as == 9 else snapshot(today)
    view.apply("0", stored(today, 2))
    assert view.joined("0", 1, 3) == []
    view.snapshot("0", answer, 2)
    assert view.tick(2) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(today, 2), 3)
    assert (content(view), view.epoch("0"), view.is_current) == ({2}, 3, True)


def test_a_registered_life_that_has_left_is_believed_no_more() -> None:
    """Its late events bring nothing back, nor does its answer; the next life is believed again."""
    before, today, following_life = disk(epoch=9), disk(epoch=3), disk(epoch=4)
    view = following(before, 1)
    view.joined("0", 0, 3)
    view.left("0", 3)
    view.snapshot("0", snapshot(today, 2))
    assert view.apply("0", stored(today, 2)) == (0, [])
    assert (content(view), view.instances) == (set(), [])
    assert view.joined("0", 0, 4) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(following_life, 5))
    assert (content(view), view.epoch("0"), view.is_current) == ({5}, 4, True)


def test_a_life_that_is_named_again_is_not_asked_again() -> None:
    """Each change of its entry names it."""
    source = disk()
    view = LowerTierView()
    assert view.joined("0", 0, 1) == [AskLowerTierSnapshot("0")]
    view.snapshot("0", snapshot(source, 1))
    assert view.joined("0", 0, 1) == []
    assert view.is_current


# ---- lost events -----------------------------------------------------------------------------


class Viewer(Follower):
    """A view of one disk tier, which takes snapshots in parts of two blocks."""

    def __init__(self) -> None:
        self.view = LowerTierView(limits=HostTierLimits(below_piece=2))
        super().__init__()

    def hear(self, event: Event) -> None:
        _, questions = self.view.apply("0", event, self.now_ms)
        self.note(questions)

    def lose(self) -> None:
        self.note(self.view.events_lost(self.now_ms))

    def land(self, answer: SnapshotReply) -> None:
        self.view.snapshot("0", LowerSnapshot.of(answer), self.now_ms)
        self.note([])

    def leave(self) -> None:
        self.view.left("0", self.epoch)

    def join(self) -> None:
        self.note(self.view.joined("0", self.now_ms))

    def wait(self) -> None:
        self.now_ms += 1_000
        self.note(self.view.tick(self.now_ms))

    def is_current(self) -> bool:
        return self.view.is_settled

    def held(self) -> set[SequenceHash]:
        return {block(number).hash for number in range(20) if block(number).hash in self.view}

    def note(self, questions: list[AskLowerTierSnapshot]) -> None:
        """Note a question, and check the view."""
        assert not (self.asked and questions), "a question is in flight"
        self.asked = self.asked or bool(questions)
        self.view.check()


MOVES: list[Move] = ["said", "waits", "lost", "notice", "answered", "lands"]


def test_lost_events_are_mended_whatever_snapshot_is_in_flight() -> None:
    """Goal: after each of 364 plays of four moves the view has what the disk tier has.

    Events are lost while a snapshot is in flight that was made before.
    """
    assert sum(Viewer().play(moves) for moves in plays(MOVES, 4)) == 364


def test_a_clear_or_a_life_from_before_a_loss_does_not_hide_it() -> None:
    """The notice overtakes what waits in the inbox; what was lost came after that."""
    moves: list[Move] = [*MOVES, "clear waits", "life waits"]
    assert sum(Viewer().play(play) for play in plays(moves, 3)) == 235


def test_a_snapshot_in_flight_when_a_tier_left_may_lack_later_events() -> None:
    """What a tier says that has left the registry is not heard. It joins again, and is silent."""
    Viewer().play(["notice", "answered", "flap"])
