"""The slot machine: its drawing move by move, and every order of moves with leases on top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.leases import PIN, Lease, LeaseTable
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.slot_blocks import STRETCH_BITS, STRETCHES_MAX
from kvbm_common.tier.slots import Block, SlotTable

from tests.libs.helpers import block, make_room, name, names, plain_table, policy_of


def table_of(*numbers: int, slot_count: int = 4) -> SlotTable:
    """A table in which these blocks were committed, oldest first."""
    table = plain_table(slot_count)
    for number in numbers:
        commit(table, number)
    return table


def commit(table: SlotTable, number: int) -> int:
    """Stage and register; returns the slot."""
    slot = table.stage(name(number))
    assert slot is not None
    table.register(slot, block(number))
    return slot


def unfolded(table: SlotTable) -> list[Block]:
    """What a snapshot tells of."""
    return [one for part in table.cut(2) for one in table.unfolded_in(part)]


def slot_of(table: SlotTable, number: int) -> int:
    """Where a committed block is."""
    slot = table.find(name(number))
    assert slot is not None
    return slot


# --- the moves, one by one ----------------------------------------------------------------------


def test_a_staged_block_cannot_be_found() -> None:
    """1. Stage 1: on its way. 2. Register: there, with its block."""
    table = plain_table(2)
    slot = table.stage(name(1))
    assert slot == 0
    assert table.is_staging(name(1))
    assert table.find(name(1)) is None
    table.register(slot, block(1))
    assert not table.is_staging(name(1))
    assert table.find(name(1)) == slot
    assert table.block(slot) == block(1)
    table.check()


def test_a_table_without_slots_gets_them_once() -> None:
    """A host tier learns the size of its slots from the first engine."""
    table = plain_table(0, partial(make_policy, "lru"))
    assert (table.reset_count, make_room(table, 1)) == (0, [])
    table.lay_out(Layout.unsized(2), partial(make_policy, "lru"))
    assert (table.slot_count, table.reset_count, table.counts()["total"]) == (2, 2, 2)
    table.stage_all(names(1, 2))
    assert table.reset_count == 0
    table.check()
    with pytest.raises(AssertionError, match="once"):
        table.lay_out(Layout.unsized(3), partial(make_policy, "lru"))


def test_stage_without_a_reset_slot_is_an_ordinary_no() -> None:
    """Staging never evicts by itself: `make_room` does, and says whom."""
    table = table_of(1, 2, slot_count=2)
    assert table.stage(name(3)) is None
    assert make_room(table, 1) == [block(2)]
    assert table.stage(name(3)) is not None


def test_make_room_evicts_only_what_is_short_and_never_a_pinned_block() -> None:
    """Slots: 1 pinned, 2 and 3 inactive, one reset. Room for two costs one block, for four two."""
    table = table_of(1, 2, 3)
    table.pin(slot_of(table, 1))
    assert make_room(table, 2) == [block(3)]
    assert make_room(table, 4) == [block(2)]
    assert make_room(table, 4) == []
    assert table.counts() == {
        "reset": 3,
        "staged": 0,
        "inactive": 0,
        "active": 1,
        "retired": 0,
        "total": 4,
    }


def test_a_chain_is_evicted_leaf_first() -> None:
    """A lease over 1, 2, 3 in prefix order ends: 3 is worth least without its parents."""
    table = table_of(1, 2, 3, slot_count=3)
    slots = [slot_of(table, number) for number in (1, 2, 3)]
    for slot in slots:
        table.pin(slot)
    table.unpin(slots)
    assert make_room(table, 3) == [block(3), block(2), block(1)]


def test_generation_tells_that_a_slot_is_another_blocks() -> None:
    """Whoever remembered slot 0 for block 1 sees that it was staged again."""
    table = table_of(1, slot_count=1)
    before = table.generation(0)
    table.evict(name(1))
    assert table.generation(0) == before
    assert commit(table, 2) == 0
    assert table.generation(0) == before + 1


def test_a_discarded_block_is_gone_at_once_and_its_slot_with_the_last_pin() -> None:
    """1. 1 is pinned twice and discarded. 2. Its name is free: it is committed again elsewhere.

    3. The last unpin resets the first slot, and leaves the new copy alone.
    """
    table = table_of(1)
    bad = slot_of(table, 1)
    table.pin(bad)
    table.pin(bad)
    assert table.discard(name(1)) == block(1)
    assert table.find(name(1)) is None
    assert table.discard(name(1)) is None
    assert table.block(bad) == block(1), "who holds a pin still sees what it was"
    good = commit(table, 1)
    assert good != bad
    table.unpin([bad])
    table.check()
    assert table.counts()["reset"] == 2
    table.unpin([bad])
    table.check()
    assert table.counts()["reset"] == 3
    assert table.find(name(1)) == good


def test_an_unpinned_block_is_discarded_into_reset() -> None:
    """Nobody holds it: the slot is free at once."""
    table = table_of(1, 2)
    assert table.discard(name(1)) == block(1)
    assert table.counts()["reset"] == 3
    table.check()


def test_an_abandoned_slot_is_not_used_while_its_name_is() -> None:
    """1. Late bytes may reach slot 0. 2. Block 1 goes elsewhere. 3. Abort gives slot 0 back."""
    table = plain_table(2)
    late = table.stage(name(1))
    assert late == 0
    table.abandon(late)
    assert not table.is_staging(name(1))
    assert commit(table, 1) == 1
    assert table.stage(name(2)) is None, "slot 0 is not safe yet"
    assert table.staged() == {late}
    table.check()
    table.abort(late)
    assert table.stage(name(2)) == late
    table.check()


def test_restore_puts_blocks_where_they_were() -> None:
    """A journal says: slot 2 holds 7, slot 0 holds 9. The other slots stay usable."""
    table = plain_table(4)
    table.restore({2: block(7), 0: block(9)})
    table.check()
    assert (table.find(name(7)), table.find(name(9))) == (2, 0)
    assert {commit(table, 1), commit(table, 2)} == {1, 3}
    assert table.stage(name(3)) is None


def test_after_a_restore_leaves_leave_before_their_roots() -> None:
    """Two chains, 1 ← 2 ← 3 and 4 ← 5, the first committed first."""
    chain = {1: 0, 2: 1, 3: 2, 4: 0, 5: 4}
    blocks = [msgspec.structs.replace(block(n), parent=name(p)) for n, p in chain.items()]
    for policy in ("lru", "lfu"):
        table = plain_table(5, partial(make_policy, policy))
        table.restore(dict(enumerate(blocks)))
        table.check()
        assert policy_of(table).victims(5) == [name(number) for number in (3, 2, 1, 5, 4)]


def test_restored_blocks_are_unfolded_in_their_order_and_once() -> None:
    """1. Of four one leaves, one is discarded under a pin, and a new one takes a slot.
    2. What is unfolded is what is left of the four; nobody sees a difference otherwise.
    """
    table = plain_table(4)
    table.restore({3: block(1), 0: block(2), 1: block(3), 2: block(4)})
    assert table.folded([name(2), name(7)]) == {name(2)}
    assert table.unfold(1) == [block(1)]
    table.pin(1)
    assert table.discard(name(3)) == block(3)
    assert table.evict(name(2)) == block(2)
    assert commit(table, 9) == 0
    assert table.blocks() == [block(9), block(4), block(1)]
    assert unfolded(table) == [block(9), block(1)]
    assert table.folded(names(1, 2, 3, 4, 9)) == {name(4)}
    table.check()
    assert table.unfold(9) == [block(4)]
    assert table.folded_count == 0
    assert table.unfold(1) == []
    table.unpin([1])
    table.check()
    assert table.blocks() == unfolded(table) == [block(9), block(4), block(1)]


def test_restore_wants_an_empty_table() -> None:
    """A second life never runs over the first."""
    with pytest.raises(AssertionError):
        table_of(1).restore({0: block(2)})


def _reset(table: SlotTable) -> int:
    return 3


def _staged(table: SlotTable) -> int:
    slot = table.stage(name(9))
    assert slot is not None
    return slot


def _active(table: SlotTable) -> int:
    slot = slot_of(table, 1)
    table.pin(slot)
    return slot


@pytest.mark.parametrize(
    ("prepare", "move"),
    [
        (_reset, lambda table, slot: table.abort(slot)),
        (_reset, lambda table, slot: table.pin(slot)),
        (_staged, lambda table, slot: table.pin(slot)),
        (_active, lambda table, slot: table.abort(slot)),
        (_active, lambda table, slot: table.evict(name(1))),
    ],
    ids=["abort reset", "pin reset", "pin staged", "abort active", "evict active"],
)
def test_a_move_that_is_not_drawn_is_our_mistake(
    prepare: Callable[[SlotTable], int], move: Callable[[SlotTable, int], None]
) -> None:
    """Every pair that the table does not list raises InvalidTransition, which names the slot."""
    table = table_of(1)
    slot = prepare(table)
    with pytest.raises(InvalidTransition, match=f"slot {slot}"):
        move(table, slot)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda table: table.stage(name(1)),
        lambda table: table.register(0, block(2)),
        lambda table: table.unpin([0]),
        lambda table: table.abandon(0),
    ],
    ids=["stage a committed block", "register unstaged", "unpin unpinned", "abandon committed"],
)
def test_misuse_is_an_assertion(misuse: Callable[[SlotTable], object]) -> None:
    """Our mistakes stop us before they do harm."""
    table = table_of(1)
    with pytest.raises(AssertionError):
        misuse(table)
    table.check()


# --- many blocks at once ------------------------------------------------------------------------


def test_blocks_that_are_here_or_on_their_way_in_are_not_absent() -> None:
    """1 is committed, 2 staged, 3 neither."""
    table = table_of(1)
    table.stage(name(2))
    assert table.has_none_of(names(3))
    assert not table.has_none_of(names(3, 1))
    assert not table.has_none_of(names(3, 2))
    assert table.has_none_of([])


def test_the_latest_blocks_of_a_former_life_are_listed_oldest_first() -> None:
    """Of four, the last two, or all that are folded still."""
    table = plain_table(4)
    table.restore({3: block(1), 0: block(2), 1: block(3), 2: block(4)})
    assert table.latest_folded(2) == names(3, 4)
    assert table.latest_folded(9) == names(1, 2, 3, 4)
    assert table.latest_folded(0) == []
    table.unfold(3)
    assert table.latest_folded(2) == names(4)
    assert table_of(1, 2).latest_folded(2) == []


def test_a_batch_is_staged_in_order_and_its_leaf_leaves_first() -> None:
    """1 ← 2 ← 3 come together: slots 0, 1, 2; the root is evicted last."""
    table = plain_table(4)
    slots = table.stage_all(names(1, 2, 3))
    assert slots == [0, 1, 2]
    assert all(table.is_staging(one) for one in names(1, 2, 3))
    table.register_all([(slot, block(slot + 1)) for slot in slots])
    table.check()
    assert [table.find(one) for one in names(1, 2, 3)] == [0, 1, 2]
    assert make_room(table, 4) == [block(3), block(2), block(1)]


def test_a_block_cannot_be_staged_twice() -> None:
    """Neither while it is on its way in, nor in one batch."""
    table = plain_table(4)
    table.stage(name(1))
    with pytest.raises(AssertionError):
        table.stage(name(1))
    with pytest.raises(AssertionError):
        table.stage_all(names(2, 2))


def test_a_prefix_is_pinned_up_to_the_first_block_that_is_not_here() -> None:
    """1 and 2 of 1, 2, 5, 3: each once more than before, and used. Then nothing of them can go."""
    table = table_of(1, 2, 3)
    table.pin(slot_of(table, 1))
    assert table.pin_prefix(names(1, 2, 5, 3)) == [0, 1]
    assert table.pins() == {0: 2, 1: 1}
    table.check()
    assert table.pin_prefix(names(5, 1)) == []
    assert make_room(table, 4) == [block(3)]
    table.unpin([0, 0, 1])
    table.check()


def test_a_pinned_prefix_counts_as_used() -> None:
    """1, the oldest, was asked for by name and outlives 2, which was only pinned."""
    table = plain_table(4, partial(make_policy, "lfu"))
    for number in (1, 2, 3):
        commit(table, number)
    table.unpin(table.pin_prefix(names(1)))
    table.pin(1)
    table.unpin([1])
    table.pin(2, used=True)
    table.unpin([2])
    assert make_room(table, 2) == [block(2)]


# --- a new table, and what a policy learns ------------------------------------------------------


def test_a_table_without_slots_has_room_for_nothing() -> None:
    """An arena that is still to be made: all questions have answers."""
    table = plain_table(0)
    assert table.stage(name(1)) is None
    assert ((table.reset_count + table.idle_count), make_room(table, 1), len(table)) == (0, [], 0)
    table.check()


def test_a_new_table_has_nothing_folded() -> None:
    """Nothing was restored: nothing is to be unfolded."""
    table = table_of(1)
    assert table.folded_count == 0
    assert table.folded(names(1)) == set()
    assert table.unfold(3) == []
    assert table.folded_count == 0


def test_after_a_restore_low_slots_are_staged_first() -> None:
    """Slot 1 of four is taken: then 0, 2, 3 in this order."""
    table = plain_table(4)
    table.restore({1: block(7)})
    assert table.stage_all(names(1, 2, 3)) == [0, 2, 3]


def test_a_policy_learns_the_parents() -> None:
    """1 ← 2 in the policy `prefix`: 1 is older, and leaves after 2, which continues it."""
    table = plain_table(2, partial(make_policy, "prefix"))
    for number, parent in ((1, 0), (2, 1)):
        slot = table.stage(name(number))
        assert slot is not None
        table.register(slot, block(number, parent=parent))
    assert [one.hash for one in make_room(table, 1)] == names(2)


# --- size and policy ----------------------------------------------------------------------------


def test_retired_slots_are_not_staged_until_they_are_revived() -> None:
    """1. Two of three empty slots go. 2. No more than are empty can. 3. They come back."""
    table = table_of(1)
    assert table.retire(2) == 2
    assert (table.usable_count, table.counts()["reset"], table.counts()["retired"]) == (2, 1, 2)
    assert commit(table, 2) is not None
    assert table.stage(name(3)) is None
    assert table.retire(1) == 0
    table.check()
    assert table.revive(5) == 2
    assert (table.usable_count, table.counts()["total"]) == (4, 4)
    assert table.stage(name(3)) is not None
    table.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_another_policy_takes_over_the_blocks(policy: str) -> None:
    """1 to 4, a chain, in order of use; 2 is pinned, 1 discarded while pinned. Neither can go.

    Nothing continues 4.
    """
    table = table_of(1, 2, 3, 4)
    gone, held = slot_of(table, 1), slot_of(table, 2)
    table.pin(gone)
    table.pin(held)
    table.discard(name(1))
    table.use_policy(partial(make_policy, policy))
    table.check()
    assert make_room(table, 1) == [block(4)]
    table.unpin([gone])
    table.unpin([held])
    table.check()
    assert {one.hash for one in make_room(table, 4)} == {name(2), name(3)}
    table.check()


def held_in(*slots: int) -> SlotTable:
    """A table of forty stretches of slots, of which these have a block each."""
    count = 40 << STRETCH_BITS
    table = plain_table(count, partial(make_policy, "lru"))
    assert table.stage_all(names(*range(1, count + 1))) == [*range(count)]
    table.register_all([(slot, block(slot + 1)) for slot in slots])
    for slot in sorted({*range(count)}.difference(slots)):
        table.abort(slot)
    table.check()
    return table


def test_a_listing_is_cut_where_blocks_are() -> None:
    """Two blocks are in the first stretch, two in the last: those are one part, or two."""
    end = 40 << STRETCH_BITS
    table = held_in(0, 1, end - 2, end - 1)
    first, last = range(1 << STRETCH_BITS), range(39 << STRETCH_BITS, end)
    assert table.cut(4) == [[first, last]]
    assert table.cut(3) == table.cut(1) == [[first], [last]]
    assert [one.hash for one in table.unfolded_in([last])] == names(end - 1, end)


def test_no_part_of_a_listing_goes_over_many_slots() -> None:
    """Blocks may come before a part is made: what it has then is bounded."""
    table = held_in(*range(0, 40 << STRETCH_BITS, 1 << STRETCH_BITS))
    assert [len(part) for part in table.cut(1_000)] == [STRETCHES_MAX, 40 - STRETCHES_MAX]


def test_a_listing_costs_no_call_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is made of it: a million calls held a host tier for half a second."""
    table, calls = plain_table(64), 0

    def counted(self: SlotTable, slot: int) -> Block:
        nonlocal calls
        calls += 1
        return original(self, slot)

    original = SlotTable.block
    for number in range(1, 65):
        slot = table.stage(name(number))
        assert slot is not None
        table.register(slot, block(number))
    monkeypatch.setattr(SlotTable, "block", counted)
    assert unfolded(table) == [block(number) for number in range(1, 65)]
    assert calls == 0


