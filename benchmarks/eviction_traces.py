"""Eviction on recorded loads: what a policy takes of the gap between LRU and the bound.

    python -m benchmarks.eviction_traces --half judge --policy adaptive \\
        --conversation conversation_trace.jsonl --documents synthetic_trace.jsonl --agents traces/

The files are public, and not part of this repository: Mooncake's FAST'25 traces
(`kvcache-ai/Mooncake`, `FAST25-release/traces`) and the recorded agents of `kv-cache-tester`
(`callanjfox/kv-cache-tester`, `traces`). One half of the sessions is to build a policy with, the
other to judge it: a hash of the session's name, or of the block where it leaves the others, says
which. No choice may be made on the figures of the half `judge`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from kvbm_cli.replay import Requests, bound_of, hits_of, requests_of
from kvbm_common.eviction import POLICIES, make_policy

from benchmarks.eviction_loads import LOADS

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
AGENT_BLOCKS = 8
"""Recorded blocks of 64 tokens in one of ours: 512 tokens, as Mooncake's."""
TOKENS_PER_BLOCK = 512
AGENT_REQUESTS = 60
"""Of one session: the first ones."""
AGENT_LOADS = {"agents, busy": (100, 8, 60.0), "agents, pauses": (90, 30, 1800.0)}
"""Sessions, how many are live at a time on average, and the longest pause in seconds."""
DRAWN = {"documents": "documents, drawn", "documents, flat": "documents, drawn flat"}
DRAWN_SEED = {"build": 1, "judge": 101}
SEED = 7

Timed = list[tuple[float, list[object]]]


def half_of(key: object) -> str:
    """Return which half a session belongs to."""
    odd = hashlib.blake2b(repr(key).encode()).digest()[0] & 1
    return "build" if odd else "judge"


def mooncake(path: Path, depth: int, half: str) -> Timed:
    """Read one half of a trace; sessions part at the block of this depth."""
    load: Timed = []
    for line in path.read_text().splitlines():
        request = json.loads(line)
        ids = request["hash_ids"]
        if ids and half_of(ids[min(depth, len(ids) - 1)]) == half:
            load.append((request["timestamp"] / 1000, ids))
    return load


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request of a recorded agent, and what the agent knows when it has been answered."""

    at_s: float
    session: str
    """The agent's own, and one for each of its subagents."""
    blocks: list[object]
    stop: str
    """Why the answer ended: `tool_use`, `end_turn`, or nothing where that was not recorded."""
    is_last: bool = False
    """Whether its session has no further request in the load."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A request as it was recorded, at its time within its session."""

    at_s: float
    ids: list[int]
    session: str
    stop: str


def _requests(recorded: Iterable[dict[str, object]], session: str) -> Iterator[_Recorded]:
    """Yield the requests of a session, those of subagents between the others."""
    for one in recorded:
        inner, at_s = one.get("requests"), float(str(one.get("t", 0)))
        if isinstance(inner, list):
            first = inner[0].get("t", 0) if inner else 0
            start = 0.0 if first >= at_s else at_s
            for under in _requests(inner, f"{session}/{one.get('agent_id', at_s)}"):
                yield replace(under, at_s=start + under.at_s)
        elif isinstance(one.get("hash_ids"), list) and one["hash_ids"]:
            ids: list[int] = one["hash_ids"]  # type: ignore[assignment]
            yield _Recorded(at_s, ids, session, str(one.get("stop") or ""))


def agents(folder: Path, half: str, count: int, live: int, pause_max: float) -> Timed:
    """Return the time and the blocks of each request of `agent_requests`."""
    load = agent_requests(folder, half, count, live, pause_max)
    return [(request.at_s, request.blocks) for request in load]


def agent_requests(
    folder: Path, half: str, count: int, live: int, pause_max: float
) -> list[AgentRequest]:
    """Read sessions of one half, and let them begin at random times.

    Sessions with tools of equal length share the blocks of these.
    """
    rng = random.Random(SEED)
    chosen = rng.sample(_agents_of(folder, half), count)
    sessions = [requests for one in chosen if (requests := _session(one, pause_max))]
    length = sum(requests[-1].at_s for requests in sessions) / len(sessions)
    load, start = list[AgentRequest](), 0.0
    for requests in sessions:
        start += rng.expovariate(live / length)
        load += [replace(request, at_s=start + request.at_s) for request in requests]
    return sorted(load, key=lambda request: request.at_s)


@cache
def _agents_of(folder: Path, half: str) -> list[dict[str, Any]]:
    """Return the recorded sessions of one half."""
    recorded = (json.loads(path.read_bytes()) for path in sorted(folder.glob("trace_*.json")))
    return [one for one in recorded if half_of(one["id"]) == half]


