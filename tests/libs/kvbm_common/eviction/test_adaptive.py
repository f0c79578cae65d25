"""The policy `adaptive`: its ways against plain lists, its contest, and the bounds of its state."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_cli.replay import ROOT, hits_of, requests_of
from kvbm_common.eviction import (
    POLICIES,
    Adaptive,
    EvictionPolicy,
    Lru,
    make_policy,
    recent_names,
)
from kvbm_common.eviction.contest import (
    LRU,
    RATE_MAX,
    REMEMBERED_PER_SLOT,
    SLOTS_MAX,
    WAYS,
    Contest,
    Miniature,
    Way,
)
from kvbm_common.eviction.recent_names import REMEMBERED_MIN, RecentNames
from kvbm_common.identity import SequenceHash

from benchmarks.eviction_loads import LOADS, documents
from tests.libs.helpers import largest_table, name, names

PROTECTED = Way(0.5, remembers=False)
REMEMBERED = Way(0.5, remembers=True)
MOVES = st.sampled_from(["use", "copy", "free", "go"])


def only(way: Way, slot_count: int) -> Adaptive:
    """A policy whose contest has one way."""
    return Adaptive(slot_count, Contest(slot_count, [way]))


def admitted(policy: EvictionPolicy, *numbers: int) -> None:
    """Blocks that were computed: admitted, and freed with their request."""
    for number in numbers:
        policy.admit(name(number), ROOT)
        policy.hold(name(number))
        policy.free(name(number))


def used(policy: EvictionPolicy, *numbers: int) -> None:
    """Blocks that were found by a lookup."""
    for number in numbers:
        policy.touch(name(number))
        policy.hold(name(number))
        policy.free(name(number))


def test_blocks_used_once_leave_before_those_used_again() -> None:
    """1 is used again, then 2, 3 and 4 come: LRU would take 1 first."""
    policy = only(PROTECTED, 4)
    admitted(policy, 1)
    used(policy, 1)
    admitted(policy, 2, 3, 4)
    assert policy.victims(4) == names(2, 3, 4, 1)


def test_protected_blocks_beyond_their_part_are_like_the_others() -> None:
    """Half of four slots is protected: of 1, 2 and 3, all used again, the oldest is not."""
    policy = only(PROTECTED, 4)
    admitted(policy, 1, 2, 3, 4)
    used(policy, 1, 2, 3)
    assert policy.victims(4) == names(4, 1, 2, 3)


def test_what_comes_back_after_its_eviction_counts_as_used_again() -> None:
    """1 was evicted and is computed once more; only a way that remembers keeps it."""
    for way, expected in ((REMEMBERED, names(2, 3, 1)), (PROTECTED, names(1, 2, 3))):
        policy = only(way, 4)
        admitted(policy, 1)
        policy.forget(name(1))
        admitted(policy, 1, 2, 3)
        assert policy.victims(3) == expected


def test_a_block_that_another_tier_reads_was_not_used() -> None:
    """The disk tier holds 1 to copy it: it is freed again, and no more worth than before."""
    policy = only(PROTECTED, 4)
    admitted(policy, 1, 2)
    used(policy, 2)
    for number in (1, 2):
        policy.hold(name(number))
        policy.free(name(number))
    admitted(policy, 3)
    assert policy.victims(3) == names(1, 3, 2)


class Plain:
    """What `adaptive` does in one way, with lists and without any haste."""

    def __init__(self, way: Way, slot_count: int) -> None:
        self.way, self.slot_count = way, slot_count
        self.free_ones: list[tuple[int, int, bool]] = []
        """(when freed, number, whether protected), in the order of their queue."""
        self.reused: dict[int, bool] = {}
        self.held: set[int] = set()
        self.gone: list[int] = []
        self.now = 0

    def put(self, number: int) -> None:
        """Free a block."""
        self.now += 1
        self.free_ones.append((self.now, number, self.reused[number]))
        if self.way is LRU:
            return
        protected = [one for one in self.free_ones if one[2]]
        for oldest in protected[
            : max(0, len(protected) - int(self.way.protected * self.slot_count))
        ]:
            self.free_ones.remove(oldest)
            self.free_ones.append((oldest[0], oldest[1], False))
            self.reused[oldest[1]] = False

    def take(self, number: int) -> None:
        """Remove a block from the free ones."""
        self.free_ones = [one for one in self.free_ones if one[1] != number]

    def victims(self) -> list[int]:
        """Return all free blocks, the first to leave first."""
        if self.way is LRU:
            return [number for _, number, _ in sorted(self.free_ones)]
        return [one[1] for one in self.free_ones if not one[2]] + [
            one[1] for one in self.free_ones if one[2]
        ]


@pytest.mark.parametrize("way", [LRU, PROTECTED, REMEMBERED, Way(0.9, remembers=True)])
@given(moves=st.lists(st.tuples(st.integers(1, 8), MOVES)))
@settings(max_examples=60, deadline=None)
def test_each_way_is_what_lists_would_do(way: Way, moves: list[tuple[int, str]]) -> None:
    """Goal: the fast orders are the slow ones. Any sequence of moves, on eight blocks."""
    slot_count = 8
    policy, plain = only(way, slot_count), Plain(way, slot_count)
    for number, move in moves:
        here = {one[1] for one in plain.free_ones} | plain.held
        if number not in here:
            policy.admit(name(number), ROOT)
            policy.hold(name(number))
            recent = plain.gone[-REMEMBERED_PER_SLOT * slot_count :]
            plain.reused[number] = way.remembers and number in recent
            plain.held.add(number)
        elif number in plain.held:
            if move == "use":
                policy.touch(name(number))
                plain.reused[number] = True
                continue
            policy.free(name(number))
            plain.held.remove(number)
            plain.put(number)
        elif move == "go":
            policy.forget(name(number))
            plain.take(number)
            plain.gone.append(number)
        else:
            if move == "use":
                policy.touch(name(number))
                plain.reused[number] = True
            policy.hold(name(number))
            plain.take(number)
            plain.held.add(number)
        assert policy.victims(99) == names(*plain.victims())
        assert len(policy) == len(plain.free_ones)
        policy.check()


@given(requests=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40),
       slot_count=st.integers(1, 12))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_it_is_lru_until_another_way_leads(requests: list[list[int]], slot_count: int) -> None:
    """Goal: nothing is lost while nothing is known. The same hits as LRU's."""
    load = requests_of(requests)
    policy = Adaptive(slot_count)
    ours = hits_of(load, policy, slot_count)
    assert policy.contest.changes > 0 or ours == hits_of(load, Lru(), slot_count)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slot_count", [REMEMBERED_MIN, 40])