def test_block_bytes_follow_the_blocks() -> None:
    """Bytes of what is committed; a discarded block counts until its slot is empty."""
    table = table_of(1, 2)
    assert table.block_bytes == block(1).bytes + block(2).bytes
    slot = slot_of(table, 1)
    table.pin(slot)
    table.discard(name(1))
    assert table.block_bytes == block(1).bytes + block(2).bytes
    table.unpin([slot])
    assert table.block_bytes == block(2).bytes


# --- every order of moves -----------------------------------------------------------------------

NUMBERS = st.integers(1, 6)
OWNERS = st.sampled_from(["ada", "bob"])
REASONS = st.sampled_from([PIN, "test"])


class SlotsAndLeases(RuleBasedStateMachine):
    """Four slots, six blocks, two owners; a model of plain dicts says what must be true."""

    packs = False
    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = plain_table(4, packs=self.packs)
        self.lease_table = LeaseTable()
        self.diary = Diary()
        self.now_ms = 0
        self.committed: dict[SequenceHash, int] = {}
        self.staged: dict[SequenceHash, int] = {}
        self.abandoned: set[int] = set()
        self.generations = [0] * 4
        self.retired = 0

    def note(self, what: str, number: SequenceHash) -> None:
        self.diary.note(self.now_ms, what, number)

    @initialize(saved=st.dictionaries(st.integers(0, 3), NUMBERS, max_size=3))
    def restore(self, saved: dict[int, int]) -> None:
        once = {number: slot for slot, number in saved.items()}
        self.table.restore({slot: block(number) for number, slot in once.items()})
        for number, slot in once.items():
            self.note("restored", name(number))
            self.committed[name(number)] = slot
            self.generations[slot] += 1

    @rule(count=st.integers(1, 3))
    def unfold(self, count: int) -> None:
        before = unfolded(self.table)
        found = self.table.unfold(count)
        after = unfolded(self.table)
        assert {*after} == {*before, *found}
        assert len(after) == len(before) + len(found)

    @rule(number=NUMBERS)
    def stage(self, number: int) -> None:
        if name(number) in self.committed or name(number) in self.staged:
            return
        room = self.table.counts()["reset"]
        slot = self.table.stage(name(number))
        assert (slot is None) == (room == 0)
        if slot is not None:
            self.note("staged", name(number))
            assert slot not in self.in_use(), self.diary.story(name(number))
            self.staged[name(number)] = slot
            self.generations[slot] += 1

    def in_use(self) -> set[int]:
        leased = {slot for lease in self.lease_table.all() for slot in lease.slots}
        return {*self.committed.values(), *self.staged.values(), *self.abandoned, *leased}

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        staged = data.draw(st.sampled_from(sorted(self.staged)))
        slot = self.staged.pop(staged)
        self.table.register(slot, block(int.from_bytes(staged, "big")))
        self.note("registered", staged)
        self.committed[staged] = slot

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), late=st.booleans())
    def lose(self, data: st.DataObject, late: bool) -> None:
        """The bytes did not come; when `late`, they may still."""
        staged = data.draw(st.sampled_from(sorted(self.staged)))
        slot = self.staged.pop(staged)
        if late:
            self.table.abandon(slot)
            self.abandoned.add(slot)
        else:
            self.table.abort(slot)

    @precondition(lambda self: self.abandoned)
    @rule()
    def settle(self) -> None:
        self.table.abort(self.abandoned.pop())

    @rule(
        target=leases,
        wanted=st.lists(NUMBERS, max_size=3, unique=True),
        owner=OWNERS,
        reason=REASONS,
    )
    def grant(self, wanted: list[int], owner: str, reason: str) -> Lease:
        slots = [slot for n in wanted if (slot := self.table.find(name(n))) is not None]
        for slot in slots:
            self.table.pin(slot)
        return self.lease_table.grant(
            owner, reason, tuple(slots), deadline_ms=self.now_ms + 2 * len(slots)
        )

    @rule(target=leases, wanted=st.lists(NUMBERS, max_size=3, unique=True), owner=OWNERS)
    def grant_prefix(self, wanted: list[int], owner: str) -> Lease:
        slots = self.table.pin_prefix([name(n) for n in wanted])
        missing = next((i for i, n in enumerate(wanted) if self.table.find(name(n)) is None), None)
        assert slots == [slot_of(self.table, n) for n in wanted[:missing]]
        return self.lease_table.grant(owner, "test", tuple(slots), deadline_ms=self.now_ms + 2)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        ended = self.lease_table.release(lease.id)
        assert ended is None or ended == lease or {*ended.slots} < {*lease.slots}
        self.unpin([ended] if ended is not None else [])
        assert self.lease_table.release(lease.id) is None, "a lease ends once"

    @rule(step_ms=st.integers(0, 3))
    def expire(self, step_ms: int) -> None:
        self.now_ms += step_ms
        self.unpin(self.lease_table.expire(self.now_ms))
        assert all(lease.deadline_ms > self.now_ms for lease in self.lease_table.all())

    @rule(owner=OWNERS)
    def owner_dies(self, owner: str) -> None:
        self.unpin(self.lease_table.end_owner(owner))
        assert all(lease.owner != owner for lease in self.lease_table.all())

    def unpin(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.table.unpin(lease.slots)

    @rule(count=st.integers(0, 5))
    def make_room(self, count: int) -> None:
        pinned = {slot for lease in self.lease_table.all() for slot in lease.slots}
        reset = self.table.counts()["reset"]
        evictable = (self.table.reset_count + self.table.idle_count) - reset
        evicted = make_room(self.table, count)
        assert len(evicted) == min(max(0, count - reset), evictable)
        for gone in evicted:
            assert self.committed.pop(gone.hash) not in pinned, self.diary.story(gone.hash)
            self.note("evicted", gone.hash)

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        slot = self.table.find(name(number))
        self.table.unpin(self.lease_table.leave([] if slot is None else [slot]))
        gone = self.table.discard(name(number))
        assert (gone is not None) == (name(number) in self.committed)
        self.committed.pop(name(number), None)
        self.note("discarded", name(number))

    @rule(count=st.integers(0, 4))
    def retire(self, count: int) -> None:
        reset = self.table.counts()["reset"]
        assert self.table.retire(count) == min(count, reset)
        self.retired += min(count, reset)

    @rule(count=st.integers(0, 4))
    def revive(self, count: int) -> None:
        assert self.table.revive(count) == min(count, self.retired)
        self.retired -= min(count, self.retired)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy: str) -> None:
        room = self.table.reset_count + self.table.idle_count
        self.table.use_policy(partial(make_policy, policy))
        assert (self.table.reset_count + self.table.idle_count) == room

    @invariant()
    def retired_slots_are_none_of_the_others(self) -> None:
        assert self.table.usable_count == 4 - self.retired
        assert len(self.in_use()) <= self.table.usable_count

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.table.check()
        self.lease_table.check()
        for number in range(1, 7):
            story = self.diary.story(name(number))
            assert self.table.find(name(number)) == self.committed.get(name(number)), story
            assert self.table.is_staging(name(number)) == (name(number) in self.staged), story
        wanted = {slot: block(int.from_bytes(one, "big")) for one, slot in self.committed.items()}
        slots = sorted(wanted)
        assert self.table.blocks() == self.table.blocks_in(slots) == [wanted[one] for one in slots]
        assert all(self.table.block(slot) == one for slot, one in wanted.items())
        assert len(self.table) == len(self.committed)
        assert self.table.staged() == {*self.staged.values(), *self.abandoned}
        made = range(self.table.slots_made)  # All, once the first was staged.
        assert [self.table.generation(slot) for slot in made] == self.generations[: len(made)]

    @invariant()
    def pins_are_leases(self) -> None:
        leased = Counter(slot for lease in self.lease_table.all() for slot in lease.slots)
        assert self.table.pins() == leased

    @invariant()
    def a_discarded_slot_is_kept_by_its_readers_alone(self) -> None:
        leases = self.lease_table.all()
        read = {slot for lease in leases if lease.reason != PIN for slot in lease.slots}
        assert self.table.discarded() <= read - self.lease_table.pinned_slots

    def teardown(self) -> None:
        """Nothing leaks: when every lease has ended, nothing is pinned and all can be evicted."""
        self.unpin(self.lease_table.expire(self.now_ms + 1_000))
        assert len(self.lease_table) == 0
        assert self.table.pins() == {}
        assert (self.table.reset_count + self.table.idle_count) == 4 - len(self.staged) - len(
            self.abandoned
        ) - self.retired
        self.table.check()


