"""The bar for policies that learn: how far below LRU they may be on any load, at any capacity."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kvbm_cli.replay import Requests, bound_of, hits_of, requests_of
from kvbm_common.eviction import make_policy

from benchmarks.eviction_loads import LOADS

BARS = {"prefix": 0.005, "adaptive": 0.02}
QUICK = ("chat", "agents", "documents", "a loop", "a shift", "strangers")
SEEDS = int(os.environ.get("KVBM_TEST_EVICTION_SEEDS", "3"))
SHARES = (0.005, 0.5, 0.05, 0.01, 0.2, 0.02, 0.1)
SHARE_COUNT = int(os.environ.get("KVBM_TEST_EVICTION_SHARES", len(SHARES)))
"""The first shares are the ends and the middle."""


def rates(load: Requests, share: float, *policies: str) -> tuple[float, list[float]]:
    """Hit rates of LRU and of the policies, none of them above the bound."""
    slot_count = max(1, int(share * load.block_count))
    lru = hits_of(load, make_policy("lru"), slot_count)
    ours = [hits_of(load, make_policy(one, slot_count), slot_count) for one in policies]
    assert max(lru, *ours) <= bound_of(load, slot_count)
    return lru / load.references, [hits / load.references for hits in ours]


def cases(load: Requests, shares: tuple[float, ...], *policies: str) -> Iterator[str]:
    """The cases below the bar, in words."""
    for share in shares:
        lru, found = rates(load, share, *policies)
        for policy, ours in zip(policies, found, strict=True):
            if ours < lru - BARS[policy]:
                yield f"{share:.1%}: lru {lru:.2%}, {policy} {ours:.2%}"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_never_worse_than_lru(name: str) -> None:
    """Goal: a policy is safe to choose: never far below LRU, in caches of three sizes."""
    assert not list(cases(requests_of(LOADS[name](1000, 1)), (0.01, 0.05, 0.3), *BARS))


@pytest.mark.parametrize("policy", BARS)
@pytest.mark.parametrize("slot_count", [1, 2, 3, 5, 8])
def test_tiny_caches(slot_count: int, policy: str) -> None:
    """Goal: a cache smaller than a request still serves its beginning."""
    load = requests_of(LOADS["documents"](400, 2))
    lru = hits_of(load, make_policy("lru"), slot_count)
    ours = hits_of(load, make_policy(policy, slot_count), slot_count)
    assert ours >= lru - BARS[policy] * load.references


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "name", "share", "gain"),
    [("prefix", "a loop", 0.5, 0.3), ("prefix", "documents", 0.02, 0.03),
     ("adaptive", "documents", 0.02, 0.06), ("adaptive", "agents", 0.02, 0.01)],
)  # fmt: skip
def test_better_where_there_is_something_to_gain(
    policy: str, name: str, share: float, gain: float
) -> None:
    """Goal: not LRU under another name. A loop larger than the cache, documents that lasting
    popularity tells from the rest, and agents.
    """
    lru, (ours,) = rates(requests_of(LOADS[name](1500, 1)), share, policy)
    assert ours > lru + gain


def test_the_same_again() -> None:
    """Goal: a simulation can be replayed. Twice the same requests give the same hits."""
    load = requests_of(LOADS["a shift"](600, 3))
    first, again = (hits_of(load, make_policy("prefix", 100), 100) for _ in range(2))
    assert first == again


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("seed", range(11, 11 + SEEDS))
def test_the_whole_matrix(name: str, seed: int) -> None:
    """Every load at every capacity, longer."""
    assert not list(cases(requests_of(LOADS[name](4000, seed)), SHARES[:SHARE_COUNT], *BARS))
