"""Candidates: who lives, who is behind, who has another model, who is named twice."""

from __future__ import annotations

import pytest
from kvbm_common.identity import Namespace
from kvbm_common.tier.follow import FollowState
from kvbm_common.wire.routes import EngineLoad, RouteRequest
from kvbm_index.core.candidates import EngineFacts, candidates
from kvbm_index.core.messages import SourceJoined, SourceKey, SourceLeft
from kvbm_index.core.requests import BadRequest

from tests.services.index.core.test_core import Harness, cleared, stored

E, F, G = SourceKey("h", "e"), SourceKey("h", "f"), SourceKey("far", "e")
CURRENT = FollowState.CURRENT
MODEL = Namespace(model="m", block_tokens=4)
OTHER = Namespace(model="n", block_tokens=4)


def asking(*engines: EngineLoad, namespace: Namespace | None = None) -> RouteRequest:
    return RouteRequest(hashes=[], engines=list(engines), namespace=namespace)


def names(found: object) -> list[tuple[str, str, int]]:
    return [(one.key.host, one.key.source, one.rank) for one in found]  # type: ignore[attr-defined]


def test_without_names_everyone_may_take_it() -> None:
    found, left_out = candidates(asking(), {E: CURRENT, F: CURRENT, G: CURRENT}, {})
    assert names(found) == [("h", "e", 0), ("h", "f", 0), ("far", "e", 0)]
    assert left_out == []


def test_a_name_without_a_host_is_meant_on_every_host() -> None:
    known = {E: CURRENT, F: CURRENT, G: CURRENT}
    found, _ = candidates(asking(EngineLoad(source="e", running=2)), known, {})
    assert names(found) == [("h", "e", 0), ("far", "e", 0)]
    assert {one.load.running for one in found} == {2}
    found, _ = candidates(asking(EngineLoad(source="e", host="far")), known, {})
    assert names(found) == [("far", "e", 0)]


@pytest.mark.parametrize("state", [FollowState.BEHIND, FollowState.GONE])
def test_what_is_not_followed_is_left_out(state: FollowState) -> None:
    found, left_out = candidates(asking(), {E: state, F: CURRENT}, {})
    assert names(found) == [("h", "f", 0)]
    assert [(one.source, one.reason) for one in left_out] == [("e", "behind")]


def test_an_unknown_engine_is_said() -> None:
    found, left_out = candidates(asking(EngineLoad(source="x", host="h")), {E: CURRENT}, {})
    assert found == []
    assert [(one.host, one.source, one.reason) for one in left_out] == [("h", "x", "unknown")]


def test_an_engine_of_another_model_is_left_out() -> None:
    facts = {E: EngineFacts(namespaces=[MODEL.digest.hex()]), F: EngineFacts(namespaces=["ab"])}
    known = {E: CURRENT, F: CURRENT, G: CURRENT}
    found, left_out = candidates(asking(namespace=MODEL), known, facts)
    assert names(found) == [("h", "e", 0), ("far", "e", 0)], "who has not said it may have it"
    assert [(one.source, one.reason) for one in left_out] == [("f", "namespace")]
    assert names(candidates(asking(namespace=OTHER), known, facts)[0]) == [("far", "e", 0)]


def test_each_rank_is_a_candidate() -> None:
    facts = {E: EngineFacts(ranks=[0, 1])}
    assert names(candidates(asking(), {E: CURRENT}, facts)[0]) == [("h", "e", 0), ("h", "e", 1)]
    one = EngineLoad(source="e", rank=1)
    assert names(candidates(asking(one), {E: CURRENT}, facts)[0]) == [("h", "e", 1)]


def test_a_rank_that_an_engine_does_not_have_is_unknown() -> None:
    facts = {E: EngineFacts(ranks=[0, 1])}
    asked = asking(EngineLoad(source="e", rank=7), EngineLoad(source="e", rank=1))
    found, left_out = candidates(asked, {E: CURRENT}, facts)
    assert names(found) == [("h", "e", 1)]
    assert [(one.host, one.source, one.reason) for one in left_out] == [("h", "e", "unknown")]


def test_one_engine_has_one_load() -> None:
    twice = asking(EngineLoad(source="e"), EngineLoad(source="e", host="h"))
    with pytest.raises(BadRequest, match="e is named twice") as caught:
        candidates(twice, {E: CURRENT}, {})
    assert caught.value.field == "engines"


def test_the_core_says_who_lives(harness: Harness) -> None:
    """Goal: engines that are gone or behind are known as such, and tiers are no engines.

    1. A source that publishes without an entry is no engine to choose.
    2. It registers: it is. A hole: it is behind.
    3. It leaves: it is gone. A host tier is none.
    """
    harness.events(cleared(1, source="e"), stored(2, 0, source="e"))
    assert harness.core.engines() == {}
    harness.send(SourceJoined(E, 1))
    assert harness.core.engines() == {E: CURRENT}
    harness.events(stored(4, 1, source="e"))
    assert harness.core.engines() == {E: FollowState.BEHIND}
    harness.send(SourceLeft(E, 1))
    harness.send(SourceJoined(SourceKey("h", "host-tier-0"), 1))
    assert harness.core.engines() == {}


@pytest.fixture
def harness() -> Harness:
    """A new core."""
    return Harness()
