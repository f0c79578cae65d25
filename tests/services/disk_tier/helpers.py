"""A disk tier's core with a host tier, a disk and a clock around it. Blocks are small integers.

`Disk` is the outside world: it feeds the core, checks every invariant after each step, and checks
that what the core announces is numbered without a hole, never contradicts itself, and is what the
table holds and what the journal would bring back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Cleared, Event, Removed, Stored
from kvbm_common.wire.slot_entries import FilledSlot, LeasedSlot
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FillReply,
    FillRequest,
    FillSlot,
    Hits,
    LeaseReply,
)
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import (
    Answer,
    AppendJournal,
    Effect,
    LeaseHost,
    OpenStore,
    ProbeStore,
    Publish,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    WriteSlots,
)
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Record, Replay, encode_records, replay
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import (
    ArenaKnown,
    FillAsked,
    HitsTold,
    HostEvent,
    HostSnapshot,
    Input,
    Journaled,
    JournalFailed,
    JournalPartWritten,
    JournalRewritten,
    Leased,
    LeaseFailed,
    ReadDone,
    Released,
    StoreOpened,
    StoreProbed,
    Tick,
    WriteFailed,
    Written,
)

NAMESPACE = bytes(range(32))
EPOCH = 7
HOST_EPOCH = 3
BLOCK_BYTES = 64
SLOT_BYTES = 4096
ARENA_SLOTS = 100
FILL_MS = 1_000

E = TypeVar("E")


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def checksum(number: int) -> int:
    """What the right bytes of a block sum up to."""
    return number * 1_000 + 1


def block(number: int) -> Block:
    """A block of the chain 1, 2, 3…"""
    return Block(name(number), name(number - 1), NAMESPACE, checksum(number), BLOCK_BYTES)


def numbers(blocks: Iterable[Block]) -> list[int]:
    """Blocks back to numbers."""
    return [int.from_bytes(block.hash, "big") for block in blocks]


def of(entries: Iterable[object], kind: type[E]) -> list[E]:
    """Those of one type."""
    return [entry for entry in entries if isinstance(entry, kind)]


def one(entries: Iterable[object], kind: type[E]) -> E:
    """The one of this type."""
    [entry] = of(entries, kind)
    return entry


def arena(
    *, epoch: int = HOST_EPOCH, slot_bytes: int = SLOT_BYTES, staging: bool = False
) -> ArenaReply:
    """The host tier's arena, cut for slots of this size; block n is in its slot n."""
    return ArenaReply(
        path="/arena", bytes=ARENA_SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES if slot_bytes else 0,
        slot_count=ARENA_SLOTS, epoch=epoch, instance="0", staging=staging,
        sizes=[slot_bytes] if slot_bytes else [],
    )  # fmt: skip


def opened(slots: int, blocks: dict[int, Block] | None = None, *, records: int = 0) -> StoreOpened:
    """A store, with what its journal says."""
    blocks = blocks or {}
    return StoreOpened(layout(slots), Replay(blocks, 1 + len(blocks), records, 0))


def layout(slots: int) -> Layout:
    """How such a store is cut."""
    return Layout.of(SLOT_BYTES, slots)


