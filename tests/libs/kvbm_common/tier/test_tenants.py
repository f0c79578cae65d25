"""Tenants in one tier: a full tier takes a block from the tenant that is furthest above its share.

What the table does is compared with a plain list of blocks in the order of their last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import Namespace, SequenceHash, of_tenant
from kvbm_common.tenant_tag import tag_of, tenant_tag
from kvbm_common.tier.block_lookup import WHOLE_MAX
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.tier.tenants import IDLE_MS, TENANTS_MAX, Tenants, shares_of

from tests.libs.helpers import StrictLru, largest_table, make_room, name

PLAIN = Namespace(model="test", block_tokens=4)
SPACES = {who: of_tenant(PLAIN, who).digest for who in ("", "gold", "silver", "tin")}
SLOTS = 12
SIZE = 64


def table_of(shares: str = "", slots: int = SLOTS, policy: str = "") -> SlotTable:
    """A table whose slots take blocks of any size."""
    make = partial(make_policy, policy) if policy else lambda _: StrictLru()
    return SlotTable(Layout.unsized(slots), make, Tenants(shares_of(shares)))


def block(number: int, who: str, size: int = SIZE) -> Block:
    """A block of a tenant, after no other."""
    return Block(name(number), name(0), SPACES[who], number, size)


def store(table: SlotTable, who: str, numbers: Sequence[int], size: int = SIZE) -> list[int]:
    """Make room for blocks and commit them, one by one; returns what had to leave."""
    gone: list[int] = []
    for number in numbers:
        new = block(number, who, size)
        gone += [number_of(one.hash) for one in make_room(table, 1, size, new.namespace)]
        slot = table.stage(new.hash, size)
        assert slot is not None, f"no room for {number}"
        table.register(slot, new)
        table.check()
    return gone


def number_of(one: SequenceHash) -> int:
    return int.from_bytes(one, "big")


def held(table: SlotTable) -> Counter[str]:
    """How many blocks each tenant has here."""
    who = {digest: one for one, digest in SPACES.items()}
    return Counter(who[one.namespace] for one in table.blocks())


@pytest.mark.slow
@pytest.mark.parametrize("who", ["", "gold"])
def test_no_table_of_a_tier_holds_more_than_a_part_of_the_blocks(who: str) -> None:
    """Python's tables move all of their entries when they grow: 0.1 s for a million slots."""
    count = 2 * WHOLE_MAX
    table = table_of(slots=count, policy="lru")
    for number in range(count):
        new = block(number, who)
        table.register_all([(table.stage_all([new.hash], SIZE)[0], new)])
    assert len(table) == count
    assert largest_table(table) < count // 100


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tenant_keeps_its_share_however_much_another_stores(policy: str) -> None:
    """gold has half of the slots, and more than that while nothing else wants them."""
    table = table_of(policy=policy)
    store(table, "gold", range(1, 13))
    gone = store(table, "silver", range(101, 201))
    assert held(table) == {"gold": 6, "silver": 6}
    assert len([one for one in gone if one < 100]) == 6
    assert store(table, "gold", range(21, 27)) != []
    assert held(table) == {"gold": 6, "silver": 6}


def test_engines_without_a_tenant_are_one_tenant() -> None:
    table = table_of()
    store(table, "", range(1, 13))
    store(table, "gold", range(101, 113))
    store(table, "", range(21, 61))
    assert held(table) == {"": 6, "gold": 6}


def test_weights_say_how_much_each_keeps() -> None:
    """Weights of 3, 2 and 1 are 6, 4 and 2 of 12 slots."""
    table = table_of("gold=3,silver=2,*=1")
    store(table, "tin", range(5000, 5040))
    store(table, "silver", range(6000, 6040))
    store(table, "gold", range(7000, 7040))
    assert held(table) == {"gold": 6, "silver": 4, "tin": 2}