class PackedSlotsAndLeases(SlotsAndLeases):
    """The same of a table whose blocks are columns."""

    packs = True


SlotsAndLeases.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
PackedSlotsAndLeases.TestCase.settings = SlotsAndLeases.TestCase.settings
TestSlotsAndLeases = SlotsAndLeases.TestCase
TestPackedSlotsAndLeases = PackedSlotsAndLeases.TestCase


# --- runs of pins -------------------------------------------------------------------------------


def test_pins_of_a_run_are_counted_and_its_blocks_held_once() -> None:
    """Two lookups of 1, 2 and one of 1: the blocks are free when the last pin has gone."""
    table = table_of(1, 2, 3)
    both, again, one = (table.pin_prefix(names(*run)) for run in ((1, 2), (1, 2), (1,)))
    assert both == again == [slot_of(table, 1), slot_of(table, 2)]
    assert [table.pin_count(slot) for slot in both] == [3, 2]
    assert make_room(table, 4) == [block(3)]
    table.unpin(both)
    table.unpin(one)
    table.check()
    assert make_room(table, 4) == []
    table.unpin(again)
    assert make_room(table, 4) == [block(2), block(1)]


def test_run_ends_before_the_first_block_that_is_not_here() -> None:
    """1 and 3 are here: of 1, 2, 3 one block is pinned, of 2 and of nothing none."""
    table = table_of(1, 3)
    assert table.pin_prefix(names(1, 2, 3)) == [slot_of(table, 1)]
    assert table.pin_prefix(names(2)) == []
    assert table.pin_prefix([]) == []
    assert table.counts()["active"] == 1
    table.check()


def test_unpinned_run_with_a_discarded_block_empties_its_slot_only() -> None:
    """2 was found to be wrong while 1, 2, 3 were pinned."""
    table = table_of(1, 2, 3)
    slots = table.pin_prefix(names(1, 2, 3))
    table.discard(name(2))
    table.unpin(slots)
    table.check()
    assert (table.find(name(2)), table.idle_count) == (None, 2)


def test_a_slot_is_not_unpinned_more_often_than_it_was_pinned() -> None:
    """Nor is one moved that has another state: the refusal names it."""
    table = table_of(1)
    slots = table.pin_prefix(names(1))
    table.unpin(slots)
    with pytest.raises(AssertionError, match="slot 0 is not pinned"):
        table.unpin(slots)
    with pytest.raises(InvalidTransition, match="slot 1"):
        table.abort(1)
