"""Hints of agents: what pins and demotions add to the hit rate of recorded agents.

    KVBM_BENCH_AGENTS=traces/ python -m benchmarks hints
    python -m benchmarks.hints --agents traces/

The first judges, the second tries the rules on the other half of the sessions
(`eviction_traces`). The host tier's real core serves an engine without a device cache: each request
looks its blocks up, offers those that it missed, and says a hint as the connector does. Each agent
says hints: it pins its blocks while a tool runs, and demotes them where a person has the turn and
where its session ends. A request takes no time, so a pin begins when its request does.
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm_cli.replay import ROOT, Chain, Requests, bound_of, hits_of, requests_of
from kvbm_common.checksum import pack_sums
from kvbm_common.eviction import make_policy
from kvbm_common.identity import Namespace, pack_hashes
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.wire.local import Beat, Confirm, Found, Hello, Lookup, Pulled, Region, Release
from kvbm_common.wire.session_hint import SessionHint
from kvbm_common.wire.verbs import Offer, OfferRun
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import (
    ArenaInfo,
    AttachPeer,
    EngineId,
    FromEngine,
    Input,
    OfferReceived,
    PeerAttached,
    PullDone,
    StartPull,
    Tick,
    ToEngine,
)

from benchmarks.eviction_traces import (
    AGENT_LOADS,
    TOKENS_PER_BLOCK,
    AgentRequest,
    agent_requests,
)
from benchmarks.harness import Row, info_row

FOLDER = "KVBM_BENCH_AGENTS"
SHARES = (0.02, 0.05, 0.1)
GOAL_SHARE, GOAL_POINTS = 0.05, 5.0
"""What hints are to add to LRU's hit rate, and where."""
DEFAULT, OTHER = "lru", "adaptive"
"""The eviction policy that ships as the default, and the one beside it."""
NAMESPACE = Namespace(model="agents", block_tokens=TOKENS_PER_BLOCK)
ENGINE = EngineId("agents", f"{1:016x}")
DEADLINE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Rules:
    """What agents say when an answer has ended: pin unless they demote."""

    ttl_s: int = 300
    """Of a pin; 0: the blocks stay ordinary."""
    turn_demotes: bool = True
    """Whether a session demotes its blocks when a person has the turn."""
    end_demotes: bool = True
    """Whether a session demotes its blocks when it ends."""
    prefix_blocks: int | None = None
    """So many leading blocks are pinned; None: all."""

    def demotes(self, request: AgentRequest) -> bool:
        """Tell whether a session demotes its blocks after this request."""
        is_turn = request.stop == "end_turn"
        return (self.end_demotes and request.is_last) or (self.turn_demotes and is_turn)


RULES = Rules()
"""Chosen on the half `build`; the time to live is that of a `cache_control` without one."""
TRIED = {
    "demote at the end": Rules(ttl_s=0, turn_demotes=False),
    "demote at turn and end": Rules(ttl_s=0),
    "pin, demote at the end": Rules(turn_demotes=False),
    "pin, demote at turn and end": RULES,
    "pin for 60 s, demote at turn and end": Rules(ttl_s=60),
    "pin for 1,800 s, demote at turn and end": Rules(ttl_s=1800),
    "pin 200 blocks, demote at turn and end": Rules(prefix_blocks=200),
}


