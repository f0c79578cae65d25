"""The parts of `prefix`: counts, worth by age, the duel with LRU; and `lfu`."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import Lfu, sketch
from kvbm_common.eviction.duel import GHOSTS_MAX, Duel
from kvbm_common.eviction.reuse_curves import (
    BUCKETS,
    EDGES,
    WAITED_MAX,
    WIDTHS,
    ReuseCurves,
    bucket_of,
    worth_of,
)
from kvbm_common.eviction.sketch import PLACES_MIN, PLACES_PER_USE, Sketch, mix
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns

from tests.libs.helpers import block, largest_table, name, names


def test_lfu_keeps_what_is_used_often() -> None:
    """1 is used twice, 2 once, 3 never: they leave in the reverse order."""
    lfu = Lfu()
    for number in (1, 2, 3):
        lfu.admit(name(number), name(0))
    for number in (1, 1, 2):
        lfu.touch(name(number))
    assert lfu.victims(3) == names(3, 2, 1)


def test_lfu_forgets_old_fame() -> None:
    """1 was used three times; after as many victims of growing age a new block outlives it."""
    lfu = Lfu()
    lfu.admit(name(1), name(0))
    for _ in range(3):
        lfu.touch(name(1))
    for number in range(2, 7):
        lfu.admit(name(number), name(0))
        lfu.touch(name(number))
        lfu.forget(name(number))
    lfu.admit(name(9), name(0))
    assert lfu.victims(2) == names(1, 9)


class PlainLfu:
    """What `lfu` does, with a list and without any haste."""

    def __init__(self, former: list[SequenceHash]) -> None:
        self.uses = dict.fromkeys(former, 1)
        self.key = dict.fromkeys(former, 1)
        self.free = list(former)
        """In the order in which they were freed, or used while they were free."""
        self.age = 0

    def touch(self, block: SequenceHash) -> None:
        self.uses[block] += 1
        self.key[block] = self.uses[block] + self.age
        if block in self.free:
            self.free.remove(block)
            self.free.append(block)

    def forget(self, block: SequenceHash) -> None:
        self.free.remove(block)
        del self.uses[block]
        self.age = max(self.age, self.key.pop(block))

    def victims(self) -> list[SequenceHash]:
        return sorted(self.free, key=self.key.__getitem__)


@given(
    former=st.integers(0, 6),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["admit", "touch", "hold", "free", "forget"]),
            st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True),
        ),
        max_size=40,
    ),
)
@settings(deadline=None)
def test_lfu_is_what_lists_would_do(former: int, moves: list[tuple[str, list[int]]]) -> None:
    """Any calls, of runs of blocks, after a former life of some blocks."""
    columns = BlockColumns.of({number: block(number) for number in range(1, former + 1)})
    lfu, plain = Lfu(), PlainLfu(columns.leaves_first())
    lfu.fill(columns)
    for what, numbers in moves:
        chosen = names(*numbers)
        held = [one for one in chosen if one in plain.uses and one not in plain.free]
        free = [one for one in chosen if one in plain.free]
        match what:
            case "admit":
                new = [one for one in chosen if one not in plain.uses]
                lfu.admit_all(new, [name(0)] * len(new))
                for one in new:
                    plain.uses[one], plain.key[one] = 1, 1 + plain.age
                plain.free += reversed(new)
            case "touch":
                here = [one for one in chosen if one in plain.uses]
                lfu.touch_all(here)
                for one in here:
                    plain.touch(one)
            case "hold":
                lfu.hold_all(free)
                plain.free = [one for one in plain.free if one not in free]
            case "free":
                lfu.free_all(held)
                plain.free += held
            case "forget":
                for one in free:
                    lfu.forget(one)
                    plain.forget(one)
        assert lfu.victims(99) == plain.victims()
        assert len(lfu) == len(plain.free)


def test_a_sketch_counts_names() -> None:
    """Seven hundred names, each as often as its number says; nothing is counted too low."""
    sketch = Sketch(0)
    counts = {number: [sketch.add(mix(name(number))) for _ in range(number % 7 + 1)]
              for number in range(700)}  # fmt: skip
    exact = [found == list(range(1, number % 7 + 2)) for number, found in counts.items()]
    assert sum(exact) >= 695
    assert all(found[-1] >= number % 7 + 1 for number, found in counts.items())


@pytest.mark.slow
def test_a_sketch_forgets() -> None:
    """Popular once, and then nobody asks for as long as the table remembers."""
    sketch = Sketch(0)
    for _ in range(8):
        before = sketch.add(mix(name(1)))
    for number in range(2, 2 + PLACES_MIN // PLACES_PER_USE):
        sketch.add(mix(name(number)))
    assert before == 8
    assert sketch.add(mix(name(1))) == 5


class PlainSketch:
    """The same sketch in one table, which grows and is halved at once."""

    def __init__(self, places_max: int) -> None:
        self.table, self.places_max, self.added = bytearray(sketch.PLACES_FIRST), places_max, 0

    def add(self, word: int) -> int:
        places = {word % len(self.table), (word >> 32) % len(self.table)}
        count = min(self.table[place] for place in places)
        for place in places:
            self.table[place] = max(self.table[place], count + 1)
        self.added += 1
        wanted = self.added * sketch.GROW_PER_USE
        if wanted < len(self.table):
            return count + 1
        if len(self.table) < self.places_max:
            while len(self.table) <= wanted and len(self.table) < self.places_max:
                self.table *= min(sketch.GROWTH, self.places_max // len(self.table))
        elif self.added * sketch.PLACES_PER_USE >= len(self.table):
            self.added, self.table = 0, self.table.translate(sketch.HALVED)
        return count + 1


@pytest.mark.parametrize("seed", range(20))
def test_a_sketch_in_pages_counts_as_one_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the same counts, however often the table has grown or was halved meanwhile."""
    rng = random.Random(seed)
    monkeypatch.setattr(sketch, "PAGE_BITS", 2)
    monkeypatch.setattr(sketch, "PAGE", 4)
    monkeypatch.setattr(sketch, "PLACES_FIRST", 8)
    monkeypatch.setattr(sketch, "PLACES_MIN", 128)
    monkeypatch.setattr(sketch, "GROWTH", rng.choice([2, 4]))
    monkeypatch.setattr(sketch, "GROW_PER_USE", rng.choice([1, 4]))
    monkeypatch.setattr(sketch, "PLACES_PER_USE", rng.choice([1, 2]))
    paged, plain = Sketch(0), PlainSketch(128)
    words = [rng.getrandbits(64) for _ in range(60)]
    for _ in range(700):
        word = rng.choice(words[: rng.randint(1, 60)])
        assert paged.add(word) == plain.add(word)


