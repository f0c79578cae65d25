"""Admin verbs: what an operator asks of a tier and does to it, as host and disk tiers share it.

Pure, as the cores that it is part of: a request and the time go in, a reply comes out, and the tier
announces what has left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, assert_never

from kvbm_common.checksum import unpack_sums
from kvbm_common.eviction import POLICIES
from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.leases import PIN, Lease, LeaseTable
from kvbm_common.tier.removal import REMOVED_MAX, Removal
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.admin import (
    BlockEntry,
    BlockLease,
    BlockReply,
    BlockRequest,
    DrainReply,
    DrainRequest,
    PinEntry,
    PinReply,
    PinRequest,
    PinsReply,
    PinsRequest,
    PolicyReply,
    PolicyRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
    TierReply,
    TierRequest,
    UnpinReply,
    UnpinRequest,
)
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.verbs import ErrorBody

PINNED_PART_MAX = 0.5
"""The part of the medium that pins may hold: a tier that can evict nothing takes nothing."""
REASON = "admin"
"""The reason in the events that tell what has left."""
REMOVALS_MAX = 8
"""Selections that are removed at the same time: each takes up to 24 bytes a slot, and 130 for each
block that is after a prefix."""
MOVED_MAX = 1_024
"""Slots that one step of a resize takes out of use, or puts back: 7 µs each on a busy machine."""
REMOVAL_IDLE_MS = 5_000
"""A removal that is not asked for again in this time was given up: the next request of this kind
begins another. Jobs ask again within milliseconds."""


class AdministeredTier(Protocol):
    """The part of a tier that the verbs need."""

    diary: Diary
    draining: bool

    @property
    def table(self) -> SlotTable:
        """Return the slots of the tier."""

    @property
    def policy_name(self) -> str:
        """Return the eviction policy in force."""

    def use_policy(self, name: str) -> bool:
        """Let another policy choose, also in tables to come; False: this tier needs its own."""

    def evict_idle(self, count: int, now_ms: int) -> int:
        """Evict up to `count` blocks of any size, and announce it; returns how many have left."""

    def remove(self, names: Sequence[SequenceHash], reason: str, now_ms: int) -> None:
        """Make committed blocks unfindable, and announce it."""


class TierAdmin:
    """The verbs over one tier. Each is a function below, which is given what it needs."""

    def __init__(self, tier: AdministeredTier, leases: LeaseTable) -> None:
        self._tier = tier
        self._leases = leases
        self._removals = Removals()
        self._goal = 0
        """The slots that the newest resize wants; 0: there was none yet."""

    def answer(self, verb: str, request: TierRequest, now_ms: int) -> TierReply | ErrorBody:
        """Carry out a verb; raises IdentityError for an invalid hash."""
        assert verb, "a request has a verb"
        tier, leases = self._tier, self._leases
        match request:
            case BlockRequest():
                name = hash_from_hex(request.hash)
                return _block(tier.table, leases, tier.diary.entries(name), name, now_ms)
            case RemoveRequest():
                even_pinned = verb == "reset"
                return _remove(tier, self._removals, request, now_ms, even_pinned=even_pinned)
            case PinRequest():
                return _pin(tier.table, leases, request, now_ms)
            case UnpinRequest():
                return _unpin(tier.table, leases, request)
            case PinsRequest():
                return PinsReply(pins=[_pin_entry(lease, now_ms) for lease in pins_of(leases)])
            case DrainRequest():
                was, tier.draining = tier.draining, verb == "drain"
                return DrainReply(draining=tier.draining, was=was)
            case ResizeRequest():
                return self._take_resize_step(request, now_ms)
            case PolicyRequest():
                return _use_policy(tier, request)
            case _:
                assert_never(request)

    def _take_resize_step(self, request: ResizeRequest, now_ms: int) -> ResizeReply | ErrorBody:
        """Take a step of the newest resize; refuse one of an older resize.

        Each step undoes a step in the other direction: two resizes would not end.
        """
        assert request.slots > 0, request
        if request.goes_on and self._goal not in (0, request.slots):
            text = f"a newer resize wants {self._goal} slots"
            return ErrorBody(code="superseded", message=text)
        reply = _resize(self._tier, request, now_ms)
        if isinstance(reply, ResizeReply):
            self._goal = request.slots
        return reply


# --- one block ------------------------------------------------------------------------------------


def _block(
    table: SlotTable,
    leases: LeaseTable,
    entries: Sequence[tuple[int, str]],
    name: SequenceHash,
    now_ms: int,
) -> BlockReply:
    story = [BlockEntry(ago_ms=max(0, now_ms - at_ms), what=what) for at_ms, what in entries]
    slot = table.find(name)
    if slot is None:
        return BlockReply(held=False, story=story)
    block, pins = table.block(slot), table.pin_count(slot)
    assert block.hash == name, f"slot {slot} holds another block: {story}"
    holding = [lease for lease in leases.all() if slot in lease.slots] if pins else []
    return BlockReply(
        held=True,
        slot=table.place(slot),
        bytes=block.bytes,
        checksum=block.checksum,
        parent=block.parent.hex(),
        namespace=block.namespace.hex(),
        pins=pins,
        leases=[_block_lease(lease, now_ms) for lease in holding],
        story=story,
        part_count=block.part_count,
        part_checksums=list(unpack_sums(block.part_sums)) if block.code > 1 else [],
    )


def _block_lease(lease: Lease, now_ms: int) -> BlockLease:
    left_ms = lease.deadline_ms - now_ms
    return BlockLease(id=lease.id, owner=lease.owner, reason=lease.reason, left_ms=left_ms)


# --- evict and reset ------------------------------------------------------------------------------


def _remove(
    tier: AdministeredTier,
    removals: Removals,
    request: RemoveRequest,
    now_ms: int,
    *,
    even_pinned: bool,
) -> RemoveReply | ErrorBody:
    selections = (request.hashes, request.prefix, request.namespace, request.everything or None)
    if sum(one is not None for one in selections) != 1:
        text = "give exactly one of hashes, prefix, namespace and everything"
        return ErrorBody(code="bad_selection", message=text, field="hashes")
    if request.hashes is not None:
        return _remove_named(tier, request.hashes, now_ms, even_pinned=even_pinned)
    removal = removals.of(tier.table, request, now_ms, even_pinned=even_pinned)
    if removal is None:
        text = f"{REMOVALS_MAX} others are under way; ask again when one has ended"
        return ErrorBody(code="busy", message=text)
    names, more = removal.step()
    tier.remove(names, REASON, now_ms)
    if not more:
        removals.end(removal)
    return RemoveReply(removed=len(names), kept=removal.kept, more=more)


def _remove_named(
    tier: AdministeredTier, hashes: Sequence[str], now_ms: int, *, even_pinned: bool
) -> RemoveReply:
    """Remove named blocks, at most as many as a request may name."""
    table = tier.table
    asked = list(dict.fromkeys(hashes_from_hex(hashes)))
    here = [(name, slot) for name in asked if (slot := table.find(name)) is not None]
    removed = [name for name, slot in here if even_pinned or not table.pin_count(slot)]
    missing = [name.hex() for name in asked if table.find(name) is None]
    tier.remove(removed, REASON, now_ms)
    assert not any(map(table.holds, removed)), "a removed block is still found"
    return RemoveReply(removed=len(removed), kept=len(here) - len(removed), missing=missing)


class Removals:
    """Removals in steps: an operator's job repeats its request until nothing is left."""

    def __init__(self) -> None:
        self._going: dict[tuple[object, ...], tuple[Removal, int]] = {}
        """Selection → the removal, and when its last step was."""

    def of(
        self, table: SlotTable, request: RemoveRequest, now_ms: int, *, even_pinned: bool
    ) -> Removal | None:
        """Return the removal that a request begins or goes on with; None: there are too many."""
        key = (request.prefix, request.namespace, request.actor, even_pinned)
        self._going = {
            one: (other, last_ms)
            for one, (other, last_ms) in self._going.items()
            if now_ms - last_ms < REMOVAL_IDLE_MS
        }
        removal, _ = self._going.get(key, (None, 0))
        if removal is None or removal.table is not table:
            if len(self._going) >= REMOVALS_MAX:
                return None
            removal = Removal(
                table,
                prefix=None if request.prefix is None else hash_from_hex(request.prefix),
                namespace=None if request.namespace is None else bytes.fromhex(request.namespace),
                even_pinned=even_pinned,
            )
        self._going[key] = removal, now_ms
        assert len(self._going) <= REMOVALS_MAX, f"{len(self._going)} removals are under way"
        return removal

    def end(self, removal: Removal) -> None:
        """Forget a removal that is over."""
        assert any(one is removal for one, _ in self._going.values()), "it is not under way"
        self._going = {key: one for key, one in self._going.items() if one[0] is not removal}