def test_a_tenant_above_its_share_takes_nothing_where_all_its_blocks_are_pinned() -> None:
    """gold reads all of its six blocks: silver, which has its share, does not pay for more."""
    table = table_of()
    store(table, "gold", range(1, 7))
    store(table, "silver", range(11, 17))
    assert len(table.pin_prefix([name(number) for number in range(1, 7)])) == 6
    assert table.victims(1, SIZE, None, SPACES["gold"]).names == []
    assert len(table.victims(1, SIZE, None, SPACES["silver"]).names) == 1


def test_blocks_that_may_not_leave_count_as_no_loss_of_their_tenant() -> None:
    """Of gold's ten blocks one may leave, and both of silver's. Without gold's others silver gives
    its own for its own; gold, above its share, gets none of them."""
    table = table_of()
    store(table, "gold", range(1, 11))
    store(table, "silver", range(11, 13))
    may_leave = {name(7), name(11), name(12)}.__contains__
    for_silver = table.victims(4, SIZE, may_leave, SPACES["silver"]).names
    assert for_silver[0] == name(7)
    assert set(for_silver) == {name(7), name(11), name(12)}
    assert table.victims(4, SIZE, may_leave, SPACES["gold"]).names == [name(7)]
    [size] = table.pool.sizes.values()
    assert set(table.worst_of(size, 9, may_leave)) == set(for_silver)