class Disk:
    """The core, the clock, the journal, and the host tier that it talks to."""

    def __init__(
        self, *, slots: int = 4, filtered: bool = False, staging: bool = False, ready: bool = True,
        limits: DiskTierLimits | None = None, write_budget: int = 0
    ) -> None:  # fmt: skip
        self.filter = FrequencyFilter(enabled=filtered)
        self.core = DiskTierCore(
            host="h", instance="0", epoch=EPOCH, frequency_filter=self.filter, limits=limits,
            write_budget=write_budget,
        )  # fmt: skip
        self.slots = slots
        self.staging = staging
        self.now_ms = 1_000
        self.events: list[Event] = []
        self.announced: set[int] = set()
        """What a reader of the events believes."""
        self.journal: list[Record] = []
        """What is durable."""
        self._next_journal: list[Record] | None = None
        """What a rewrite under way has written."""
        self._former_journal: list[Record] | None = None
        """What the last part of a rewrite has replaced, until that is said to have gone well."""
        self.host = Announcer(host="h", source="host-tier-0", tier="host", epoch=HOST_EPOCH)
        self._replies = 0
        self.took(self.core.start())
        if ready:
            self.make_ready()

    def make_ready(self) -> None:
        """The arena is mapped and the store is made."""
        effects = self.step(ArenaKnown(arena(staging=self.staging)))
        assert one(effects, OpenStore).slot_bytes == SLOT_BYTES
        self.step(opened(self.slots))

    # --- driving ----------------------------------------------------------------------------

    def step(self, event: Input) -> list[Effect]:
        """One input; returns the effects other than announcements."""
        effects = self.took(self.core.step(event, self.now_ms))
        self.core.check()
        here = {block.hash for block in self.core.inventory.table.blocks()}
        told = here - self.core.inventory.table.folded(here)
        expected = (
            set() if self.core.inventory.stopped else {int.from_bytes(n, "big") for n in told}
        )
        assert self.announced == expected, "the events say something else than the table"
        return effects

    def took(self, effects: Sequence[Effect]) -> list[Effect]:
        for effect in effects:
            match effect:
                case Publish(event):
                    self._announced(event)
                case RewriteJournal():
                    self._rewrite(effect)
                case AppendJournal(None, records):
                    self._append(records)
                case _:
                    pass
        return [effect for effect in effects if not isinstance(effect, Publish)]

    def _append(self, records: Sequence[Record]) -> None:
        for journal in (self.journal, self._next_journal, self._former_journal):
            if journal is not None:
                journal += records

    def _rewrite(self, part: RewriteJournal) -> None:
        assert part.is_first == (self._next_journal is None), "a part of no rewrite"
        self._next_journal = [*(self._next_journal or []), *part.records]
        if part.is_last:
            self._former_journal = self.journal
            self.journal, self._next_journal = self._next_journal, None

    def _announced(self, event: Event) -> None:
        self.events.append(event)
        assert (event.epoch, event.seq) == (EPOCH, len(self.events))
        match event:
            case Cleared():
                self.announced.clear()
            case Stored(runs=runs):
                stored = [int(text, 16) for run in runs for text in run.hashes]
                assert not self.announced & set(stored), f"{stored} announced twice"
                self.announced.update(stored)
            case Removed(hashes=hashes):
                removed = {int(text, 16) for text in hashes}
                assert removed <= self.announced, "what was not there cannot leave"
                self.announced.difference_update(removed)

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass, and the core notice."""
        self.now_ms += ms
        return self.step(Tick())

    # --- writes -----------------------------------------------------------------------------

    def host_stored(self, *wanted: int) -> list[Effect]:
        """The host tier announces a chain."""
        effects: list[Effect] = []
        for event in self.host.stored([block(number) for number in wanted]):
            effects += self.step(HostEvent("0", event))
        return effects

    def hit(self, *wanted: int) -> list[Effect]:
        """An engine asked for them again."""
        hashes = [name(number).hex() for number in wanted]
        return self.step(HitsTold("", Hits(namespace=NAMESPACE.hex(), hashes=hashes)))

    def listed(self, *wanted: int) -> list[Effect]:
        """The host tier's snapshot."""
        reply = self.host.snapshot([block(number) for number in wanted])
        return self.step(HostSnapshot("0", reply))

    def leased(
        self, lease: LeaseHost, *missing: int, over_share: Sequence[int] = ()
    ) -> list[Effect]:
        """The host tier has pinned everything but `missing`, and what is over the share."""
        lacking = {*missing, *over_share}
        slots = [leased_slot(number) for number in asked(lease) if number not in lacking]
        later = [name(number).hex() for number in over_share]
        reply = LeaseReply(lease=lease.write, slots=slots, over_share=later)
        return self.step(Leased(lease.write, reply))

    def lease_failed(self, lease: LeaseHost, reason: str = "deadline_exceeded") -> list[Effect]:
        """… or has not answered."""
        return self.step(LeaseFailed(lease.write, reason))

    def written(self, write: WriteSlots) -> list[Effect]:
        """The bytes are in the file."""
        return self.step(Written(write.write))

    def write_failed(self, write: WriteSlots) -> list[Effect]:
        """They are not."""
        return self.step(WriteFailed(write.write, "transfer_failed"))

    def released(
        self, release: ReleaseHost, *, valid: bool = True, answered: bool = True
    ) -> list[Effect]:
        """The lease had held, or not, or nobody says."""
        return self.step(Released(release.write, valid, answered))

    def journaled(self, append: AppendJournal) -> list[Effect]:
        """The records are durable."""
        assert append.write is not None
        self._append(append.records)
        return self.step(Journaled((append.write,)))

    def journal_failed(self, append: AppendJournal, *, torn: bool = False) -> list[Effect]:
        """They are not, as far as one knows; `torn`: yet they are."""
        assert append.write is not None
        self._append(append.records if torn else ())
        return self.step(JournalFailed(append.write, "journal"))

    def rewritten(self, part: RewriteJournal) -> list[Effect]:
        """A part is written; the last one, and the files have changed places."""
        self._former_journal = None
        return self.step(JournalRewritten() if part.is_last else JournalPartWritten())

    def rewrite_failed(self) -> list[Effect]:
        """A part is not written: the journal is the one before."""
        if self._former_journal is not None:
            self.journal, self._former_journal = self._former_journal, None
        self._next_journal = None
        return self.step(JournalRewritten("No space left on device"))

    def finish(self, effects: Sequence[Effect]) -> None:
        """Everything goes well from here on."""
        todo = list(effects)
        while todo:
            match todo.pop(0):
                case LeaseHost() as lease:
                    todo += self.leased(lease)
                case WriteSlots() as write:
                    todo += self.written(write)
                case ReleaseHost() as release:
                    todo += self.released(release)
                case AppendJournal(write=int()) as append:
                    todo += self.journaled(append)
                case ReadSlots() as read:
                    todo += self.read(read)
                case RewriteJournal() as part:
                    todo += self.rewritten(part)
                case ProbeStore():
                    todo += self.probed()
                case _:
                    pass

    def probed(self, *, read_failure: str = "", write_failure: str = "") -> list[Effect]:
        """The medium has tried again."""
        return self.step(StoreProbed(read_failure, write_failure))

    def store(self, *wanted: int) -> None:
        """The whole way of a chain to disk."""
        self.finish(self.host_stored(*wanted))

    # --- reads ------------------------------------------------------------------------------

    def fill(
        self, *wanted: int, epoch: int = HOST_EPOCH, until_ms: int | None = None,
        slots: Sequence[int] | None = None, ahead: int = 0,
    ) -> list[Effect]:  # fmt: skip
        """The host tier wants blocks; block n into arena slot n."""
        self._replies += 1
        targets = wanted if slots is None else slots
        request = FillRequest(
            epoch=epoch,
            until_ms=self.now_ms + FILL_MS if until_ms is None else until_ms,
            slots=[
                FillSlot(hash=name(number).hex(), slot=slot)
                for number, slot in zip(wanted, targets, strict=True)
            ],
            slot_bytes=SLOT_BYTES,
            ahead=ahead,
        )
        return self.step(FillAsked(self._replies, request))

    def read(self, read: ReadSlots, *corrupt: int) -> list[Effect]:
        """The read has ended; the bytes of `corrupt` are wrong."""
        intact = tuple(number not in corrupt for number in numbers(read.blocks))
        return self.step(ReadDone(read.read, intact))

    # --- questions --------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """What was counted."""
        return {key: count for key, count in self.core.counts.items() if count}

    def on_disk(self) -> dict[int, int]:
        """Block → place of what is committed."""
        here = [] if self.core.inventory.stopped else numbers(self.core.inventory.table.blocks())
        found = {number: self.core.inventory.table.find(name(number)) for number in here}
        place = self.core.inventory.table.place
        return {number: place(slot) for number, slot in found.items() if slot is not None}

    def recovered(self) -> dict[int, int]:
        """What a restart would bring back from the journal, as `on_disk`."""
        found = replay(encode_records(self.journal), layout(self.slots))
        return {numbers([block])[0]: slot for slot, block in found.blocks.items()}