def test_no_page_of_a_sketch_is_large() -> None:
    """64 MiB were copied at once when the table grew, or was halved, for 50 to 100 ms."""
    counts = Sketch(1_000_000)
    for number in range(20_000):
        counts.add(mix(name(number)))
    assert largest_table(counts, (bytes, bytearray)) <= 4_096


@given(st.integers(0, 10**8))
def test_an_age_is_in_its_bucket(age: int) -> None:
    """Between its edges; the last bucket takes the rest."""
    bucket = bucket_of(age)
    assert EDGES[bucket] <= age
    assert age < EDGES[bucket + 1] or bucket == BUCKETS - 1


@given(st.lists(st.floats(0, 0.3), min_size=BUCKETS, max_size=BUCKETS))
@settings(max_examples=25, deadline=None)
def test_worth_is_the_best_rate_of_hits(hazards: list[float]) -> None:
    """Against the formula of the module: try every later end."""
    worth = worth_of(hazards)
    for start in range(BUCKETS):
        alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for hazard, width in list(zip(hazards, WIDTHS, strict=True))[start:]:
            back = alive * hazard
            hits, time = hits + back, time + width * (alive - back / 2)
            alive = alive - back
            best = max(best, hits / time)
        assert worth[start] == pytest.approx(best, rel=1e-3)


def test_who_comes_back_after_a_pause_is_worth_more_while_it_lasts() -> None:
    """Kind 0 comes back after 200 uses, always; kind 1 never. The worth of 0 rises until then."""
    returns, now = ReuseCurves(2, 500), 0
    for number in range(6000):
        now += 1
        returns.used(name(number % 100), mix(name(number % 100)), 0, now)
        now += 1
        returns.used(name(10**6 + number), mix(name(10**6 + number)), 1, now)
    returns.learn(now)
    pausing, once = returns.worth
    assert pausing[bucket_of(1)] < pausing[bucket_of(100)] < pausing[bucket_of(190)]
    assert pausing[bucket_of(1)] > 20 * once[bucket_of(1)]
    assert len(returns) <= WAITED_MAX


def test_the_duel_follows_lru_while_nothing_is_lost() -> None:
    """Misses of what was never seen before are nobody's fault; those of known blocks are."""
    duel = Duel(100)
    for number in range(3000):
        duel.used(name(number), hit=False, again=False)
        duel.forgot(name(number))
    assert duel.follows_lru
    for number in range(3000):
        duel.used(name(number), hit=False, again=True)
        duel.forgot(name(number))
    assert not duel.follows_lru


def test_the_duel_follows_lru_when_it_does_better() -> None:
    """100 blocks that LRU would hold are missed over and over: it is followed, and tried again
    after a while.
    """
    duel, modes = Duel(100), list[bool]()
    for number in range(20_000):
        block = name(number % 90)
        duel.used(block, hit=False, again=True)
        duel.freed(block)
        modes.append(duel.follows_lru)
    first = modes.index(False)
    assert True in modes[first:]
    beaten = modes[first:].index(True) + first
    assert beaten - first < 200
    assert False in modes[beaten:]
    again = [now for before, now in pairwise(modes[beaten:]) if now and not before]
    assert again, "LRU is tried once only"
    assert modes[-5000:].count(True) > 4000, "each failure is to be paid with patience"


def test_the_ghosts_of_a_large_tier_are_a_sample() -> None:
    """Bounded, and about the right part of all names."""
    duel = Duel(10 * GHOSTS_MAX)
    sampled = [number for number in range(50_000) if duel.samples(mix(name(number)))]
    assert 4500 < len(sampled) < 5500
    for number in range(3 * GHOSTS_MAX):
        duel.used(name(number), hit=False, again=False)
        duel.freed(name(number))
    assert len(duel) == GHOSTS_MAX