@pytest.mark.parametrize("seed", range(5))
def test_a_miniature_hits_what_the_policy_would(way: Way, slot_count: int, seed: int) -> None:
    """Goal: the contest judges the ways that are used. Blocks without parents, one by one.

    A smaller policy remembers as many as one of 32 slots, and its miniature does not.
    """
    miniature, policy, here = Miniature(way, slot_count), only(way, slot_count), set[int]()
    numbers = random.Random(seed)
    for number in (numbers.randint(1, 2 * slot_count) for _ in range(600)):
        assert miniature.use(name(number)) == (number in here)
        miniature.check()
        if number in here:
            used(policy, number)
            continue
        if len(here) == slot_count:
            [victim] = policy.victims(1)
            policy.forget(victim)
            here.remove(int.from_bytes(victim, "big"))
        admitted(policy, number)
        here.add(number)


def test_a_miniature_hits_as_often_as_the_tier() -> None:
    """Goal: a sample says what the whole would do. Documents, and a sixteenth of their names."""
    load = requests_of(documents(3000, 5))
    slot_count = load.block_count // 10
    sample = Miniature(LRU, round(slot_count * RATE_MAX))
    below = Contest(slot_count).sampled_below
    hits = uses = 0
    for request in load.chains:
        for block in reversed(request):
            if int.from_bytes(block[-3:], "little") < below:
                hits += sample.use(block)
                uses += 1
    assert uses / load.references == pytest.approx(RATE_MAX, rel=0.25)
    real = hits_of(load, Lru(), slot_count) / load.references
    assert hits / uses == pytest.approx(real, abs=0.05)


def test_the_contest_finds_lasting_popularity_and_its_end() -> None:
    """1. Eight blocks of lasting popularity among strangers: they are protected. 2. Each block is
    used twice, with ten others between, and never again: only LRU still has it, and leads again.
    """
    rng = random.Random(3)
    contest = Contest(slot_count=200)
    assert contest.way is LRU
    popular = [rng.randbytes(16) for _ in range(8)]
    for _ in range(2000):
        contest.used([SequenceHash(rng.choice(popular))])
        contest.used([SequenceHash(rng.randbytes(16)) for _ in range(3)])
    assert contest.way.protected > 0
    twice = [SequenceHash(rng.randbytes(16)) for _ in range(2000)]
    for place in range(5, len(twice)):
        contest.used([twice[place]])
        contest.used([twice[place - 5]])
    assert contest.way is LRU
    for miniature in contest.miniatures:
        miniature.check()


def test_two_policies_choose_alike() -> None:
    """Goal: a simulation can be replayed. The same load twice gives the same hits and changes."""
    load = requests_of(LOADS["a shift"](800, 3))
    first, again = Adaptive(300), Adaptive(300)
    assert hits_of(load, first, 300) == hits_of(load, again, 300)
    assert first.contest.changes == again.contest.changes > 0


@given(numbers=st.lists(st.integers(1, 400), max_size=300, unique=True), here=st.integers(0, 80))
def test_names_are_remembered_in_their_order(numbers: list[int], here: int) -> None:
    """The newest names are known, as many as blocks are here, and none that is older than all."""
    recent, count = RecentNames(), max(here, REMEMBERED_MIN)
    for place, number in enumerate(numbers, 1):
        recent.add(name(number), here)
        known = [name(one) in recent for one in numbers[:place]]
        assert all(known[-count:])
        assert sum(known) <= 2 * count
        assert known == sorted(known)


