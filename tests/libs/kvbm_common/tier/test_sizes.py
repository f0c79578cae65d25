"""Slots of several sizes on one medium: no two overlap, none is lost, and every class gets room."""

from __future__ import annotations

from functools import partial
from time import process_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import UNIT_BYTES, Layout, rounded_up, slab_slots_of
from kvbm_common.tier.size_figures import NO_SIZES, size_figures, waste_percent
from kvbm_common.tier.slab_pool import SIZES_MAX
from kvbm_common.tier.slots import Block, SlotTable

from tests.libs.helpers import NAMESPACE, make_room, name, plain_table

UNITS = (1, 2, 3, 5, 6)
"""Blocks of up to a slab, in units of 4 KiB."""
SLAB_UNITS = 6
MIB = 1 << 20


def table_of(slabs: int, *, first: int = 1, policy: str = "lru", rest: int = 0) -> SlotTable:
    """A table of slabs of 6 units, cut for slots of `first` units; the last slab may be shorter."""
    slab_slots = SLAB_UNITS // first
    layout = Layout(first * UNIT_BYTES, slabs * slab_slots + rest, slab_slots)
    return SlotTable(layout, partial(make_policy, policy))


def sized(number: int, units: int) -> Block:
    """A block that takes so many units, though not all of the last one."""
    return Block(name(number), name(0), NAMESPACE, number, units * UNIT_BYTES - 8)


def store(table: SlotTable, units: int, *numbers: int) -> list[SequenceHash]:
    """Make room and commit, one by one; returns what had to leave."""
    gone: list[SequenceHash] = []
    for number in numbers:
        block = sized(number, units)
        gone += [one.hash for one in make_room(table, 1, block.bytes)]
        slot = table.stage(block.hash, block.bytes)
        assert slot is not None, f"no room for {number}"
        table.register(slot, block)
        table.check()
    return gone


def use(table: SlotTable, *numbers: int) -> None:
    """Ask for blocks by name."""
    for number in numbers:
        slots = table.pin_prefix([name(number)])
        assert slots, f"{number} is gone"
        table.unpin(slots)


def held(table: SlotTable) -> set[int]:
    """The blocks that are here."""
    return {int.from_bytes(one.hash, "big") for one in table.blocks()}


# --- layout ---------------------------------------------------------------------------------------