# --- pins -----------------------------------------------------------------------------------------


def pins_of(leases: LeaseTable) -> list[Lease]:
    """Return the leases that operators' pins are, oldest first."""
    return [lease for lease in leases.all() if lease.reason == PIN]


def pins_usage(table: SlotTable, leases: LeaseTable) -> Usage:
    """Return how many slots pins hold, of those that they may; slots have several sizes."""
    used_bytes = sum(map(table.slot_bytes, leases.pinned_slots))
    return Usage(used_bytes, PINNED_PART_MAX * table.usable_bytes)


def _pin(
    table: SlotTable, leases: LeaseTable, request: PinRequest, now_ms: int
) -> PinReply | ErrorBody:
    found: dict[int, None] = {}
    missing: list[str] = []
    for name in hashes_from_hex(request.hashes):
        slot = table.find(name)
        if slot is None:
            missing.append(name.hex())
        else:
            found[slot] = None
    pinned = leases.pinned_slots
    wanted_bytes = sum(map(table.slot_bytes, pinned | found.keys()))
    if wanted_bytes > PINNED_PART_MAX * table.usable_bytes:
        pinned_bytes = sum(map(table.slot_bytes, pinned))
        part = f"{len(pinned)} slots, {pinned_bytes / (table.usable_bytes or 1):.0%} of the medium"
        text = f"{part}, are pinned, at most half may be"
        return ErrorBody(code="pin_limit", message=text, field="hashes")
    if not found:
        return PinReply(pin=0, pinned=0, missing=missing)
    for slot in found:
        table.pin(slot)
    owner, deadline_ms = request.actor or "operator", now_ms + request.ttl_ms
    lease = leases.grant(owner, PIN, tuple(found), deadline_ms=deadline_ms)
    assert lease.id, "a pin can be named"
    return PinReply(pin=lease.id, pinned=len(found), missing=missing)


