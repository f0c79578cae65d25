"""The fills: requests to lower tiers (disk, objects) to read blocks into staged slots.

A lower tier that does not answer may still be reading: its slots are lent to it until its grace is
over, or until it has begun a new life. The states of a fill are drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvbm_common.errors import BusUnavailable, NoResponder
from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.tier.blocks import CHECKSUM_MAX, Block, batch_blocks
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.parts import is_divisible
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import FILL_GRACE_MS, FillRequest, FillSlot

from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means, reason_key
from kvbm_host_tier.core.load_times import Loading, LoadTimes
from kvbm_host_tier.core.lower_tier_view import AVOID_MS, PASSING_MS
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import AskFill, FillDone, FillFailed
from kvbm_host_tier.core.open_lookup import OpenLookup

NO_REASON = "no_reason"
"""The reason that stands for none: a lower tier has refused a block without giving one."""
NOT_ON_DISK = ("gone", "corrupt")
"""Reasons by which a lower tier says that it does not have a block; other failures may pass."""
NOT_THE_BLOCK = frozenset(
    {
        BusUnavailable.code, NoResponder.code,  # NATS, or the lower tier, was away.
        "not_ready", "stale_arena", "stopping",  # It starts, has not mapped our arena yet, or ends.
        "busy", "too_late",  # The request waited, or would have.
    }
)  # fmt: skip
"""Reasons that say nothing of the block or its medium: another try may do at once."""


class FillState(Enum):
    """The states of a fill."""

    IN_FLIGHT = "in_flight"
    LENT = "lent"
    """The fill was not answered, and the lower tier may still read into the slots."""

    __hash__ = object.__hash__  # Enum's own is written in Python.


FILL = Machine(
    "fill",
    {
        (None, "asked"): FillState.IN_FLIGHT,
        (FillState.IN_FLIGHT, "answered"): None,
        (FillState.IN_FLIGHT, "failed, settled"): None,
        (FillState.IN_FLIGHT, "failed"): FillState.LENT,
        (FillState.LENT, "grace over"): None,
        (FillState.LENT, "lower tier restarted"): None,
    },
)


@dataclass(slots=True)
class Fill:
    """A request to a lower tier: staged slots lent to it."""

    tier: WireTier
    instance: str
    slots: dict[SequenceHash, int]
    slot_bytes: int
    until_ms: int
    """The deadline of the answer; slots are lent for a grace after it."""
    ahead: int
    """Blocks of the same run that were asked for before these."""
    trace: str
    loading: Loading
    state: FillState = FillState.IN_FLIGHT
    reusable_ms: int = 0
    """The time from which the slots of a LENT fill may be used again."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks that a fill has brought, and the reasons why the others are missing."""

    tier: WireTier
    arrived: list[tuple[int, Block]]
    missing: list[tuple[SequenceHash, str]]


