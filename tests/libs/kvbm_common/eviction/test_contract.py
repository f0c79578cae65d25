"""What every eviction policy promises to the slot table, on any sequence of moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvbm_cli.replay import ROOT, hits_of, requests_of
from kvbm_common.eviction import POLICIES, Adaptive, EvictionPolicy, make_policy
from kvbm_common.eviction.prefix import PrefixPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block

from tests.libs.helpers import NAMESPACE, make_room, name, names, plain_table, policy_of

SLOTS = 6
PARENTS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: 0, 8: 7, 9: 8}
"""A small forest: 1-2-3-4 with a branch 2-5-6, and 7-8-9."""
BLOCKS = st.sampled_from(sorted(PARENTS))


class PolicyMachine(RuleBasedStateMachine):
    """A slot table with a policy; every block may come, be used, held, discarded and evicted."""

    policy_name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.table = plain_table(SLOTS, partial(make_policy, self.policy_name))
        self.held: dict[int, list[int]] = {}

    @property
    def policy(self) -> EvictionPolicy:
        return policy_of(self.table)

    def free(self) -> set[SequenceHash]:
        held = {slot for slots in self.held.values() for slot in slots}
        found = ((block.hash, self.table.find(block.hash)) for block in self.table.blocks())
        return {block for block, slot in found if slot not in held}

    @rule(number=BLOCKS)
    def commit(self, number: int) -> None:
        if self.table.find(name(number)) is not None:
            return
        make_room(self.table, 1)
        slot = self.table.stage(name(number))
        if slot is not None:
            parent = name(PARENTS[number])
            self.table.register(slot, Block(name(number), parent, NAMESPACE, 1, 64))

    @rule(number=BLOCKS)
    def look_up(self, number: int) -> None:
        """Pin what is here of a chain, under the chain's last block as a key."""
        chain = [number]
        while chain[0] and PARENTS[chain[0]]:
            chain.insert(0, PARENTS[chain[0]])
        if number not in self.held:
            self.held[number] = self.table.pin_prefix(names(*chain))

    @rule(number=BLOCKS)
    def lease(self, number: int) -> None:
        """Pin one block in the middle of nowhere, as the disk tier does."""
        slot = self.table.find(name(number))
        if slot is not None and number not in self.held:
            self.table.pin(slot)
            self.held[number] = [slot]

    @rule(number=BLOCKS)
    def release(self, number: int) -> None:
        self.table.unpin(self.held.pop(number, []))

    @rule(number=BLOCKS)
    def discard(self, number: int) -> None:
        self.table.discard(name(number))

    @rule(count=st.integers(0, SLOTS))
    def make_room(self, count: int) -> None:
        expected = self.policy.victims(max(0, count - self.table.counts()["reset"]))
        assert [block.hash for block in make_room(self.table, count)] == expected

    @invariant()
    def victims_are_free_and_as_many_as_asked_for(self) -> None:
        free = self.free()
        for count in (0, 1, 3, SLOTS + 1):
            victims = self.policy.victims(count)
            assert victims == self.policy.victims(count), "asking has changed something"
            assert len(victims) == len(set(victims)) == min(count, len(self.policy))
            assert set(victims) <= free
        assert len(self.policy) == len(free)

    @invariant()
    def adaptive_holds(self) -> None:
        if isinstance(self.policy, Adaptive):
            self.policy.check()

    @invariant()
    def prefix_takes_leaves_first(self) -> None:
        if not isinstance(self.policy, PrefixPolicy):
            return
        self.policy.check()
        here = {block.hash for block in self.table.blocks()}
        children = {block.parent: block.hash for block in self.table.blocks()}
        free, left = self.free(), set(here)
        for victim in self.policy.victims(SLOTS):
            kept = [b for b in left if b in free and parent_of(b) == victim]
            assert not kept, f"{victim.hex()} goes before its free child"
            left.remove(victim)
        assert children.keys() >= {parent_of(b) for b in here}

    @invariant()
    def table_holds(self) -> None:
        self.table.check()


def parent_of(block: SequenceHash) -> SequenceHash:
    """In the forest."""
    return name(PARENTS[int.from_bytes(block, "big")])


def machine_of(policy: str) -> type[PolicyMachine]:
    """The machine for one policy."""
    return type(f"Machine_{policy}", (PolicyMachine,), {"policy_name": policy})


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_its_promises(policy: str) -> None:
    """Goal: any sequence of moves leaves the table, the policy and the promises intact."""
    case: Any = machine_of(policy).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("parents", [{1: 1}, {1: 2, 2: 1}, {1: 3, 2: 1, 3: 2, 4: 3}])
