"""Lower tiers with very many blocks: no step goes over all of them, and no answer is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Cleared, Event, Removed, Stored
from kvbm_host_tier.core.filter_messages import NamesChanged
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.lower_tier_view import LowerTierView
from kvbm_host_tier.core.messages import (
    AskLowerTierSnapshot,
    Effect,
    Input,
    LowerTierEvent,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
    Tick,
)

from tests.services.host_tier.helpers import Host, name, numbers, of, on_disk

MANY = 40_000
NUMBERS = range(1, 17)
"""The blocks of the model."""
PIECE = HostTierLimits().below_piece
STEP_MOST = 2 * PIECE
"""Blocks of a piece, and of a last part that is too many."""


class LargeHost(Host):
    """A host tier that counts how many blocks each step concerns: the filter hears of all."""

    def __init__(self) -> None:
        self.most = 0
        super().__init__(miss_filter=True)

    def step(self, event: Input) -> list[Effect]:
        effects = super().step(event)
        changes = [one for one in of(effects, NamesChanged) if not one.is_new]
        self.most = max(self.most, sum(len(one.came) + len(one.left) for one in changes))
        return effects

    @property
    def known(self) -> int:
        """Blocks that are known to be on disk."""
        return self.figure("known_on_disk")

    def work(self) -> int:
        """Let ticks come until nothing is left to be done; return how many that took."""
        ticks = 0
        while not self.core.view.is_quiet:
            self.now_ms += 50
            self.step(Tick())
            ticks += 1
            assert ticks < 1_000
        return ticks


def large() -> LargeHost:
    """The disk tier has announced very many blocks."""
    host = LargeHost()
    host.disk_stored(*range(1, MANY + 1))
    host.work()
    assert host.known == MANY
    host.most = 0
    return host


def leaves(host: LargeHost) -> None:
    host.step(LowerTierLeft("0", epoch=1))


def restarts(host: LargeHost) -> None:
    host.disk_restarts()


def is_cleared(host: LargeHost) -> None:
    host.step(LowerTierEvent("0", host.disk.cleared("reset")))


@pytest.mark.parametrize("ends", [leaves, restarts, is_cleared])
def test_what_ends_is_there_no_more_at_once_and_forgotten_in_parts(
    ends: Callable[[LargeHost], None],
) -> None:
    host = large()
    ends(host)
    assert host.known == 0
    assert host.found(host.look_up(MANY)).reason == "not_stored"
    assert host.work() > 1
    assert 0 < host.most <= STEP_MOST
    assert host.figure("filter_names") == 0


def test_a_snapshot_is_taken_in_by_parts() -> None:
    host = LargeHost()
    held = LowerSnapshot.of(host.disk.snapshot([on_disk(number) for number in range(1, MANY + 1)]))
    host.step(LowerTierJoined("0"))
    host.step(LowerTierSnapshot("0", held))
    assert PIECE <= host.known < MANY
    assert host.work() > 1
    assert host.known == MANY
    assert 0 < host.most <= STEP_MOST


def test_until_a_snapshot_is_taken_in_what_was_there_before_is_believed() -> None:
    """A gap is healed: blocks are found on, and what the snapshot lacks is gone at its end."""
    host = large()
    host.disk.seq += 1
    [ask] = of(
        host.step(LowerTierEvent("0", host.disk.stored([on_disk(MANY + 1)])[0])),
        AskLowerTierSnapshot,
    )
    kept = range(2, MANY, 2)
    held = LowerSnapshot.of(host.disk.snapshot([on_disk(number) for number in kept]))
    host.step(LowerTierSnapshot(ask.instance, held))
    assert host.known == MANY + 1
    host.work()
    assert host.known == len(kept)
    assert host.most <= STEP_MOST


def test_events_that_waited_for_a_snapshot_are_said_again_in_parts() -> None:
    """Goal: a disk tier that announces very many blocks while its snapshot is on its way is taken
    in by parts, the newest word first: block 7 has left, and does not come back for a while."""
    host = LargeHost()
    host.disk.cleared("start")
    held = LowerSnapshot.of(host.disk.snapshot([on_disk(7)]))
    host.step(LowerTierJoined("0"))
    host.disk_stored(*range(1, MANY + 1))
    host.disk_removed(7)
    host.step(LowerTierSnapshot("0", held))
    while not host.core.view.is_quiet:
        assert not host.core.view.may_find(name(7))
        host.step(Tick())
    assert host.known == MANY - 1


def test_a_block_that_no_fill_has_found_is_brought_back_by_no_older_word() -> None:
    """The snapshot has it: it left after that."""
    disk, view = Disk("0", NUMBERS), LowerTierView(limits=HostTierLimits(below_piece=2))
    disk.change(NUMBERS)
    for event in disk.unsent:
        view.apply("0", event)
    view.joined("0")
    view.snapshot("0", disk.held())
    view.forget(name(16))
    ticks = 0
    while not view.is_settled:
        view.tick(0)
        ticks += 1
    assert ticks > 1
    assert [number for number in NUMBERS if name(number) not in view] == [16]
    [again] = disk.voice.stored([on_disk(16)])
    view.apply("0", again)
    assert name(16) in view


# --- a brute-force model ------------------------------------------------------------------------


@dataclass
class Disk:
    """A disk tier, what it has said, and what a reader of all that has come would believe."""

    instance: str
    blocks: Sequence[int]
    truth: set[int] = field(default_factory=set)
    unsent: list[Event] = field(default_factory=list)
    late: list[Event] = field(default_factory=list)
    heard: list[Event] = field(default_factory=list)
    answers: list[LowerSnapshot | None] = field(default_factory=list)
    words: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The newest word that has come of each block: the number of its event, and whether it is
    there."""
    epoch: int = 0
    named: int = 0
    """The life that the registry names; 0: none."""
    epochs: list[int] = field(default_factory=lambda: [*range(1, 1_000)])
    """What a life may have."""
    life: int = 0
    former: int = 0
    lives: list[int] = field(default_factory=list)
    """All lives, as they began."""
    known: set[int] = field(default_factory=set)
    """Lives of which something has come."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, *, skip: int = 0) -> None:
        """Begin a life with the blocks of the one before; after a `skip` others may have a lower
        epoch, because the registry is another one."""
        self.former, self.life = self.life, self.epochs.pop(skip)
        self.lives.append(self.life)
        source = f"disk-tier-{self.instance}"
        self.voice = Announcer(host="h", source=source, tier="disk", epoch=self.life)
        self.unsent.append(self.voice.cleared("start"))
        self.unsent += self.voice.stored([on_disk(number) for number in sorted(self.truth)])

    def change(self, wanted: Sequence[int]) -> None:
        """Store what of this is not there, and remove the rest of it."""
        for number in wanted:
            if number not in self.blocks:
                continue
            if number in self.truth:
                self.unsent += self.voice.removed([on_disk(number)], "evicted")
            else:
                self.unsent += self.voice.stored([on_disk(number)])
            self.truth ^= {number}

    def empty(self, reason: str) -> None:
        """Clear all."""
        self.truth.clear()
        self.unsent.append(self.voice.cleared(reason))

    def held(self) -> LowerSnapshot:
        """Return a snapshot as of now."""
        return LowerSnapshot.of(self.voice.snapshot([on_disk(n) for n in sorted(self.truth)]))

    def hear(self, epoch: int, seq: int, said: dict[int, bool]) -> None:
        """Note what has come of blocks."""
        if epoch < self.epoch and epoch != self.named:
            return
        if epoch != self.epoch:
            self.epoch = epoch
            self.words.clear()
        for number, is_there in said.items():
            if seq >= self.words.get(number, (0, False))[0]:
                self.words[number] = (seq, is_there)

    def is_lost(self, event: Event) -> bool:
        """Tell whether an event cannot come any more: a stream keeps the order of lives. Readers
        count on that where the registry has begun again, and a former life's epoch is higher."""
        later = self.lives[self.lives.index(event.epoch) + 1 :]
        return event.epoch > self.epoch and not self.known.isdisjoint(later)

    def hear_event(self, event: Event) -> None:
        """Note what an event says."""
        match event:
            case Stored(runs=runs):
                said = {number: True for run in runs for number in numbers(run.hashes)}
            case Removed(hashes=hashes):
                said = dict.fromkeys(numbers(hashes), False)
            case Cleared():
                said = dict.fromkeys(self.blocks, False)
        self.hear(event.epoch, event.seq, said)