def _unpin(table: SlotTable, leases: LeaseTable, request: UnpinRequest) -> UnpinReply:
    lease = leases.find(request.pin)
    if lease is None or lease.reason != PIN:
        return UnpinReply(ended=False)
    leases.release(lease.id)
    assert leases.find(lease.id) is None, "a lease ends once"
    table.unpin(lease.slots)
    return UnpinReply(ended=True)


# --- size and policy ------------------------------------------------------------------------------


def _resize(tier: AdministeredTier, request: ResizeRequest, now_ms: int) -> ResizeReply | ErrorBody:
    """Use as much of the medium as so many slots of its first size."""
    table = tier.table
    was, capacity = table.usable_count, table.slot_count
    if request.slots > capacity:
        text = f"the medium has {capacity} slots" if capacity else "the medium is not cut yet"
        return ErrorBody(code="bad_size", message=text, field="slots")
    step = _moved_at_once(table)
    goal = max(was - step, min(was + step, request.slots))
    table.revive(max(0, goal - was))
    evicted = 0
    while (surplus := _retire_down_to(table, goal)) and evicted < REMOVED_MAX:
        gone = tier.evict_idle(_count_in(table, surplus, REMOVED_MAX - evicted), now_ms)
        if not gone:
            break
        evicted += gone
        assert evicted <= REMOVED_MAX, f"{evicted} blocks are evicted in one step"
    slots = table.usable_count
    more = evicted >= REMOVED_MAX if surplus else goal != request.slots and slots != was
    assert slots <= capacity, f"{slots} slots of {capacity} are in use, {request.slots} were wanted"
    return ResizeReply(slots=slots, was=was, capacity=capacity, evicted=evicted, more=more)


def _moved_at_once(table: SlotTable) -> int:
    """Return how many slots of the first size one step may move: they may be cut into smaller."""
    pool = table.pool
    first = pool.layout.slot_bytes
    least = min([size.slot_bytes for size in pool.sizes.values() if size.slabs], default=first)
    assert least > 0, f"slots of {least} bytes"
    return max(1, MOVED_MAX * min(least, first) // max(1, first))


def _retire_down_to(table: SlotTable, slots: int) -> int:
    """Take empty slots out of use; returns how many of the first size are still too much."""
    table.retire(max(0, table.usable_count - slots))
    return max(0, table.usable_count - slots)


def _count_in(table: SlotTable, slots: int, most: int) -> int:
    """Return how many of the longest idle blocks fill so many slots of the first size."""
    left_bytes = slots * table.pool.layout.slot_bytes
    idle = table.longest_idle(most)
    for count, name in enumerate(idle, 1):
        slot = table.find(name)
        assert slot is not None, f"{name.hex()} is idle, and is not here"
        left_bytes -= table.slot_bytes(slot)
        if left_bytes <= 0:
            return count
    # More than can leave now: the tier ends pins for these, where it may.
    return min(most, len(idle) + -(-left_bytes // table.pool.layout.slot_bytes))


def _use_policy(tier: AdministeredTier, request: PolicyRequest) -> PolicyReply | ErrorBody:
    was = tier.policy_name
    if request.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        text = f"no eviction policy {request.policy!r}; there are: {known}"
        return ErrorBody(code="unknown_policy", message=text, field="policy")
    if request.policy != was and not tier.use_policy(request.policy):
        text = f"a staging arena evicts by {was}"
        return ErrorBody(code="fixed_policy", message=text, field="policy")
    assert tier.policy_name == request.policy, f"{tier.policy_name} is in force: {request}"
    return PolicyReply(policy=tier.policy_name, was=was)


def _pin_entry(lease: Lease, now_ms: int) -> PinEntry:
    left_ms = lease.deadline_ms - now_ms
    return PinEntry(pin=lease.id, owner=lease.owner, blocks=len(lease.slots), left_ms=left_ms)