def test_slabs_grow_with_the_root_of_the_medium_between_their_limits() -> None:
    """64 KiB slots: an eighth of a small medium, 16 MiB, the root of 1 GiB · 1 MiB, 64 MiB."""
    media = (MIB, 128 * MIB, 1 << 30, 1 << 40)
    slabs = [slab_slots_of(1 << 16, medium) << 16 for medium in media]
    assert slabs == [MIB // 8, 16 * MIB, 32 * MIB, 64 * MIB]


def test_a_medium_for_one_size_wastes_nothing() -> None:
    """Ten slots of three units: all are usable, whatever slabs they are in."""
    layout = Layout.of(3 * UNIT_BYTES, 10)
    table = SlotTable(layout, partial(make_policy, "lru"))
    assert store(table, 3, *range(1, 11)) == []
    assert table.block_bytes == 10 * (3 * UNIT_BYTES - 8)
    assert table.room_for(1, 3 * UNIT_BYTES) == 0


def test_a_sealed_block_takes_the_seal_more() -> None:
    """A block of 5,000 bytes takes two units, and one for the seal."""
    layout = Layout.of(3 * UNIT_BYTES, 8, extra_bytes=UNIT_BYTES)
    assert (layout.slot_bytes_of(5_000), rounded_up(5_000)) == (3 * UNIT_BYTES, 2 * UNIT_BYTES)


def test_slots_that_were_never_cut_hold_nothing() -> None:
    """The listing of a bucket goes over all slots of a table, used or not."""
    table = plain_table(3)
    assert [(table.committed(slot), table.generation(slot)) for slot in range(3)] == [(None, 0)] * 3


# --- classes --------------------------------------------------------------------------------------


def test_a_slab_changes_its_class_when_all_its_blocks_have_left() -> None:
    """1. Two slabs full of small blocks. 2. A large one takes the longer idle slab, whole."""
    table = table_of(2)
    store(table, 1, *range(1, 13))
    assert set(store(table, 6, 20)) == {name(number) for number in range(1, 7)}
    assert held(table) == {*range(7, 13), 20}


def test_an_empty_slab_is_taken_before_anything_leaves() -> None:
    """The small blocks are gone by themselves: their slab is the large one's, without a victim."""
    table = table_of(1)
    store(table, 1, 1, 2)
    for number in (1, 2):
        table.discard(name(number))
    assert store(table, 6, 20) == []


def test_a_block_longer_than_a_slab_has_no_class() -> None:
    """Of 6 units a slot may have all; 7 fit nowhere, and nothing is evicted for them."""
    table = table_of(2)
    store(table, 1, 1)
    assert table.room_for(1, 6 * UNIT_BYTES) == 1
    assert table.room_for(1, 7 * UNIT_BYTES) == 0
    assert table.victims(1, 7 * UNIT_BYTES).names == []
    assert table.stage(name(9), 7 * UNIT_BYTES) is None


def test_classes_are_bounded_and_those_without_slabs_are_forgotten() -> None:
    """1. 32 classes, two of them with slabs. 2. One more: the others are forgotten, these stay."""
    layout = Layout(UNIT_BYTES, 3 * 64, 64)
    table = SlotTable(layout, partial(make_policy, "lru"))
    store(table, 1, 1)
    store(table, 2, 2)
    for units in range(3, SIZES_MAX + 1):
        assert table.room_for(1, units * UNIT_BYTES) == 1
    assert len(table.pool.sizes) == SIZES_MAX
    assert table.room_for(1, 40 * UNIT_BYTES) == 1
    assert sorted(table.pool.sizes) == [UNIT_BYTES, 2 * UNIT_BYTES, 40 * UNIT_BYTES]
    table.check()


def test_a_tier_whose_classes_all_have_slabs_refuses_one_more() -> None:
    """Each of 32 slabs has a class of its own: block 33 of another size has no slot, ever."""
    layout = Layout(UNIT_BYTES, SIZES_MAX * 40, 40)
    table = SlotTable(layout, partial(make_policy, "lru"))
    for units in range(1, SIZES_MAX + 1):
        store(table, units, units)
    assert table.room_for(1, 40 * UNIT_BYTES) == 0


# --- fairness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_class_that_is_not_used_any_more_loses_all_its_slabs(policy: str) -> None:
    """Ten slabs of small blocks; then only large ones come, and get all of the medium."""
    table = table_of(10, policy=policy)
    store(table, 1, *range(1, 61))
    store(table, 6, *range(100, 130))
    assert len(held(table)) == 10
    assert min(held(table)) >= 100


def test_a_class_that_is_used_loses_nothing_to_one_that_is_used_once() -> None:
    """Five slabs of small blocks are used again and again; large ones pass through the others."""
    table = table_of(10)
    small = range(1, 31)
    store(table, 1, *small)
    for number in range(100, 140):
        use(table, *small)
        store(table, 6, number)
    assert held(table) >= set(small)


def test_free_slots_of_a_slab_are_no_older_than_the_slab() -> None:
    """A class with one new block, and room for more, loses nothing to one that came before it."""
    table = table_of(2)
    store(table, 1, *range(1, 7))
    store(table, 2, 20)
    assert set(store(table, 6, 30)) == {name(number) for number in range(1, 7)}
    assert held(table) == {20, 30}


def test_after_a_restart_the_oldest_slab_gives_way_first() -> None:
    """A former life has used 1 to 6 last, although they came first: 7 to 12 leave for a large one.

    The next large one finds the small blocks that are left older than the first large one.
    """
    before = table_of(2)
    store(before, 1, *range(1, 13))
    blocks = before.by_place()
    places = list(blocks)
    after = table_of(2)
    after.restore({place: blocks[place] for place in (*places[6:], *places[:6])})
    assert set(store(after, 6, 20)) == {name(number) for number in range(7, 13)}
    assert held(after) == {*range(1, 7), 20}
    assert set(store(after, 5, 21)) == {name(number) for number in range(1, 7)}


def test_classes_that_are_used_alike_share_the_medium() -> None:
    """As many bytes of each size come in turn: neither has more than twice the other's slabs."""
    table = table_of(20)
    for turn in range(100):
        store(table, 1, *range(1_000 + 6 * turn, 1_006 + 6 * turn))
        store(table, 6, 10_000 + turn)
    small, large = (len(size.slabs) for size in table.pool.sizes.values())
    assert max(small, large) <= 2 * min(small, large)


def test_a_slab_with_a_pinned_block_follows_when_its_pin_ends() -> None:
    """1. One block of each slab is pinned: a large one finds no room. 2. A pin ends: it does."""
    table = table_of(2)
    store(table, 1, *range(1, 13))
    pinned = table.pin_prefix([name(1)]) + table.pin_prefix([name(12)])
    for gone in make_room(table, 1, 6 * UNIT_BYTES):
        assert gone.hash not in {name(1), name(12)}
    assert table.room_for(1, 6 * UNIT_BYTES) == 0
    table.check()
    table.unpin(pinned)
    make_room(table, 1, 6 * UNIT_BYTES)
    assert table.room_for(1, 6 * UNIT_BYTES) == 1
    table.check()


# --- figures, restart, resize ---------------------------------------------------------------------


def test_figures_tell_of_every_size() -> None:
    """Of two slabs one has a small block, one a large one; a table without lengths has none."""
    table = table_of(3)
    store(table, 1, 1)
    store(table, 5, 2)
    figures = size_figures(table)
    assert figures["slabs"] == {"free": 1, "cut": 2, "leaving": 0}
    assert [(one.slot_bytes // UNIT_BYTES, one.slots, one.used) for one in figures["sizes"]] == [
        (1, 6, 1),
        (5, 1, 1),
    ]
    assert waste_percent(table) == pytest.approx(50, abs=0.1)
    assert waste_percent(plain_table(2)) == 0
    assert NO_SIZES["sizes"] == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_of_all_sizes_come_back_where_they_were(policy: str) -> None:
    """A former life's blocks by place: they are found there, and slots beside them are free."""
    before = table_of(4, policy=policy)
    store(before, 1, 1, 2)
    store(before, 5, 3)
    store(before, 2, 4)
    after = table_of(4, policy=policy)
    after.restore(before.by_place())
    after.check()
    assert after.by_place() == before.by_place()
    assert store(after, 2, 5, 6) == []
    assert store(after, 1, 7, 8, 9, 10) == []


def test_a_smaller_tier_gives_up_bytes_of_any_size() -> None:
    """Half of the medium retires, as slots of the first size; what comes back serves all sizes."""
    table = table_of(2)
    store(table, 6, 1)
    assert table.retire(6) == 6
    assert (table.usable_count, table.room_for(2, 6 * UNIT_BYTES)) == (6, 0)
    assert table.revive(6) == 6
    assert table.room_for(2, 6 * UNIT_BYTES) == 1
    table.check()


def test_what_a_smaller_tier_gave_up_is_not_wasted() -> None:
    """Goal: an operator who makes a tier smaller does not read of waste.

    Of a slab of six slots three have blocks. 1. Three are free: half of it is wasted. 2. These
    retire: nothing is. 3. They come back.
    """
    table = table_of(1)
    store(table, 1, 1, 2, 3)
    assert waste_percent(table) == pytest.approx(50, abs=0.1)
    assert table.retire(3) == 3
    assert waste_percent(table) == pytest.approx(0, abs=0.2)
    assert table.revive(3) == 3
    assert waste_percent(table) == pytest.approx(50, abs=0.1)


def test_usable_bytes_of_many_slabs_are_counted_and_not_summed_up() -> None:
    """Each pin of a session asks: a sum over 50,000 slabs would take milliseconds each time."""
    table = SlotTable(Layout(UNIT_BYTES, 50_000, 1), partial(make_policy, "lru"))
    assert table.retire(7) == 7
    assert table.revive(3) == 3
    started_s = process_time()
    for _ in range(3_000):
        assert table.usable_bytes == (50_000 - 4) * UNIT_BYTES
    assert process_time() - started_s < 0.5


def test_what_retires_may_be_of_slabs_that_change_their_class_meanwhile() -> None:
    """1. A large slot is free: it is cut up for the slots that retire. 2. All come back."""
    table = table_of(2)
    table.abort(table.stage_all([name(1)], 2 * UNIT_BYTES)[0])
    table.stage_all([name(2)], 6 * UNIT_BYTES)
    assert table.retire(5) >= 5
    table.check()
    assert table.revive(12) >= 5
    assert table.usable_count == 12
    table.check()


def test_a_slab_that_was_out_of_use_in_part_comes_back_whole() -> None:
    """Of six units one retires; then slots of 3 and of 5 units are cut, which lose a whole one."""
    for units in (3, 5):
        table = table_of(1)
        assert table.retire(1) == 1
        slots = table.stage_all([name(1)], units * UNIT_BYTES)
        assert table.revive(1) == 1
        table.check()
        assert (table.usable_count, len(slots)) == (6, 1)


# --- any order of moves ---------------------------------------------------------------------------


class Sizes(RuleBasedStateMachine):
    """Blocks of five sizes come, are used, pinned, lost and evicted; a medium of units watches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(4)
        self.bytes_of: dict[SequenceHash, int] = {}
        self.places: dict[SequenceHash, int] = {}
        self.staged: dict[SequenceHash, int] = {}
        self.pinned: list[int] = []
        self.number = 0

    @initialize(
        slabs=st.integers(1, 5), first=st.sampled_from((1, 2, 3)), rest=st.integers(0, 1),
        policy=st.sampled_from(sorted(POLICIES)),
    )  # fmt: skip
    def lay_out(self, slabs: int, first: int, rest: int, policy: str) -> None:
        self.table = table_of(slabs, first=first, rest=rest, policy=policy)

    @rule(units=st.sampled_from(UNITS), count=st.integers(1, 7))
    def stage(self, units: int, count: int) -> None:
        """Room is made as the tiers do it; whatever room there is now can be staged at once."""
        size = units * UNIT_BYTES - 8
        for gone in make_room(self.table, count, size):
            del self.places[gone.hash]
        room = self.table.room_for(count, size)
        names = [name(self.number + index + 1) for index in range(room)]
        self.number += room
        slots = self.table.stage_all(names, size)
        self.staged.update(zip(names, slots, strict=True))
        self.bytes_of.update(dict.fromkeys(names, size))

    @precondition(lambda self: self.staged)
    @rule(arrived=st.booleans())
    def end(self, arrived: bool) -> None:
        staged, self.staged = self.staged, {}
        for block, slot in staged.items():
            if arrived:
                held_bytes = self.bytes_of[block]
                self.table.register(slot, Block(block, name(0), NAMESPACE, 1, held_bytes))
                self.places[block] = self.table.place(slot)
            else:
                self.table.abort(slot)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.places)))
        self.pinned += self.table.pin_prefix([chosen])

    @rule(count=st.integers(1, 5))
    def unpin(self, count: int) -> None:
        ended, self.pinned = self.pinned[:count], self.pinned[count:]
        self.table.unpin(ended)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.places)))
        self.table.discard(chosen)
        del self.places[chosen]

    @rule(count=st.integers(0, 8))
    def resize(self, count: int) -> None:
        self.table.retire(count)
        self.table.revive(count // 2)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy: str) -> None:
        self.table.use_policy(partial(make_policy, policy))

    @invariant()
    def no_two_blocks_share_a_unit(self) -> None:
        self.table.check()
        assert {block.hash for block in self.table.blocks()} == self.places.keys()
        taken: set[int] = set()
        places = self.places | {n: self.table.place(slot) for n, slot in self.staged.items()}
        for block, place in places.items():
            units = set(range(place, place + rounded_up(self.bytes_of[block]) // UNIT_BYTES))
            assert not taken & units
            taken |= units
        assert max(taken, default=0) < self.table.pool.layout.total_bytes // UNIT_BYTES

    @invariant()
    def blocks_stay_where_they_are(self) -> None:
        for block, place in self.places.items():
            slot = self.table.find(block)
            assert slot is not None
            assert self.table.place(slot) == place

    @rule()
    def a_restart_finds_all_of_them(self) -> None:
        layout = self.table.pool.layout
        again = SlotTable(layout, partial(make_policy, "lru"))
        again.restore(self.table.by_place())
        again.check()
        assert again.by_place() == self.table.by_place()

    def teardown(self) -> None:
        """Without pins a block of every size finds room: nothing is held without end."""
        for slot in self.staged.values():
            self.table.abort(slot)
        self.table.unpin(self.pinned)
        self.table.revive(self.table.slot_count)
        for units in UNITS:
            if units * UNIT_BYTES <= self.table.pool.layout.slab_bytes:
                make_room(self.table, 1, units * UNIT_BYTES)
                assert self.table.room_for(1, units * UNIT_BYTES) == 1
        self.table.check()


TestSizes = Sizes.TestCase
TestSizes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
