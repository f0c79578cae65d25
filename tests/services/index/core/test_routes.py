"""Routes: costs against a count block by block, ties, load, and what other hosts have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.events import Event, Tier
from kvbm_common.wire.routes import EngineLoad, RankedEngine
from kvbm_index.core.candidates import Candidate
from kvbm_index.core.messages import EventsReceived, SourceKey
from kvbm_index.core.routes import Prices

from tests.services.index.core.test_core import Harness, blocks
from tests.services.index.core.test_scores import held

ASKED = 7
HOSTS = ("a", "b", "c")
WEIGHTS: dict[Tier, float] = {"device": 1.0, "host": 0.75, "disk": 0.5, "object": 0.25}
PRICES = Prices(weights=WEIGHTS, peer_weight=0.625, running_blocks=0.5)
TIER_OF = {"host-tier-0": "host", "disk-tier-0": "disk", "object-tier-0": "object"}
SOURCES = (*TIER_OF, "e0", "e1")
World = Mapping[tuple[str, str], frozenset[int]]
"""Host and source → the blocks that it has of the chain 0 … 6."""
WORLDS = st.fixed_dictionaries(
    {(host, source): st.frozensets(st.integers(0, ASKED - 1)) for host in HOSTS
     for source in SOURCES}
)  # fmt: skip
LOADS = st.builds(
    EngineLoad,
    source=st.just("e"),
    running=st.integers(0, 3),
    waiting=st.integers(0, 2),
    waiting_blocks=st.none() | st.integers(0, 9).map(float),
)


def tier_of(source: str) -> Tier:
    return TIER_OF.get(source, "device")  # type: ignore[return-value]


def candidate(host: str, source: str, load: EngineLoad | None = None, rank: int = 0) -> Candidate:
    return Candidate(SourceKey(host, source), rank, load or EngineLoad(source=source))


def ranked(
    world: World,
    candidates: Sequence[Candidate],
    *,
    prices: Prices = PRICES,
    tie: bytes = b"tie",
    asked: int = ASKED,
) -> list[RankedEngine]:
    """The order of the candidates for the chain 0 … asked - 1."""
    harness = Harness()
    events: list[Event] = []
    for (host, source), has in world.items():
        if has:
            events += held(sorted(has), tier=tier_of(source), host=host, source=source)
    harness.send(EventsReceived(tuple(events)))
    return harness.core.routes(blocks(*range(asked)), candidates, prices, tie)


def counted(world: World, one: Candidate) -> tuple[float, dict[str, int]]:
    """Cost and what is found, block by block, without the index's structures."""
    host, source = one.key
    reach = [source, *TIER_OF]
    found: Counter[str] = Counter()
    cost, at = 0.0, 0
    while at < ASKED:
        having = [tier_of(who) for who in reach if at in world[host, who]]
        if not having:
            break
        best = max(having, key=lambda tier: WEIGHTS[tier])
        found[best] += 1
        cost += 1 - WEIGHTS[best]
        at += 1
    peers = []
    for other in HOSTS:
        end = at
        while other != host and end in world[other, "host-tier-0"]:
            end += 1
        peers.append(end - at)
    if max(peers):
        found["peer"] = max(peers)
        cost += (1 - PRICES.peer_weight) * max(peers)
    cost += ASKED - at - max(peers)
    load = one.load
    waiting = load.waiting * ASKED if load.waiting_blocks is None else load.waiting_blocks
    return cost + waiting + load.running * PRICES.running_blocks, dict(found)


