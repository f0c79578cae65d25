"""What agents of a trace say and ask, and the host tier's core that serves them."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kvbm_cli.replay import Requests, hits_of, requests_of
from kvbm_common.eviction import make_policy

from benchmarks.eviction_traces import AGENT_BLOCKS, AgentRequest, agent_requests, half_of
from benchmarks.hints import FOLDER, RULES, HintedTier, Load, Rules, run

SLOTS = 100
SESSION, OTHER = range(20), range(1_000, 1_020)
TOOL, TURN, END = "tool_use", "end_turn", ""


def asked(at_s: float, stop: str = TOOL, *, session: str = "s", last: bool = False) -> AgentRequest:
    """Return a request whose blocks stand elsewhere."""
    return AgentRequest(at_s, session, [], stop, last)


def chains(*requests: range) -> Requests:
    """Name the blocks of requests."""
    return requests_of(requests)


def noise(tier: HintedTier, at_ms: int, *, sessions: int) -> None:
    """Serve so many sessions of 20 blocks that are not asked for again."""
    ranges = [range(first, first + 20) for first in range(2_000, 2_000 + 20 * sessions, 20)]
    for chain in chains(*ranges).chains:
        tier.serve(chain, at_ms)


def test_a_request_hits_the_leading_blocks_that_an_earlier_one_has_stored() -> None:
    tier = HintedTier(SLOTS, "lru", 20)
    short, long = chains(range(10), range(20)).chains
    assert [tier.serve(chain, at) for at, chain in enumerate((short, long, long), 1)] == [0, 10, 20]
    tier.core.check()


@pytest.mark.parametrize(("after_s", "hits"), [(RULES.ttl_s - 1, 20), (RULES.ttl_s + 1, 0)])
def test_a_pin_outlives_noise_until_its_time_has_passed(after_s: int, hits: int) -> None:
    """Six sessions of 20 blocks are more than 100 slots."""
    tier = HintedTier(SLOTS, "lru", 20)
    [chain] = chains(SESSION).chains
    tier.serve(chain, 1)
    tier.hint(asked(0), chain, RULES)
    noise(tier, 1 + 1000 * after_s, sessions=6)
    assert tier.serve(chain, 1 + 1000 * after_s) == hits


@pytest.mark.parametrize("said", [asked(0, TURN), asked(0, TOOL, last=True)])
def test_demoted_blocks_leave_before_those_of_an_older_session(said: AgentRequest) -> None:
    tier = HintedTier(SLOTS, "lru", 20)
    old, new = chains(OTHER, SESSION).chains
    tier.serve(old, 1)
    tier.serve(new, 2)
    tier.hint(said, new, RULES)
    noise(tier, 3, sessions=4)
    assert [tier.serve(chain, 4) for chain in (old, new)] == [20, 0]


def test_a_pin_of_a_prefix_leaves_the_other_blocks_ordinary() -> None:
    tier = HintedTier(SLOTS, "lru", 20)
    [chain] = chains(SESSION).chains
    tier.serve(chain, 1)
    tier.hint(asked(0), chain, Rules(prefix_blocks=5))
    noise(tier, 2, sessions=6)
    assert tier.serve(chain, 3) == 5


def test_a_load_without_hints_hits_in_the_core_what_the_policy_alone_hits() -> None:
    """Requests without a hit and a miss at once: the order of the two is the tier's own."""
    order = [0, 1, 2, 0, 3, 0, 4, 5, 1, 0, 2, 3]
    named = requests_of([range(20 * one, 20 * one + 20) for one in order])
    load = Load([asked(at) for at, _ in enumerate(order)], named)
    assert 0 < hits_of(named, make_policy("lru"), 80) < named.references
    for slots in (40, 60, 80):
        hits = 100 * hits_of(named, make_policy("lru"), slots) / named.references
        assert load.hits(slots, "lru", None) == pytest.approx(hits), f"{slots} slots"


# --- the trace ----------------------------------------------------------------------------------


def of_half(half: str) -> str:
    """Return the name of a session in this half."""
    return next(name for number in count() if half_of(name := f"trace_{number:04}") == half)


def recorded(at_s: float, blocks: int, stop: str, first: int = 0) -> dict[str, Any]:
    """Return a request of so many of our blocks."""
    ids = list(range(first, first + AGENT_BLOCKS * blocks))
    return {"t": at_s, "type": "n", "hash_ids": ids, "stop": stop}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A session of the half `judge` with a subagent and a long pause, and an empty one to build."""
    under = {"t": 20.0, "agent_id": "a1", "type": "subagent",
             "requests": [recorded(0.0, 1, TOOL, 900), recorded(5.0, 2, TURN, 900)]}  # fmt: skip
    requests = [recorded(0.0, 3, TOOL), recorded(10.0, 4, TOOL), under, recorded(500.0, 5, END)]
    for half, its_own in (("judge", requests), ("build", [recorded(0.0, 1, TURN)])):
        session = {"id": of_half(half), "tool_tokens": 1024, "requests": its_own}
        (tmp_path / f"{session['id']}.json").write_text(json.dumps(session))
    return tmp_path


def test_a_subagent_is_a_session_of_its_own_that_ends(traces: Path) -> None:
    load = agent_requests(traces, "judge", 1, 1, 60.0)
    own = of_half("judge")
    said = [(request.session, request.stop, request.is_last) for request in load]
    assert said == [
        (own, TOOL, False), (own, TOOL, False), (f"{own}/a1", TOOL, False),
        (f"{own}/a1", TURN, True), (own, END, True),
    ]  # fmt: skip


def test_pauses_are_cut_and_tools_are_shared(traces: Path) -> None:
    load = agent_requests(traces, "judge", 1, 1, 60.0)
    start_s = load[0].at_s
    assert [round(request.at_s - start_s) for request in load] == [0, 10, 20, 25, 85]
    assert [len(request.blocks) for request in load] == [3, 4, 1, 2, 5]
    assert load[0].blocks[:2] == [("tools", 2)] * 2


def test_without_traces_the_benchmark_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(SystemExit, match="kv-cache-tester"):
        run()