def _session(session: dict[str, Any], pause_max: float) -> list[AgentRequest]:
    """Return the first requests of a session, with no pause longer than `pause_max`."""
    recorded = sorted(
        _requests(session["requests"], session["id"]), key=lambda one: (one.at_s, one.ids)
    )[:AGENT_REQUESTS]
    last_of = {one.session: number for number, one in enumerate(recorded)}
    shared = (session["tool_tokens"] or 0) // TOKENS_PER_BLOCK
    now_s, last_s, requests = 0.0, None, list[AgentRequest]()
    for number, one in enumerate(recorded):
        now_s += min(pause_max, max(0.0, one.at_s - last_s)) if last_s is not None else 0.0
        last_s = one.at_s
        blocks = range(len(one.ids) // AGENT_BLOCKS)
        chain = [tuple(one.ids[n * AGENT_BLOCKS : (n + 1) * AGENT_BLOCKS]) for n in blocks]
        names = [("tools", shared) if n < shared else (session["id"], chain[n]) for n in blocks]
        is_last = last_of[one.session] == number
        requests.append(AgentRequest(now_s, one.session, list(names), one.stop, is_last))
    return requests


def together(loads: dict[str, Timed]) -> Timed:
    """Return several loads at once, each as long as the others."""
    merged: Timed = []
    for name, load in loads.items():
        merged += [(at / load[-1][0], [(name, block) for block in ids]) for at, ids in load]
    return sorted(merged, key=lambda one: one[0])


def loads_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Requests]]:
    """Yield kind, name and requests of each load for which there are files."""
    half, recorded = arguments.half, dict[str, Timed]()
    if arguments.conversation:
        recorded["conversation"] = mooncake(arguments.conversation, 1, half)
    if arguments.documents:
        recorded["documents"] = mooncake(arguments.documents, 0, half)
    if arguments.agents:
        for name, sizes in AGENT_LOADS.items():
            recorded[name] = agents(arguments.agents, half, *sizes)
    for name, load in recorded.items():
        yield name.split(",")[0], name, _named(ids for _, ids in load)
    for drawn, name in DRAWN.items():
        yield "documents", name, requests_of(LOADS[drawn](4000, DRAWN_SEED[half]))
    if len(recorded) > 1:
        recorded.pop("agents, busy", None)
        yield "mixed", "mixed", _named(ids for _, ids in together(recorded).__iter__())


def _named(load: Iterable[list[object]]) -> Requests:
    return requests_of([map(repr, ids) for ids in load])


def rate_and_cost(load: Requests, policy: str, slots: int) -> tuple[float, float]:
    """Return the hit rate, and CPU µs for each block asked for: all calls and the replay itself."""
    started = time.process_time()
    hits = hits_of(load, make_policy(policy, slots), slots)
    took = time.process_time() - started
    return 100 * hits / load.references, 1e6 * took / load.references


def main() -> None:
    """Print a line for each load and size, then the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--half", choices=("build", "judge"), default="build")
    parser.add_argument("--policy", choices=[name for name in POLICIES if name != "lru"],
                        default="adaptive")  # fmt: skip
    for kind in ("conversation", "documents", "agents"):
        parser.add_argument(f"--{kind}", type=Path)
    arguments = parser.parse_args()
    gains, gaps, worst = dict[str, float](), dict[str, float](), (0.0, "none")
    costs: list[float] = []
    for kind, name, load in loads_of(arguments):
        for share in SHARES:
            slots = max(1, int(share * load.block_count))
            lru, _ = rate_and_cost(load, "lru", slots)
            ours, cost = rate_and_cost(load, arguments.policy, slots)
            bound = 100 * bound_of(load, slots) / load.references
            gains[kind] = gains.get(kind, 0.0) + ours - lru
            gaps[kind] = gaps.get(kind, 0.0) + bound - lru
            costs.append(cost)
            worst = min(worst, (ours - lru, f"{name}, room for {share:.0%}"))
            print(f"{name:<22}{share:>5.0%} of {load.block_count:>7}  lru {lru:6.2f}  "
                  f"{arguments.policy} {ours:6.2f}  bound {bound:6.2f}  "
                  f"{cost:4.1f} µs a block", flush=True)  # fmt: skip
    for kind, gap in gaps.items():
        print(f"{kind}: {gains[kind] / gap:.1%} of the gap")
    print(f"on average {sum(gains[kind] / gap for kind, gap in gaps.items()) / len(gaps):.1%}; "
          f"worst {worst[0]:+.2f} points ({worst[1]}); "
          f"at most {max(costs):.1f} µs a block, median {median(costs):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
