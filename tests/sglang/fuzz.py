"""Compares what SGLang's storage calls bring back with what was stored, on drawn programs.

`python -m tests.sglang.fuzz --seeds 0:200` runs programs, `--plant NAME` with a mistake planted.
Two engines of one model share a small host tier and a disk tier. A page's bytes follow from its
prefix and from the weights, so every page that is said to be loaded can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.sglang.conversation import Command, Pool
from tests.sglang.harness import RankProcess, pages
from tests.sglang.plants import PLANTS
from tests.vllm.harness import LiveStack, corrupt_arena, live_stack
from tests.waiting import stop_child

TIERS = {"cpu_cache_gb": 0.004, "disk_cache_gb": 0.1, "disable_disk_offload_filter": True}
"""Host memory for some 120 pages: a program evicts."""
SERVICES = ("consolidator", "index", "host-tier", "disk-tier")
PATIENCE = {"onboard_deadline_ms": 2_000, "offer_deadline_ms": 2_000}
POOL = Pool(pages=32)
CHAIN_MAX = 8
BRANCHES = 0.15
"""How likely a page is to leave the path that most chains share."""
JUNK = 2**31 - 1
"""The seed of what lies in pages that nothing was loaded into."""
Path_ = tuple[int, ...]

KINDS = {
    "store": 6, "load": 6, "both": 6, "find": 2, "clear": 1, "rot": 1, "reattach": 0.5,
    "kill host-tier": 0.4, "kill disk-tier": 0.4, "stop host-tier": 0.4,
}  # fmt: skip
"""What a step may be, and how often."""


@dataclass(frozen=True, slots=True)
class Call:
    """One engine stores or loads a chain."""

    what: str
    engine: int
    chain: Path_
    first_page: int


@dataclass(frozen=True, slots=True)
class Step:
    """Calls that run at once, or something that is done to the services."""

    kind: str
    calls: tuple[Call, ...] = ()


def draw(seed: int) -> list[Step]:
    """Return the program of a seed."""
    rng = random.Random(seed)
    roots = [rng.randrange(1_000) for _ in range(2)]

    def chain() -> Path_:
        tail = (int(rng.random() < BRANCHES) for _ in range(rng.randrange(CHAIN_MAX)))
        return (rng.choice(roots), *tail)

    def call(what: str, engine: int) -> Call:
        return Call(what, engine, chain(), rng.randrange(POOL.pages - CHAIN_MAX))

    def step(kind: str) -> Step:
        if kind == "both":
            return Step(kind, tuple(call(rng.choice(("store", "load")), n) for n in range(2)))
        if kind in ("store", "load", "find", "reattach") or kind.startswith("stop"):
            what = kind if kind in ("store", "load", "find") else rng.choice(("store", "load"))
            return Step(kind, (call(what, rng.randrange(2)),))
        return Step(kind)

    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=rng.randint(10, 40))
    return [step(kind) for kind in kinds]


class WrongPage(AssertionError):
    """A page that is said to be loaded, or found, and was never stored like this."""


@dataclass(slots=True)
class Site:
    """The stack, both engines, and what was stored under the present weights."""

    stack: LiveStack
    engines: list[RankProcess]
    weights: int = 0
    stored: set[Path_] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def attach(self, engine: int) -> None:
        self.engines[engine].attach(self.stack.settings, {"kv": POOL}, extra=PATIENCE)

    def run(self, seed: int) -> None:
        """Run the program of a seed; raises WrongPage."""
        self.stored.clear()
        for engine in self.engines:
            engine.ask("begin_again")  # Until one clears, both find what either has stored.
        for number, step in enumerate(draw(seed)):
            try:
                self.take(seed, step)
            except WrongPage as error:
                raise WrongPage(f"seed {seed}, step {number} ({step.kind}): {error}") from None
            self.counts[f"step {step.kind}"] += 1

    def take(self, seed: int, step: Step) -> None:
        """Do one step."""
        match step.kind.split():
            case ["clear"]:
                for engine in self.engines:
                    engine.ask("clear")
                self.weights += 1
                self.stored.clear()
            case ["rot"]:
                corrupt_arena(self.stack.settings)
            case ["kill", kind]:
                self.stack.kill(kind)
                self.stack.start(kind)
                assert all(engine.ask("wait").flags == [True] for engine in self.engines)
            case ["stop", kind]:
                pid = self.stack.stack.pids[kind]
                stop_child(pid)
                try:
                    self.call_all(seed, step.calls)
                finally:
                    os.kill(pid, signal.SIGCONT)
            case ["reattach"]:
                self.engines[step.calls[0].engine].ask("detach")
                self.attach(step.calls[0].engine)
                self.call_all(seed, step.calls)
            case _:
                self.call_all(seed, step.calls)

    def call_all(self, seed: int, calls: Sequence[Call]) -> None:
        """Let the engines call at once; then compare, and leave junk in the pages."""
        for call in calls:
            there = pages(call.first_page, len(call.chain))
            seeds = self.contents(seed, call.chain)
            before = seeds if call.what == "store" else [JUNK] * len(there)
            self.engines[call.engine].ask("fill", pages=there, seeds=before)
            if call.what == "store":
                self.stored |= prefixes(seed, call.chain)
        what = {"store": "set", "load": "get", "find": "exists"}
        for call in calls:
            there = pages(call.first_page, len(call.chain))
            self.engines[call.engine].begin(
                Command(what=what[call.what], keys=keys(seed, call.chain), pages=there)
            )
        for call in calls:
            reply = self.engines[call.engine].wait_reply()
            assert not reply.error, reply.error
            there = pages(call.first_page, len(call.chain))
            engine = self.engines[call.engine]
            if call.what == "store":
                engine.ask("fill", pages=there, seeds=[JUNK] * len(there))
                self.counts["pages stored"] += sum(reply.flags)
            elif call.what == "load":
                self.compare(seed, call, reply.flags)
            else:
                known = sum(path in self.stored for path in prefixes(seed, call.chain))
                if reply.number > known:
                    raise WrongPage(f"{reply.number} pages found, {known} were stored")

    def compare(self, seed: int, call: Call, loaded: Sequence[bool]) -> None:
        """Require that every page that is said to be loaded is right."""
        there = pages(call.first_page, len(call.chain))
        seeds = self.contents(seed, call.chain)
        right = self.engines[call.engine].ask("holds", pages=there, seeds=seeds).flags
        self.counts["pages loaded"] += sum(loaded)
        self.counts["pages missed"] += len(loaded) - sum(loaded)
        wrong = [page for page, here, same in zip(there, loaded, right, strict=True)
                 if here and not same]  # fmt: skip
        if wrong:
            raise WrongPage(f"engine {call.engine} has loaded wrong bytes into pages {wrong}")

    def contents(self, seed: int, chain: Path_) -> list[int]:
        """Return the seed of each page's bytes: they follow from the prefix and the weights."""
        texts = (f"{seed} {self.weights} {chain[: n + 1]}" for n in range(len(chain)))
        return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1 for text in texts]