@given(WORLDS, st.lists(LOADS, min_size=6, max_size=6), st.randoms())
def test_costs_are_those_of_a_count_block_by_block(
    world: World, loads: list[EngineLoad], random: object
) -> None:
    """Goal: overlap, peers and load are right in any world, and the order is that of the costs.

    1. Three hosts with three tiers and two engines each have any blocks of a chain.
    2. Each engine's cost and its parts are those of a loop over blocks.
    3. The order does not depend on how the candidates are listed.
    """
    everyone = [candidate(host, source) for host in HOSTS for source in ("e0", "e1")]
    everyone = [Candidate(one.key, 0, load) for one, load in zip(everyone, loads, strict=True)]
    found = ranked(world, everyone)
    assert len(found) == len(everyone)
    by_key = {one.key: one for one in everyone}
    for engine in found:
        cost, places = counted(world, by_key[SourceKey(engine.host, engine.source)])
        assert engine.cost == pytest.approx(cost)
        assert engine.found == places
        assert engine.compute == ASKED - sum(places.values())
        assert engine.cost == pytest.approx(engine.compute + engine.load + engine.queue)
    costs = [engine.cost for engine in found]
    assert costs == sorted(costs)
    random.shuffle(everyone)  # type: ignore[attr-defined]
    assert ranked(world, everyone) == found


def firsts(prompts: Iterable[int], count: int) -> Counter[str]:
    everyone = [candidate("a", f"e{number}") for number in range(count)]
    orders = (ranked({}, everyone, tie=number.to_bytes(16), asked=1) for number in prompts)
    return Counter(order[0].source for order in orders)


def test_equals_take_turns_over_prompts() -> None:
    """600 prompts, 3 idle engines without a block: no engine is first far more often."""
    found = firsts(range(600), 3)
    assert len(found) == 3
    assert min(found.values()) > 150, found


def test_equals_keep_their_order_for_a_prompt() -> None:
    """Two replicas of the index, or two questions, send the same prompt to the same engine."""
    everyone = [candidate("a", f"e{number}") for number in range(8)]
    order = ranked({}, everyone, tie=b"prompt")
    assert ranked({}, everyone[::-1], tie=b"prompt") == order
    assert ranked({}, everyone, tie=b"other") != order


def test_a_busy_engine_loses_to_one_that_computes_more() -> None:
    """Four of seven blocks are on e0; who waits there has five to compute."""
    world = {("a", "e0"): frozenset(range(4))}
    idle = [candidate("a", "e0"), candidate("a", "e1")]
    assert [one.source for one in ranked(world, idle)] == ["e0", "e1"]
    busy = [candidate("a", "e0", EngineLoad(source="e0", waiting=1, waiting_blocks=5.0)), idle[1]]
    assert [(one.source, one.cost) for one in ranked(world, busy)] == [("e1", 7.0), ("e0", 8.0)]


def test_a_rank_has_blocks_of_its_own() -> None:
    harness = Harness()
    harness.send(EventsReceived(tuple(held(range(3), source="e", rank=1))))
    both = [candidate("h", "e", rank=rank) for rank in (0, 1)]
    found = harness.core.routes(blocks(*range(4)), both, PRICES, b"")
    assert [(one.rank, one.compute) for one in found] == [(1, 1), (0, 4)]


def test_peers_that_are_not_read_do_not_count() -> None:
    world = {("a", "host-tier-0"): frozenset(range(4))}
    alone = Prices(weights=WEIGHTS, peer_weight=0.0, running_blocks=0.0)
    (engine,) = ranked(world, [candidate("b", "e0")], prices=alone)
    assert (engine.cost, engine.found) == (7.0, {})


def test_a_weight_above_one_earns_nothing() -> None:
    """A cost below nothing would make up for requests that wait."""
    world = {("a", "e0"): frozenset(range(7))}
    odd = Prices(weights={"device": 5.0}, peer_weight=0.0, running_blocks=0.0)
    (engine,) = ranked(world, [candidate("a", "e0")], prices=odd)
    assert engine.cost == 0


def test_a_question_without_blocks_is_about_load() -> None:
    busy = candidate("a", "e0", EngineLoad(source="e0", running=2))
    found = ranked({}, [busy, candidate("a", "e1")], asked=0)
    assert [(one.source, one.cost) for one in found] == [("e1", 0.0), ("e0", 1.0)]