def test_a_tenant_that_is_gone_for_an_hour_has_no_share() -> None:
    table = table_of()
    store(table, "gold", range(1, 7))
    store(table, "silver", range(11, 17))
    table.tenants.tick(1000)
    store(table, "silver", range(21, 25))
    table.tenants.tick(1000 + IDLE_MS // 2)
    assert held(table)["gold"] == 6
    store(table, "silver", range(31, 35))
    table.tenants.tick(1001 + IDLE_MS)
    store(table, "silver", range(41, 45))
    assert held(table) == {"gold": 2, "silver": 10}
    shares = {one.name: one.share_bytes for one in table.tenant_figures()}
    assert 0 in shares.values()
    store(table, "gold", range(51, 61))  # It is back.
    assert held(table) == {"gold": 6, "silver": 6}


def tenants_with(shares: str, names: Sequence[str]) -> Tenants:
    """Tenants that have said their names and have a block each."""
    tenants = Tenants(shares_of(shares))
    for one in names:
        tenants.call(one)
        tenant = tenants.of(of_tenant(PLAIN, one).digest)
        tenant.block_count += 1
        tenant.used_bytes += SIZE
    return tenants


@pytest.mark.parametrize("unclear", ["others", tag_of("u0").hex()])
def test_no_two_tenants_have_one_name(unclear: str) -> None:
    """A tenant is called as those beyond the limit are, or as the tag of one without a name."""
    wanted = [unclear, *(f"u{number}" for number in range(TENANTS_MAX + 4))]
    shown = [one.name for one in tenants_with("", wanted).figures(100)]
    assert len(shown) == len(set(shown)) == TENANTS_MAX
    assert tag_of(unclear).hex() in shown
    shown = [one.name for one in tenants_with(f"{unclear}=2", wanted).figures(100)]
    assert len(shown) == len(set(shown)) == TENANTS_MAX


@pytest.mark.parametrize("listed", [0, 10, TENANTS_MAX - 1, TENANTS_MAX])
def test_those_listed_have_their_places_and_the_limit_holds(listed: int) -> None:
    """The others come first, and take none of the places of those that are listed."""
    names = [f"l{number}" for number in range(listed)]
    shares = ",".join(f"{one}=1" for one in names)
    wanted = [f"u{number}" for number in range(40)] + names
    shown = [one.name for one in tenants_with(shares, wanted).figures(100)]
    assert set(names) <= set(shown)
    assert len(shown) <= max(TENANTS_MAX, listed + 1)


def test_names_that_were_said_long_ago_make_room_for_new_ones() -> None:
    tenants = tenants_with("", ["gold"])
    for number in range(10 * TENANTS_MAX):
        tenants.call(f"u{number}")
    assert tenants.of(of_tenant(PLAIN, f"u{number}").digest).name == f"u{number}"
    assert [one.name for one in tenants.figures(100)] == ["gold"]


def test_tenants_beyond_the_limit_have_one_share_together() -> None:
    """A name for each block takes no more than what a tenant has."""
    table = table_of(slots=4 * TENANTS_MAX)
    store(table, "gold", range(1, 5))
    for number in range(1000, 1000 + 8 * TENANTS_MAX):
        digest = of_tenant(PLAIN, f"t{number}").digest
        new = msgspec.structs.replace(block(number, ""), namespace=digest)
        make_room(table, 1, SIZE, digest)
        slot = table.stage(new.hash, SIZE)
        assert slot is not None
        table.register(slot, new)
        table.check()
    assert sum(one.namespace == SPACES["gold"] for one in table.blocks()) == 4
    assert len(table.tenant_figures()) <= TENANTS_MAX + 1
    assert "others" in [one.name for one in table.tenant_figures()]


def test_tenants_that_have_left_nothing_are_forgotten() -> None:
    """They come one after the other: each has a share of its own, and leaves no policy behind."""
    table = table_of(slots=2)
    for number in range(1000, 1000 + 4 * TENANTS_MAX):
        digest = of_tenant(PLAIN, f"t{number}").digest
        new = msgspec.structs.replace(block(number, ""), namespace=digest)
        slot = table.stage(new.hash, SIZE)
        assert slot is not None
        table.register(slot, new)
        assert [one.share_bytes for one in table.tenant_figures()] == [table.usable_bytes]
        table.check()
        table.evict(new.hash)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_of_a_former_life_are_their_tenants(policy: str) -> None:
    """The namespace of each says whose it is: nothing else was kept."""
    former = {slot: block(slot + 1, ("gold", "silver", "")[slot % 3]) for slot in range(SLOTS)}
    table = table_of(policy=policy)
    table.restore(former)
    table.check()
    gone = store(table, "silver", range(100, 140))
    assert held(table) == {"": 4, "gold": 4, "silver": 4}
    assert {(one - 1) % 3 for one in gone if one < 100} == {1}
    while table.folded_count:
        table.unfold(5)
        table.check()


def test_a_new_policy_learns_the_blocks_of_every_tenant() -> None:
    table = table_of()
    store(table, "gold", range(1, 7))
    store(table, "silver", range(11, 17))
    table.use_policy(partial(make_policy, "prefix"))
    table.check()
    assert {
        number_of(one) > 10 for one in table.victims(2, SIZE, None, SPACES["silver"]).names
    } == {True}


# --- blocks of several sizes ----------------------------------------------------------------------


def sized_table(slabs: int, shares: str = "") -> SlotTable:
    """A table of slabs of 6 units of 4 KiB."""
    layout = Layout(UNIT_BYTES, slabs * 6, 6)
    return SlotTable(layout, lambda _: StrictLru(), Tenants(shares_of(shares)))


def used_bytes(table: SlotTable) -> dict[str, int]:
    who = {digest: one for one, digest in SPACES.items()}
    used = Counter[str]()
    for one in table.blocks():
        used[who[one.namespace]] += one.bytes
    return dict(used)


def test_larger_blocks_of_another_tenant_take_no_slab_from_one_within_its_share() -> None:
    """gold has half of the memory in small blocks, and is idle; silver stores large ones."""
    table = sized_table(8)
    store(table, "gold", range(1, 25), UNIT_BYTES)
    store(table, "silver", range(100, 300), 3 * UNIT_BYTES)
    assert used_bytes(table)["gold"] == 24 * UNIT_BYTES


def test_a_tenant_below_its_share_gets_slabs_of_one_above() -> None:
    """gold has all slabs, and uses all of its blocks; silver gets its half."""
    table = sized_table(8)
    store(table, "gold", range(1, 49), UNIT_BYTES)
    for number in range(100, 140):
        store(table, "silver", [number], 3 * UNIT_BYTES)
        for mine in range(1, 49):
            table.unpin(table.pin_prefix([name(mine)]))
    assert used_bytes(table) == {"gold": 24 * UNIT_BYTES, "silver": 24 * UNIT_BYTES}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gold", "gold=0", "gold=-1", "a b=1", "gold=1,gold=2", "=1"])
def test_shares_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        shares_of(text)


def test_the_digest_of_a_namespace_tells_its_tenant_and_no_other_does() -> None:
    other = msgspec.structs.replace(of_tenant(PLAIN, "gold"), model="other")
    assert tenant_tag(other.digest) == tenant_tag(SPACES["gold"]) != tenant_tag(SPACES["silver"])
    assert tenant_tag(PLAIN.digest) == b""
    assert len({*SPACES.values(), other.digest}) == 5


# --- against a plain list -------------------------------------------------------------------------


class FairTable(RuleBasedStateMachine):
    """Three tenants of different weights store, read, lose and are idle, under LRU."""

    WEIGHTS: ClassVar[dict[str, float]] = {"": 1.0, "gold": 3.0, "silver": 2.0}

    @initialize()
    def begin(self) -> None:
        self.table = table_of("gold=3,silver=2")
        self.order: list[tuple[int, str]] = []
        """Blocks that can be evicted, the longest unused first."""
        self.pinned: dict[int, tuple[str, list[int]]] = {}
        self.last = 0
        self.came = [""]
        """Who has had blocks, in that order: of equals the first pays."""

    def used(self, who: str) -> int:
        mine = [one for _, one in self.order] + [one for one, _ in self.pinned.values()]
        return SIZE * mine.count(who)

    def expected(self, who: str, count: int) -> list[int]:
        """Return what leaves: of equals, the one that asks pays."""
        full = len(self.order) + len(self.pinned)
        used = {one: float(self.used(one)) for one in self.WEIGHTS}
        used[who] += count * SIZE
        left, gone = list(self.order), list[int]()
        for _ in range(max(0, full + count - SLOTS)):
            owners = {one for _, one in left}
            payers = [one for one in self.came if one in owners]
            level = {one: used[one] / self.WEIGHTS[one] for one in used}
            payer = max(payers, key=lambda one: (level[one], one == who), default="")
            if not payers or level[payer] < level[who]:
                break
            number = next(number for number, one in left if one == payer)
            left.remove((number, payer))
            used[payer] -= SIZE
            gone.append(number)
        return gone

    @rule(who=st.sampled_from(sorted(WEIGHTS)), count=st.integers(1, 4))
    def stores(self, who: str, count: int) -> None:
        expected = self.expected(who, count)
        gone = make_room(self.table, count, SIZE, SPACES[who])
        assert [number_of(one.hash) for one in gone] == expected, who
        self.order = [one for one in self.order if one[0] not in expected]
        new = [block(self.last + 1 + at, who) for at in range(self.table.room_for(count))]
        self.last += len(new)
        slots = self.table.stage_all([one.hash for one in new]) if new else []
        if slots:
            self.table.register_all(list(zip(slots, new, strict=True)))
        if new and who not in self.came:
            self.came.append(who)
        self.order += [(number_of(one.hash), who) for one in reversed(new)]

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        number, who = data.draw(st.sampled_from(self.order))
        self.order.remove((number, who))
        self.pinned[number] = who, self.table.pin_prefix([name(number)])

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpins(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pinned)))
        who, slots = self.pinned.pop(number)
        self.table.unpin(slots)
        if self.table.holds(name(number)):
            self.order.append((number, who))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def discards(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.order))
        self.order.remove(gone)
        assert self.table.discard(name(gone[0])) is not None

    @rule()
    def ticks(self) -> None:
        self.table.tenants.tick(1)

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        here = {number_of(one.hash) for one in self.table.blocks()}
        assert here == {number for number, _ in self.order} | self.pinned.keys()


TestFairTable = FairTable.TestCase
TestFairTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