def keys(seed: int, chain: Path_) -> list[str]:
    """Return SGLang's keys of a chain's pages; they know nothing of the weights."""
    texts = (f"{seed} {chain[: n + 1]}" for n in range(len(chain)))
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def prefixes(seed: int, chain: Path_) -> set[Path_]:
    """Return the chain's prefixes, as the set of what was stored names them."""
    return {(seed, *chain[: n + 1]) for n in range(len(chain))}


def site(work: Path, plant: str = "") -> Iterator[Site]:
    """Yield a stack with two attached engines."""
    with ExitStack() as stack:
        live = stack.enter_context(live_stack(TIERS, SERVICES))
        engines = []
        for number in range(2):
            environ = {"KVBM_TEST_PLANT": plant} if plant else {}
            engines.append(RankProcess(work / f"fuzz-{number}.log", environ))
            stack.callback(engines[-1].stop)
        made = Site(live, engines)
        for number in range(2):
            made.attach(number)
        yield made


def main() -> int:
    """Run programs until one fails, and say what they met."""
    parser = argparse.ArgumentParser(prog="python -m tests.sglang.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="A:B")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--plant", default="", choices=["", *PLANTS])
    arguments = parser.parse_args()
    low, _, high = arguments.seeds.partition(":")
    until_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="kvbm-sglang-fuzz-") as work:
        for made in site(Path(work), arguments.plant):
            ran = 0
            for seed in range(int(low), int(high or int(low) + 1)):
                if time.monotonic() > until_s:
                    break
                try:
                    made.run(seed)
                except WrongPage as error:
                    print(f"after {ran} programs: {error}")
                    print(f"    .venv/bin/python -m tests.sglang.fuzz --seeds {low}:{seed + 1}")
                    return 1
                ran += 1
            print(f"{ran} programs, 0 wrong pages; {dict(sorted(made.counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