class HintedTier:
    """The core of a host tier, and an engine whose requests take no time."""

    def __init__(self, slot_count: int, policy: str, longest: int) -> None:
        """`longest`: blocks of the longest request."""
        limits = HostTierLimits(explain_requests=1)
        arena = ArenaInfo("/arena", UNIT_BYTES, slot_count * UNIT_BYTES, b"arena")
        self.core = HostTierCore(
            host="h", instance="0", epoch=1, arena=arena, limits=limits, policy=policy
        )
        self._now_ms, self._number = 1, 0
        self._found: deque[Found] = deque()
        self._todo: deque[Input] = deque()
        self.core.start()
        region = Region(
            address=UNIT_BYTES, stride=UNIT_BYTES, piece_bytes=UNIT_BYTES, blocks=longest
        )
        for role in ("worker", "scheduler"):
            is_worker = role == "worker"
            self._step(FromEngine(f"{role}".encode(), Hello(
                engine=ENGINE.engine, incarnation=ENGINE.incarnation, namespace=NAMESPACE,
                role="worker" if is_worker else "scheduler", rank=0, world_size=1,
                agent=b"agent" if is_worker else b"", regions=[region] if is_worker else [],
            )))  # fmt: skip

    def _step(self, event: Input) -> None:
        """Take an input, and do what the core wants done."""
        self._todo.append(event)
        while self._todo:
            effects = self.core.step(self._todo.popleft(), self._now_ms)
            for effect in (*effects, *self.core.settle()):
                match effect:
                    case AttachPeer(engine, rank):
                        self._todo.append(PeerAttached(engine, rank, "agents-0"))
                    case StartPull():
                        sums = (pack_sums([1]),) * len(effect.slots)
                        self._todo.append(PullDone(effect.pull, sums))
                    case ToEngine(_, Pulled(confirm=True, offer=offer)):
                        confirm = Confirm(
                            engine=ENGINE.engine, incarnation=ENGINE.incarnation, offer=offer,
                            held=True,
                        )  # fmt: skip
                        self._todo.append(FromEngine(b"scheduler", confirm))
                    case ToEngine(_, Found() as found):
                        self._found.append(found)
                    case _:
                        pass

    def serve(self, chain: Chain, at_ms: int) -> int:
        """Serve a request from host memory, store what it missed, and return its hits."""
        assert at_ms >= self._now_ms, f"a request at {at_ms} ms, it is {self._now_ms} ms"
        self._now_ms = at_ms
        self._number += 1
        engine, incarnation = ENGINE.engine, ENGINE.incarnation
        for half in (b"scheduler", b"worker"):
            self._step(FromEngine(half, Beat(engine=engine, incarnation=incarnation)))
        self._step(Tick())
        self._step(FromEngine(b"scheduler", Lookup(
            engine=engine, incarnation=incarnation, lookup=self._number,
            namespace=NAMESPACE.digest, hashes=pack_hashes(chain), lease_ms=DEADLINE_MS,
            deadline_ms=DEADLINE_MS,
        )))  # fmt: skip
        found = self._found.pop()
        assert found.lookup == self._number, f"{found} answers lookup {self._number}"
        hits = len(found.slots)
        if found.lease:
            release = Release(engine=engine, incarnation=incarnation, lease=found.lease)
            self._step(FromEngine(b"scheduler", release))
        if hits < len(chain):
            self._offer(chain, hits)
        return hits

    def _offer(self, chain: Chain, hits: int) -> None:
        run = OfferRun(
            parent=(chain[hits - 1] if hits else ROOT).hex(),
            hashes=[name.hex() for name in chain[hits:]], blocks=list(range(len(chain) - hits)),
        )  # fmt: skip
        self._step(OfferReceived(Offer(
            host="h", engine=ENGINE.engine, incarnation=ENGINE.incarnation, offer=self._number,
            namespace=NAMESPACE.digest.hex(), deadline_ms=DEADLINE_MS, runs=[run],
        )))  # fmt: skip

    def hint(self, request: AgentRequest, chain: Chain, rules: Rules) -> None:
        """Say the hint of a request that has been answered."""
        demotes = rules.demotes(request)
        names = chain if demotes else chain[: rules.prefix_blocks]
        self._step(FromEngine(b"scheduler", SessionHint(
            engine=ENGINE.engine, incarnation=ENGINE.incarnation, namespace=NAMESPACE.digest,
            session=request.session, action="demote" if demotes else "pin",
            hashes=pack_hashes(names), ttl_ms=0 if demotes else 1000 * rules.ttl_s,
        )))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of agents, and the names of their blocks."""

    asked: Sequence[AgentRequest]
    named: Requests

    def hits(self, slot_count: int, policy: str, rules: Rules | None) -> float:
        """Return the hit rate of a host tier, in percent. With no rules agents say no hints."""
        tier = HintedTier(slot_count, policy, max(map(len, self.named.chains)))
        hits = 0
        for request, chain in zip(self.asked, self.named.chains, strict=True):
            if not chain:
                continue
            hits += tier.serve(chain, 1 + int(1000 * request.at_s))
            if rules is not None:
                tier.hint(request, chain, rules)
        tier.core.check()
        return 100 * hits / self.named.references


def loads(folder: Path, half: str) -> Iterator[tuple[str, Load]]:
    """Yield the loads of recorded agents."""
    for name, sizes in AGENT_LOADS.items():
        asked = agent_requests(folder, half, *sizes)
        yield name, Load(asked, requests_of(map(repr, one.blocks) for one in asked))


def run() -> list[Row]:
    """Judge the rules on the half `judge`; the folder of the traces is in KVBM_BENCH_AGENTS."""
    folder = Path(os.environ.get(FOLDER, "traces"))
    if not any(folder.glob("trace_*.json")):
        raise SystemExit(
            f"{FOLDER}={folder}: no trace_*.json there; they are in `traces` of "
            "callanjfox/kv-cache-tester"
        )
    return [row for name, load in loads(folder, "judge") for row in rows_of(name, load)]


def rows_of(name: str, load: Load) -> Iterator[Row]:
    """Yield what hints add in each room, beside the tier without hints and beside LRU alone."""
    part = 100 / load.named.references
    for share in SHARES:
        slots = max(1, int(share * load.named.block_count))
        room = f"{name}, room for {share:.0%}"
        goal = GOAL_POINTS if share == GOAL_SHARE else None
        hinted, plain = load.hits(slots, DEFAULT, RULES), load.hits(slots, DEFAULT, None)
        alone = part * hits_of(load.named, make_policy(DEFAULT), slots)
        bound = part * bound_of(load.named, slots)
        yield _row(f"{room}: `{DEFAULT}` with hints", hinted, "no hints", plain, goal)
        yield _row(f"{room}: the same", hinted, f"`{DEFAULT}` alone, without a tier", alone, goal)
        for what, rules in (("with hints", RULES), ("without", None)):
            value = load.hits(slots, OTHER, rules)
            yield _row(f"{room}: `{OTHER}` {what}", value, f"`{DEFAULT}`, no hints", plain, None)
        yield info_row(f"{room}: the bound", round(bound, 1), unit="%")


def _row(name: str, value: float, beside: str, reference: float, goal: float | None) -> Row:
    """Return a hit rate beside another; `goal`: the points that it is to be above it."""
    return Row(
        name=f"{name} (reference: {beside}; {value - reference:+.1f} points)", unit="%",
        value=round(value, 1), reference=round(reference, 1), ratio=round(value / reference, 3),
        target=None if goal is None else round(1 + goal / reference, 3),
        met=None if goal is None else value >= reference + goal,
    )  # fmt: skip


def main() -> None:
    """Print what each rule that was tried adds on the half `build`, in points."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--agents", type=Path, required=True)
    arguments = parser.parse_args()
    for name, load in loads(arguments.agents, "build"):
        slots = max(1, int(GOAL_SHARE * load.named.block_count))
        plain = load.hits(slots, DEFAULT, None)
        print(f"{name}, room for {GOAL_SHARE:.0%}: `{DEFAULT}` {plain:.2f} %", flush=True)
        for called, rules in TRIED.items():
            print(f"{load.hits(slots, DEFAULT, rules) - plain:+6.2f}  {called}", flush=True)


if __name__ == "__main__":
    main()
