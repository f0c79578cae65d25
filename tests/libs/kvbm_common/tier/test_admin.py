"""What an operator may do to a tier: a table of blocks of several sizes, without a tier's rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.admin import MOVED_MAX, REMOVAL_IDLE_MS, REMOVALS_MAX, TierAdmin
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.leases import LeaseTable
from kvbm_common.tier.removal import LOOKED_MAX, REMOVED_MAX
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.wire.admin import RemoveReply, RemoveRequest, ResizeReply, ResizeRequest
from kvbm_common.wire.verbs import ErrorBody

from tests.libs.helpers import NAMESPACE, name

FIRST_UNITS = 16
"""A slot of the first size is as long as so many of the smallest blocks."""


class Tier:
    """A table of `slots` slots of 64 KiB, with blocks of any size."""

    policy_name, draining, now_ms = "lru", False, 0

    def __init__(self, slots: int) -> None:
        layout = Layout.of(FIRST_UNITS * UNIT_BYTES, slots)
        self.table = SlotTable(layout, partial(make_policy, "lru"))
        self.diary = Diary()
        self.admin = TierAdmin(self, LeaseTable())

    def use_policy(self, name: str) -> bool:
        return name == self.policy_name

    def evict_idle(self, count: int, now_ms: int) -> int:
        names = self.table.longest_idle(count)
        self.remove(names, "evicted", now_ms)
        return len(names)

    def remove(self, names: Sequence[SequenceHash], reason: str, now_ms: int) -> None:
        for one in names:
            assert self.table.discard(one) is not None, f"{reason} at {now_ms}"

    def fill(self, units: int) -> int:
        """Fill what is free with blocks of so many units; returns how many there are then."""
        size, last = units * UNIT_BYTES, len(self.table)
        for number in range(last + 1, last + 1 + self.table.room_for(1 << 20, size)):
            slot = self.table.stage(name(number), size)
            assert slot is not None
            self.table.register(slot, Block(name(number), name(0), NAMESPACE, 1, size))
        return len(self.table)

    def resize(self, slots: int) -> ResizeReply:
        reply = self.admin.answer("resize", ResizeRequest(slots=slots), 0)
        assert isinstance(reply, ResizeReply), reply
        self.table.check()
        return reply


@pytest.mark.parametrize("units", [1, 4, 16, 32, 64])
def test_a_resize_evicts_what_fills_the_slots_that_go(units: int) -> None:
    """Of 256 slots 3 go, then 4 more: as many blocks leave as fill these, and the rest stays."""
    tier = Tier(256)
    held = tier.fill(units)
    for slots, gone in ((253, 3), (249, 4)):
        reply = tier.resize(slots)
        evicted = -(-gone * FIRST_UNITS // units)
        assert abs(reply.evicted - evicted) <= 1, reply
        assert held - reply.evicted == len(tier.table)
        assert not reply.more
        assert reply.slots <= slots
        held -= reply.evicted
    assert tier.resize(tier.table.usable_count).evicted == 0, "it has this size already"


def test_a_resize_of_blocks_of_two_sizes_ends_at_the_size_that_was_wanted() -> None:
    """Half of the medium has small blocks: both kinds leave, no more than needed."""
    tier = Tier(64)
    tier.table.retire(32)
    tier.fill(FIRST_UNITS)
    tier.table.revive(32)
    tier.fill(1)
    before = tier.table.block_bytes
    while (reply := tier.resize(20)).more:
        assert reply.evicted == REMOVED_MAX
    assert reply.slots == 20
    assert before - tier.table.block_bytes == (64 - 20) * FIRST_UNITS * UNIT_BYTES


@pytest.mark.slow
def test_a_large_resize_goes_on_in_further_steps() -> None:
    tier = Tier(1024)
    held = tier.fill(1)
    reply = tier.resize(512)
    steps = 1
    while reply.more:
        assert reply.evicted == REMOVED_MAX
        was, reply, steps = reply.slots, tier.resize(512), steps + 1
        assert reply.was == was
    assert (reply.slots, steps) == (512, 512 * FIRST_UNITS // REMOVED_MAX)
    assert held - len(tier.table) == 512 * FIRST_UNITS


@pytest.mark.parametrize("units", [1, FIRST_UNITS])
def test_a_resize_moves_some_slots_in_each_step(units: int) -> None:
    """Empty slots cost no eviction, and time all the same: no step moves more of them."""
    tier = Tier(5 * MOVED_MAX // 2 * units // FIRST_UNITS)
    slot = tier.table.stage(name(1), units * UNIT_BYTES)
    assert slot is not None
    tier.table.register(slot, Block(name(1), name(0), NAMESPACE, 1, units * UNIT_BYTES))
    most, steps = MOVED_MAX * units // FIRST_UNITS, 0
    for slots in (1, tier.table.slot_count):
        more = True
        while more:
            reply = tier.resize(slots)
            assert abs(reply.slots - reply.was) <= most, reply
            more, steps = reply.more, steps + 1
        assert reply.slots == slots
    assert steps == 2 * 3


def test_an_older_resize_ends_when_a_newer_one_has_another_goal() -> None:
    """Two operators want 8 slots and 3,000: the newest is carried out, the older one is refused."""
    tier = Tier(4 * MOVED_MAX)
    assert tier.resize(8).more
    assert tier.resize(3_000).slots == 3_000
    older = tier.admin.answer("resize", ResizeRequest(slots=8, goes_on=True), 0)
    assert isinstance(older, ErrorBody), older
    assert older.code == "superseded"
    assert older.message == "a newer resize wants 3000 slots"
    newer = tier.admin.answer("resize", ResizeRequest(slots=3_000, goes_on=True), 0)
    assert isinstance(newer, ResizeReply), newer
    assert (newer.slots, newer.was, newer.more) == (3_000, 3_000, False)


def test_a_refused_resize_supersedes_no_other() -> None:
    tier = Tier(4 * MOVED_MAX)
    assert tier.resize(8).more
    assert isinstance(tier.admin.answer("resize", ResizeRequest(slots=1 << 30), 0), ErrorBody)
    reply = tier.admin.answer("resize", ResizeRequest(slots=8, goes_on=True), 0)
    assert isinstance(reply, ResizeReply), reply


def test_a_resize_goes_on_in_a_tier_that_was_started_again() -> None:
    """A tier that remembers no resize takes the next step of one as its first."""
    tier = Tier(4 * MOVED_MAX)
    reply = tier.admin.answer("resize", ResizeRequest(slots=8, goes_on=True), 0)
    assert isinstance(reply, ResizeReply), reply


def remove(tier: Tier, verb: str, **selection: Any) -> RemoveReply:
    """The answer to a step of a removal."""
    reply = tier.admin.answer(verb, RemoveRequest(**selection), tier.now_ms)
    assert isinstance(reply, RemoveReply), reply
    return reply


def test_so_many_removals_go_on_at_the_same_time() -> None:
    """Each goes on where it was. One more is refused, until one of them was left alone."""
    tier = Tier(1024)
    held = tier.fill(1)
    others = [f"{number:064x}" for number in range(REMOVALS_MAX - 1)]
    for namespace in others:
        assert remove(tier, "evict", namespace=namespace).more
    reply = remove(tier, "evict", everything=True)
    assert (reply.removed, reply.more) == (REMOVED_MAX, True)
    refused = tier.admin.answer("reset", RemoveRequest(everything=True), tier.now_ms)
    assert isinstance(refused, ErrorBody)
    assert refused.code == "busy"
    tier.now_ms = REMOVAL_IDLE_MS
    while reply.more:
        reply = remove(tier, "evict", everything=True)
    assert len(tier.table) == 0 < held
    assert remove(tier, "reset", everything=True).removed == 0, "the others have made room"


def test_a_removal_that_was_given_up_begins_anew() -> None:
    """The slots that it had passed are looked at again; so they are for another operator."""
    tier = Tier(1024)
    held = tier.fill(1)
    for actor, later_ms in (("ada", 0), ("bob", 0), ("ada", REMOVAL_IDLE_MS)):
        tier.now_ms += later_ms
        # A namespace of nothing takes as many steps as one of all.
        assert remove(tier, "evict", namespace="0" * 64, actor=actor).more
    steps, reply = 1, remove(tier, "evict", namespace="0" * 64, actor="ada")
    while reply.more:
        steps, reply = steps + 1, remove(tier, "evict", namespace="0" * 64, actor="ada")
    assert steps + 1 >= held // LOOKED_MAX
