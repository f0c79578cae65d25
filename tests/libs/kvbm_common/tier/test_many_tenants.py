"""More tenants than have a place of their own: they come, leave nothing, and are restored.

Each drawn program is checked after every step: all counts agree, and every idle block can leave.
"""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import Namespace, SequenceHash, of_tenant
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.tier.tenants import TENANTS_MAX, Tenants, shares_of

from tests.libs.helpers import make_room, name

PLAIN = Namespace(model="test", block_tokens=4)
OTHER = msgspec.structs.replace(PLAIN, model="other")
SLABS, SLAB_UNITS = 8, 6


def space_of(who: int, model: Namespace = PLAIN) -> bytes:
    """The namespace of a tenant; tenant 0 has no name."""
    return of_tenant(model, f"t{who}" if who else "").digest


def table_of(shares: str = "", policy: str = "lru", slabs: int = SLABS) -> SlotTable:
    """A table of slabs of 6 units of 4 KiB."""
    layout = Layout(UNIT_BYTES, slabs * SLAB_UNITS, SLAB_UNITS)
    return SlotTable(layout, partial(make_policy, policy), Tenants(shares_of(shares)))


def block(number: int, space: bytes, size: int = UNIT_BYTES) -> Block:
    """A block after no other."""
    return Block(name(number), name(0), space, number, size)


def register(table: SlotTable, new: Block) -> None:
    """Commit a block, for which there is room."""
    slot = table.stage(new.hash, new.bytes)
    assert slot is not None, f"no room for {new}"
    table.register(slot, new)


def all_idle(table: SlotTable) -> set[SequenceHash]:
    """Every block that an operator could have leave."""
    return set(table.longest_idle(table.slot_count))


def anything(block: SequenceHash) -> bool:
    """Let every block leave."""
    return bool(block)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_that_stay_are_looked_at_after_tenants_were_forgotten(policy: str) -> None:
    """One tenant after the other leaves nothing; then some blocks may leave, and some may not."""
    table = table_of(policy=policy)
    for number in range(1, 2 * TENANTS_MAX):
        space = space_of(number)
        [*_, last] = [block(100 * number + at, space) for at in range(table.slot_count)]
        assert len(table.victims(1, UNIT_BYTES, anything, space).names) == (number > 1)
        for gone in all_idle(table):
            table.evict(gone)
        for at in range(table.slot_count):
            register(table, block(100 * number + at, space))
        assert table.victims(1, UNIT_BYTES, last.hash.__eq__, space).names == [last.hash]
        [size] = table.pool.sizes.values()
        assert table.worst_of(size, 9, last.hash.__eq__) == [last.hash]
        table.check()


@pytest.mark.parametrize("shares", ["", "t1=2,t39=3,*=1"])
@pytest.mark.parametrize("count", [31, 32, 33, 64])
def test_every_block_of_a_former_life_can_leave_however_many_tenants_it_had(
    count: int, shares: str
) -> None:
    slots = 2 * SLAB_UNITS * count
    former = {at: block(at + 1, space_of(1 + at % count)) for at in range(slots)}
    table = table_of(shares, slabs=slots // SLAB_UNITS)
    table.restore(former)
    table.check()
    assert sum(one.blocks for one in table.tenant_figures()) == slots
    assert all_idle(table) == {one.hash for one in former.values()}
    assert len(make_room(table, 1, UNIT_BYTES, space_of(count + 1))) == 1
    table.check()


# --- any order of moves ---------------------------------------------------------------------------


class ManyTenants(RuleBasedStateMachine):
    """Some 70 tenants store, leave, are reset, and are restored, beside blocks that may not go."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of()
        self.last = 0
        self.pinned: list[int] = []

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)), shares=st.sampled_from(("", "t3=2,t60=5,*=1"))
    )
    def begin(self, policy: str, shares: str) -> None:
        self.policy, self.shares = policy, shares
        self.table = table_of(shares, policy)

    @rule(
        first=st.integers(0, 40), count=st.integers(1, 40), units=st.sampled_from((1, 1, 3)),
        model=st.sampled_from((PLAIN, OTHER)), stays=st.integers(1, 5),
    )  # fmt: skip
    def store(self, first: int, count: int, units: int, model: Namespace, stays: int) -> None:
        """Many tenants come with a block each; every so many of the blocks here may not leave."""
        size = units * UNIT_BYTES
        for who in range(first, first + count):
            self.last += 1
            new = block(self.last, space_of(who, model), size)
            victims = self.table.victims(1, size, self.may_leave(stays), new.namespace)
            assert all(map(self.may_leave(stays), victims.names))
            for gone in victims.names:
                self.table.evict(gone)
            if self.table.room_for(1, size):
                register(self.table, new)

    def may_leave(self, stays: int) -> partial[bool]:
        return partial(_is_not_every, stays)

    @precondition(lambda self: len(self.table) > 0)
    @rule(data=st.data(), count=st.integers(1, 3))
    def pin(self, data: st.DataObject, count: int) -> None:
        here = sorted(one.hash for one in self.table.blocks())
        for chosen in here[:: max(1, len(here) // count)]:
            self.pinned += self.table.pin_prefix([chosen])

    @rule(count=st.integers(1, 5))
    def unpin(self, count: int) -> None:
        ended, self.pinned = self.pinned[:count], self.pinned[count:]
        self.table.unpin(ended)

    @rule(every=st.integers(1, 3))
    def reset(self, every: int) -> None:
        """Blocks are thrown away, pinned ones too: tenants without one are left."""
        for gone in [one.hash for one in self.table.blocks()][::every]:
            self.table.discard(gone)

    @rule(now_ms=st.sampled_from((0, 1, 4_000_000, 9_000_000)))
    def tick(self, now_ms: int) -> None:
        self.table.tenants.tick(now_ms)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy: str) -> None:
        self.policy = policy
        self.table.use_policy(partial(make_policy, policy))

    @rule()
    def restart(self) -> None:
        """The next life finds all of it, and goes on."""
        former, self.pinned = self.table.by_place(), []
        self.table = table_of(self.shares, self.policy)
        self.table.restore(former)
        assert self.table.by_place() == former

    @rule(count=st.integers(1, 9))
    def unfold(self, count: int) -> None:
        self.table.unfold(count)

    @invariant()
    def all_that_is_idle_can_leave(self) -> None:
        self.table.check()
        held = set(self.pinned)
        idle = {one.hash for one in self.table.blocks() if self.slot_of(one) not in held}
        assert all_idle(self.table) == idle
        sizes = self.table.pool.sizes.values()
        named = [one for size in sizes for one in self.table.worst_of(size, len(idle), anything)]
        assert set(named) == idle

    def slot_of(self, one: Block) -> int:
        slot = self.table.find(one.hash)
        assert slot is not None
        return slot


def _is_not_every(stays: int, one: SequenceHash) -> bool:
    return int.from_bytes(one, "big") % (stays + 1) != 0


TestManyTenants = ManyTenants.TestCase
TestManyTenants.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