def leased_slot(number: int, **changes: Any) -> LeasedSlot:
    """A pinned block of the host tier."""
    values: dict[str, Any] = {
        "hash": name(number).hex(), "parent": name(number - 1).hex(),
        "namespace": NAMESPACE.hex(), "slot": number, "checksum": checksum(number),
        "bytes": BLOCK_BYTES,
    }  # fmt: skip
    return LeasedSlot(**(values | changes))


def asked(lease: LeaseHost) -> list[int]:
    """The blocks that a lease asks for."""
    return [int(text, 16) for text in lease.request.hashes]


def filled(effects: Sequence[Effect]) -> dict[int, str]:
    """The one answer to a fill: block → reason, empty where all is well."""
    reply = one(effects, Answer).reply
    assert isinstance(reply, FillReply)
    for slot in reply.slots:
        if slot.ok:
            check_filled(slot)
    return {int(slot.hash, 16): slot.reason for slot in reply.slots}


def check_filled(slot: FilledSlot) -> None:
    """What is filled carries the whole truth of its block."""
    expected = block(int(slot.hash, 16))
    assert (slot.parent, slot.namespace) == (expected.parent.hex(), NAMESPACE.hex())
    assert (slot.checksum, slot.bytes) == (expected.checksum, BLOCK_BYTES)


def refusal(effects: Sequence[Effect]) -> str:
    """The code of the one error among the answers."""
    reply = one(effects, Answer).reply
    assert isinstance(reply, ErrorBody)
    return reply.code


def writing(disk: Disk, *wanted: int) -> WriteSlots:
    """A write whose bytes are on their way."""
    return one(disk.leased(one(disk.host_stored(*wanted), LeaseHost)), WriteSlots)