class Follower:
    """A view with pieces of two blocks, and disk tiers whose words come, get lost or come late."""

    def __init__(self) -> None:
        self.view = LowerTierView(limits=HostTierLimits(below_piece=2))
        self.disks = [Disk("0", range(1, 13)), Disk("1", range(9, 17))]
        self.now_ms = 0
        self.gone: set[str] = set()
        for disk in self.disks:
            self.do("change", disk, NUMBERS)
            self.do("deliver", disk, range(99))

    def do(self, verb: str, disk: Disk, wanted: Sequence[int]) -> None:
        match verb:
            case "change":
                disk.change(wanted)
            case "empty":
                disk.empty("reset" if len(wanted) % 2 else "stop")
            case "restart":
                disk.begin(skip=3 * (len(wanted) % 2))
            case "named late":
                if disk.former:
                    self.join(disk, disk.former)
            case "deliver":
                for event in disk.unsent[: len(wanted)]:
                    self.deliver(disk, event)
                del disk.unsent[: len(wanted)]
            case "lose":
                disk.late += disk.unsent[:1]
                del disk.unsent[:1]
            case "late":
                for event in disk.late[:1]:
                    self.deliver(disk, event)
                del disk.late[:1]
            case "again":
                for event in disk.heard[-len(wanted) :][:1]:
                    self.deliver(disk, event)
            case "gap":
                # A snapshot comes, and some words before and after it are late.
                self.now_ms += 30_000
                for one in GAP:
                    self.do(one, disk, wanted)
            case "serve":
                disk.answers = [disk.held() if one is None else one for one in disk.answers]
            case "answer":
                self.answer(disk)
            case "leave":
                self.view.left(disk.instance, disk.voice.epoch)
                self.gone.add(disk.instance)
                disk.named = 0
                disk.words.clear()
            case "join":
                self.join(disk)
            case "lookup":
                for number in wanted:
                    if number not in disk.truth | self.other(disk).truth:
                        self.view.forget(name(number))
            case _:
                self.tick()
        self.compare()

    def other(self, disk: Disk) -> Disk:
        return self.disks[1 - int(disk.instance)]

    def deliver(self, disk: Disk, event: Event) -> None:
        if disk.is_lost(event):
            return
        disk.known.add(event.epoch)
        is_gone = disk.instance in self.gone and event.epoch <= self.view.epoch(disk.instance)
        if not is_gone:
            self.gone.discard(disk.instance)
            disk.hear_event(event)
        disk.heard.append(event)
        _, questions = self.view.apply(disk.instance, event, self.now_ms)
        self.asked(questions)

    def join(self, disk: Disk, epoch: int = 0) -> None:
        self.gone.discard(disk.instance)
        disk.named = epoch or disk.voice.epoch
        self.asked(self.view.joined(disk.instance, self.now_ms, disk.named))

    def asked(self, questions: Sequence[AskLowerTierSnapshot]) -> None:
        for question in questions:
            self.disks[int(question.instance)].answers.append(None)

    def answer(self, disk: Disk) -> None:
        if not disk.answers:
            return
        snapshot = disk.answers.pop(0)
        self.view.snapshot(disk.instance, snapshot, self.now_ms)
        if snapshot is not None and snapshot.epoch == self.view.epoch(disk.instance):
            there = [n for n in disk.blocks if n in _numbers_of(snapshot)]
            disk.hear(snapshot.epoch, snapshot.seq, dict.fromkeys(there, True))

    def tick(self) -> None:
        self.now_ms += 50
        self.asked(self.view.tick(self.now_ms))

    def compare(self) -> None:
        """Require that whatever is said to be there was said to be, and not to have gone since."""
        self.view.check()
        for number in NUMBERS:
            instance = self.view.source(name(number), self.now_ms)
            if instance is not None:
                word = self.disks[int(instance)].words.get(number)
                assert word is not None, f"{number} of {instance} was never heard of"
                assert word[1], f"{number} has left {instance}"

    def settle(self) -> None:
        """Have all come that is on its way, and let all be done."""
        for disk in self.disks:
            self.join(disk)
        for _ in range(200):
            for disk in self.disks:
                for verb in ("serve", "answer", "late", "deliver", "tick"):
                    self.do(verb, disk, NUMBERS)
            self.now_ms += 30_000
            waits = any(disk.unsent or disk.late or disk.answers for disk in self.disks)
            if not waits and self.view.is_settled:
                return
        raise AssertionError("it does not come to rest")