def test_a_table_of_names_doubles_and_keeps_them() -> None:
    """Ten thousand names in a table that began with 64 entries: all known, and no other one."""
    recent, rng = RecentNames(), random.Random(1)
    added = [SequenceHash(rng.randbytes(16)) for _ in range(10_000)]
    for one in added:
        recent.add(one, 10_000)
        recent.add(one, 10_000)
    assert all(one in recent for one in added)
    assert not any(SequenceHash(rng.randbytes(16)) in recent for _ in range(10_000))
    assert recent.table_bytes <= 16 * len(added)


@given(
    numbers=st.lists(st.integers(0, 500), max_size=400),
    here=st.integers(0, 250),
    whole_max=st.sampled_from([10, 60, 16_384]),
)
@settings(deadline=None)
def test_names_are_remembered_in_two_sets(numbers: list[int], here: int, whole_max: int) -> None:
    """The younger set takes a name that is not in it; a full one is the older one from then on."""
    young, old = set[int](), set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_names, "WHOLE_MAX", whole_max)
        recent = RecentNames()
        for number in numbers:
            recent.add(name(number), here)
            young.add(number)
            if len(young) >= max(here, REMEMBERED_MIN):
                young, old = set(), young
            assert (name(number) in recent) == (number in young | old)
        known = {number for number in range(501) if name(number) in recent}
        assert known == young | old


def test_no_name_that_is_remembered_moves_all_others() -> None:
    """A million moved at once when their table grew, for 50 ms."""
    recent, rng, count = RecentNames(), random.Random(1), 80_000
    for number in range(count):
        recent.add(SequenceHash(rng.randbytes(16)), count)
        if not number % 1000:
            assert largest_table(recent, (array,)) <= 2 * recent_names.WHOLE_MAX
    assert largest_table(recent, (array,)) < count // 20


def test_what_is_remembered_shrinks_with_the_blocks() -> None:
    """Goal: memory follows use. A policy whose blocks have all left keeps a few names only."""
    recent, rng = RecentNames(), random.Random(1)
    for here in range(20_000, -1, -1):
        recent.add(SequenceHash(rng.randbytes(16)), here)
    assert recent.table_bytes < 2_000


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_of_one_block_takes_little_memory(policy: str) -> None:
    """Goal: a bound. Each tenant has a policy for each size: 100 of them hold a block each."""
    tracemalloc.start()
    made = [make_policy(policy, 1_000_000) for _ in range(100)]
    for number, one in enumerate(made):
        one.admit(name(number), ROOT)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100 * 64 * 1024


def test_the_contest_of_a_large_tier_is_no_larger() -> None:
    """Goal: a bound. Ten million slots have miniatures of 512."""
    assert round(Contest(10**7).sampled_below / 2**24 * 10**7) == pytest.approx(SLOTS_MAX, rel=0.01)
    contest = Contest(10**7)
    rng = random.Random(1)
    tracemalloc.start()
    for _ in range(300):
        contest.used([SequenceHash(rng.randbytes(16)) for _ in range(64)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 * 1024**2
    for miniature in contest.miniatures:
        miniature.check()


def memory_of(
    policy: EvictionPolicy, blocks: list[SequenceHash], count: int
) -> tuple[float, float]:
    """Return bytes per block of a tier of `count` slots: filled, and after all were replaced."""
    filled = 0
    tracemalloc.start()
    for place, block in enumerate(blocks):
        if place >= count:
            policy.forget(blocks[place - count])
        policy.admit(block, ROOT)
        policy.hold(block)
        policy.free(block)
        if place == count - 1:
            filled, _ = tracemalloc.get_traced_memory()
    replaced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return filled / count, replaced / count


@pytest.mark.slow
@pytest.mark.parametrize(("count", "more"), [(25_000, 45), (100_000, 25)])
def test_memory_is_below_its_bound(count: int, more: int) -> None:
    """Goal: 200 bytes for a block. When all blocks were replaced an ordered dict has grown, that of
    `lru` as well: what is remembered of those that have left takes few bytes more. A small tier
    has more for each block: the miniatures of its contest are not smaller.
    """
    rng = random.Random(1)
    blocks = [SequenceHash(rng.randbytes(16)) for _ in range(3 * count)]
    filled, replaced = memory_of(Adaptive(count), blocks, count)
    _, replaced_lru = memory_of(Lru(), blocks, count)
    assert filled < replaced < 200
    assert replaced < replaced_lru + more


def test_uses_without_an_end_do_not_gather() -> None:
    """A policy that takes over a tier gets a million blocks, and none is freed meanwhile."""
    policy = Adaptive(5000)
    for number in range(5000):
        policy.admit(SequenceHash(random.Random(number).randbytes(16)), ROOT)
    policy.check()