def test_blocks_in_a_circle_leave_too(policy: str, parents: dict[int, int]) -> None:
    """What engines say of parents may be nonsense: no slot is lost to it."""
    table = plain_table(SLOTS, partial(make_policy, policy))
    for number, parent in parents.items():
        slot = table.stage(name(number))
        assert slot is not None
        table.register(slot, Block(name(number), name(parent), NAMESPACE, 1, 64))
    for _ in parents:
        [victim] = policy_of(table).victims(1)
        table.evict(victim)
        table.check()
    assert table.idle_count == 0


def test_of_free_blocks_before_a_held_one_the_deepest_goes_first() -> None:
    """1 ← 2 ← 3, and 3 is in use: no leaf is free."""
    policy = PrefixPolicy(4)
    for number in (1, 2, 3):
        policy.admit(name(number), name(number - 1))
    policy.hold(name(3))
    assert policy.victims(4) == [name(2), name(1)]
    assert policy.victims(1) == [name(2)]


class ThroughTable:
    """A policy that is replayed through a slot table, as the tiers use it."""

    def __init__(self, slot_count: int, policy: EvictionPolicy) -> None:
        self.table = plain_table(slot_count, lambda _: policy)

    def serve(self, chain: tuple[SequenceHash, ...]) -> int:
        slots = self.table.pin_prefix(chain)
        hits = len(slots)
        new = [
            (block, parent)
            for block, parent in zip(chain, (ROOT, *chain), strict=False)
            if self.table.find(block) is None
        ]
        make_room(self.table, len(new))
        for block, parent in new:
            slot = self.table.stage(block)
            if slot is None:
                break
            self.table.register(slot, Block(block, parent, NAMESPACE, 1, 64))
            self.table.pin(slot)
            slots.append(slot)
        self.table.unpin(slots)
        self.table.check()
        return hits


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=25),
    slot_count=st.integers(1, 7),
)
@settings(max_examples=40, deadline=None)
def test_a_replay_is_what_the_slot_table_does(
    policy: str, requests: list[list[int]], slot_count: int
) -> None:
    """Goal: `kvbm simulate` tells of the tiers, not of itself. The same hits both ways."""
    load = requests_of(requests)
    through = ThroughTable(slot_count, make_policy(policy, slot_count))
    hits = sum(map(through.serve, load.chains))
    assert hits_of(load, make_policy(policy, slot_count), slot_count) == hits


@pytest.mark.parametrize("leaf_count", [5, 400])
def test_many_leaves_or_few(leaf_count: int) -> None:
    """Goal: sampled or not, the answer is complete, leaves first, and the same again."""
    policy = PrefixPolicy(3 * leaf_count)
    for leaf in range(leaf_count):
        chain = names(3 * leaf + 1, 3 * leaf + 2, 3 * leaf + 3)
        for block, parent in zip(chain, (ROOT, *chain), strict=False):
            policy.admit(block, parent)
    # Past the first lesson and with something lost, so that LRU's order is not followed.
    policy.duel.follows_lru = False
    for count in (1, 7, leaf_count, 3 * leaf_count):
        victims = policy.victims(count)
        assert len(set(victims)) == len(victims) == min(count, 3 * leaf_count)
        assert victims == policy.victims(count)
        order = {victim: place for place, victim in enumerate(victims)}
        for number in range(1, 3 * leaf_count + 1):
            if number % 3 and name(number) in order:
                assert order[name(number + 1)] < order[name(number)]


@pytest.mark.parametrize("policy", POLICIES)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 6), st.booleans()), min_size=1, max_size=30
    )
)
@settings(max_examples=40, deadline=None)
def test_a_run_of_blocks_is_as_many_single_ones(
    policy: str, moves: list[tuple[int, int, bool]]
) -> None:
    """Goal: a lookup's blocks go to the policy together, and nothing is other by that."""
    together, single = make_policy(policy, 8), make_policy(policy, 8)
    here = list[SequenceHash]()
    for first, count, leaves in moves:
        run = [name(number) for number in range(first, first + count)]
        for block, parent in zip(run, (ROOT, *run), strict=False):
            if block not in here:
                here.append(block)
                together.admit(block, parent)
                single.admit(block, parent)
        together.touch_all(run)
        together.hold_all(run)
        for block in run:
            single.touch(block)
            single.hold(block)
        assert together.victims(30) == single.victims(30)
        together.free_all(run[::-1])
        for block in run[::-1]:
            single.free(block)
        assert len(together) == len(single) == len(here)
        assert together.victims(30) == single.victims(30)
        if leaves:
            [victim] = single.victims(1)
            here.remove(victim)
            together.forget(victim)
            single.forget(victim)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_is_not_held_or_freed_twice(policy: str) -> None:
    """The table's accounts and the policy's must not part."""
    made = make_policy(policy, 8)
    made.admit(name(1), ROOT)
    with pytest.raises(AssertionError):
        made.free_all([name(1)])
    held = make_policy(policy, 8)
    held.admit(name(1), ROOT)
    held.hold_all([name(1)])
    with pytest.raises((AssertionError, KeyError)):
        held.hold_all([name(1)])