def _numbers_of(snapshot: LowerSnapshot) -> set[int]:
    return {
        int.from_bytes(one, "big") for part in snapshot.parts for piece in part.pieces(9)
        for one in piece
    }  # fmt: skip


VERBS = st.sampled_from([
    "change", "change", "empty", "restart", "deliver", "deliver", "lose", "late", "again", "serve",
    "answer", "leave", "join", "named late", "lookup", "tick", "tick", "gap", "gap",
])  # fmt: skip
GAP = (
    "change", "lose", "deliver", "tick", "serve", "change", "change", "lose", "deliver", "answer",
)  # fmt: skip
WANTED = st.lists(st.sampled_from(NUMBERS), max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(VERBS, st.integers(0, 1), WANTED), max_size=60))
@example([("restart", 0, [1]), ("deliver", 0, [*NUMBERS]), ("restart", 0, [])])  # A lower epoch.
@example([("gap", 0, [1]), ("restart", 0, [1]), ("restart", 0, []), ("lose", 0, [])])
# A former life with a higher epoch, of which a word is lost.
def test_in_any_order_of_parts_and_words_the_view_ends_with_the_truth(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    """Goal: nothing is there that has gone, at any time, and in the end all that is there is."""
    world = Follower()
    for verb, number, wanted in steps:
        world.do(verb, world.disks[number], wanted)
    world.settle()
    zero, one = world.disks
    for number in NUMBERS:
        instance = world.view.source(name(number), world.now_ms)
        if instance is None:
            # What both have belongs to who said it last, and leaves with that one.
            assert number in range(9, 13) or number not in zero.truth | one.truth
        else:
            assert number in world.disks[int(instance)].truth
    assert len(world.view) == sum(name(number) in world.view for number in NUMBERS)