class Fills:
    """All fills in flight, and the slots that are lent to lower tiers."""

    def __init__(
        self,
        held: HeldBlocks,
        below: LowerTiers,
        times: LoadTimes,
        means: Means,
        *,
        epoch: int,
    ) -> None:
        assert means.limits.batch_blocks_max > 0
        self._held, self._table = held, held.table
        self._below = below
        self._times = times
        self._epoch = epoch
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._fills: dict[int, Fill] = {}
        self._lent = 0
        """Fills that are LENT."""
        self._next_id = 1

    @property
    def is_filling(self) -> bool:
        """Tell whether a fill is in flight."""
        return len(self._fills) > self._lent

    def _move(self, number: int, event: str) -> Fill:
        """Move a fill by its table; forget a fill that has ended."""
        fill = self._fills[number]
        story = f"fill {number} of {fill.tier} tier {fill.instance}"
        was_lent = fill.state is FillState.LENT
        if FILL.ends(fill.state, event):
            del self._fills[number]
            self._lent -= was_lent
        else:
            fill.state = FILL.next(fill.state, event, story)
            self._lent += 1
        assert 0 <= self._lent <= len(self._fills), f"{story}: {self._lent} are lent"
        return fill

    # --- asking -----------------------------------------------------------------------------

    def start(self, names: Sequence[SequenceHash], lookup: OpenLookup, now_ms: int) -> None:
        """Ask for blocks of a lookup in batches, the first of the run first, each batch of one
        lower tier, which has them in a namespace of the lookup's."""
        by_source: dict[tuple[WireTier, str], list[SequenceHash]] = {}
        for name in names:
            source = self._below.source(name, now_ms, lookup.namespaces)
            assert source is not None, self._held.story(name)
            by_source.setdefault(source, []).append(name)
        size, until_ms = lookup.block_bytes, lookup.answer_by_ms
        assert size or not names, f"{lookup.owner} waits for blocks of no size"
        slot_bytes = self._table.pool.layout.slot_bytes_of(size) if names else 0
        for (tier, instance), wanted in by_source.items():
            batch_max = self._batch_blocks(tier, slot_bytes)
            for ahead in range(0, len(wanted), batch_max):
                batch = wanted[ahead : ahead + batch_max]
                slots = self._held.stage(batch, size, "for a fill", now_ms)
                lent = dict(zip(batch, slots, strict=True))
                loading = self._times.begin(tier, len(batch) * size, now_ms)
                self._ask(
                    Fill(tier, instance, lent, slot_bytes, until_ms, ahead, lookup.trace, loading)
                )

    def _batch_blocks(self, tier: WireTier, slot_bytes: int) -> int:
        """Return how many blocks one fill brings at most."""
        count = self._limits.batch_blocks_max
        if tier != "disk":  # Every object is a request of its own.
            return count
        return batch_blocks(count, self._limits.batch_bytes, slot_bytes)

    def _ask(self, fill: Fill) -> None:
        assert fill.slots, f"a fill of {fill.tier} tier {fill.instance} is of blocks"
        assert self._next_id not in self._fills, f"two fills have id {self._next_id}"
        places = zip(fill.slots, self._table.places(fill.slots.values()), strict=True)
        request = FillRequest(
            epoch=self._epoch,
            until_ms=fill.until_ms,
            slots=[FillSlot(hash=name.hex(), slot=place) for name, place in places],
            slot_bytes=fill.slot_bytes,
            ahead=fill.ahead,
            trace=fill.trace,
        )
        self._fills[self._next_id] = fill
        self._emit(AskFill(self._next_id, fill.instance, request, fill.tier))
        self._next_id += 1

    # --- answers ----------------------------------------------------------------------------

    def done(self, event: FillDone, now_ms: int) -> Filled:
        """Take an answer in; a block that it does not mention has failed.

        The slots of the blocks that have arrived are left to the caller to register.
        """
        fill = self._move(event.fill, "answered")
        hashes = hashes_from_hex([filled.hash for filled in event.reply.slots])
        answered = dict(zip(hashes, event.reply.slots, strict=True))
        filled = Filled(fill.tier, [], [])
        for name, slot in fill.slots.items():
            outcome = _outcome(name, self._table.place(slot), answered.get(name))
            if isinstance(outcome, Block) and outcome.bytes > fill.slot_bytes:
                outcome = "malformed"
            if isinstance(outcome, Block):
                filled.arrived.append((slot, outcome))
            else:
                self._table.abort(slot)
                filled.missing.append((name, outcome))
        ended = len(filled.arrived) + len(filled.missing)
        assert ended == len(fill.slots), f"{ended} of {len(fill.slots)} blocks have an outcome"
        self._measure(fill, now_ms, came=not filled.missing)
        self._counts["promoted_blocks"] += len(filled.arrived)
        self._counts["bytes.fill"] += sum([block.bytes for _, block in filled.arrived])
        self._missed(filled, now_ms)
        return filled

    def failed(self, event: FillFailed, now_ms: int) -> Filled:
        """Give up a fill without an answer; unless it is settled, its slots stay lent."""
        assert event.reason, f"fill {event.fill} fails for a reason"
        fill = self._move(event.fill, "failed, settled" if event.settled else "failed")
        if event.settled:
            self._take_back(fill)
        else:
            for slot in fill.slots.values():
                self._table.abandon(slot)
            fill.reusable_ms = max(now_ms, fill.until_ms) + FILL_GRACE_MS
        filled = Filled(fill.tier, [], [(name, event.reason) for name in fill.slots])
        self._measure(fill, now_ms, came=False)
        self._missed(filled, now_ms)
        return filled

    def _measure(self, fill: Fill, now_ms: int, *, came: bool) -> None:
        """Measure how long a fill took; a failed one counts only if it is late."""
        self._times.end(fill.loading, now_ms, counts=came or now_ms >= fill.until_ms)

    def _missed(self, filled: Filled, now_ms: int) -> None:
        """Forget that the lower tier has these blocks, or leave them alone for a while."""
        view = self._below.views[filled.tier]
        for name, reason in filled.missing:
            assert reason, self._held.story(name)
            if reason in NOT_ON_DISK:
                view.forget(name)
            else:
                passes = reason in NOT_THE_BLOCK
                view.avoid(name, now_ms, for_ms=PASSING_MS if passes else AVOID_MS)
            self._counts[reason_key(self._counts, "dropped.fill", reason)] += 1

    # --- lent slots -------------------------------------------------------------------------

    def restarted(self, tier: WireTier, instance: str) -> None:
        """Take back what was lent to a lower tier's old life: that life reads no more."""
        for number, fill in self._all_lent():
            if (fill.tier, fill.instance) == (tier, instance):
                self._take_back(self._move(number, "lower tier restarted"))

    def __len__(self) -> int:
        assert self._lent <= len(self._fills), f"{self._lent} of {len(self._fills)} are lent"
        return len(self._fills)

    def tick(self, now_ms: int) -> None:
        """Take back the slots whose grace is over."""
        if not self._lent:
            return
        for number, fill in self._all_lent():
            if now_ms >= fill.reusable_ms:
                self._take_back(self._move(number, "grace over"))

    def _all_lent(self) -> list[tuple[int, Fill]]:
        return [(n, fill) for n, fill in self._fills.items() if fill.state is FillState.LENT]

    def _take_back(self, fill: Fill) -> None:
        assert fill not in self._fills.values(), f"{fill} is under way"
        for slot in fill.slots.values():
            self._table.abort(slot)

    # --- checks -----------------------------------------------------------------------------

    def staged_slots(self) -> set[int]:
        """Return every slot that a fill has staged, for `check`."""
        return {slot for fill in self._fills.values() for slot in fill.slots.values()}

    def check(self) -> None:
        """Assert every invariant of the fills."""
        self._times.check()
        assert len(self._all_lent()) == self._lent
        slots = [slot for fill in self._fills.values() for slot in fill.slots.values()]
        assert len(slots) == len(set(slots)), "two fills write one slot"


def _outcome(name: SequenceHash, place: int, filled: FilledSlot | None) -> Block | str:
    """Return the block that a fill has brought to a place, or why it has brought no block."""
    assert place >= 0
    if filled is None:
        return "no_answer"
    if not filled.ok:
        return filled.reason or NO_REASON
    if filled.slot != place:  # What was read lies elsewhere, and this slot holds other bytes.
        return "wrong_slot"
    if (
        not filled.bytes
        or not is_divisible(filled.bytes, filled.parts)
        or not 0 <= filled.checksum <= CHECKSUM_MAX
    ):
        return "malformed"
    block = Block(
        name, hash_from_hex(filled.parent), bytes.fromhex(filled.namespace), filled.checksum,
        filled.bytes, filled.parts,
    )  # fmt: skip
    sums = filled.part_sums or block.part_sums
    return block.with_sums(sums) if block.has_sums(sums) else "malformed"
