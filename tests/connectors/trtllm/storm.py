"""Storms: drawn programs of a TensorRT-LLM engine whose services are killed, stopped and emptied.

`python -m tests.connectors.trtllm.storm --seeds 0:50` runs programs. The executor compares every
block that a request looks back on, and a step has a bound.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.connectors.trtllm.engine import LlmRequest
from tests.connectors.trtllm.running import Engine, engine_on
from tests.vllm.harness import LiveStack, corrupt_arena, live_stack
from tests.waiting import stop_child, wait_for

TIERS = {"cpu_cache_gb": 0.004, "disk_cache_gb": 0.05, "disable_disk_offload_filter": True}
SERVICES = ("consolidator", "index", "host-tier", "disk-tier")
ONBOARD_MS = 200
STEP_S = ONBOARD_MS / 1000 + 0.5 + 2.0
"""The longest step: a lookup has a deadline and a margin; the rest is for a starved machine."""
ATTACH_S = 40.0
ROOM = 60
"""Tokens for which each device has room, with some for the answer."""
KINDS = {
    "submit": 8, "go on": 4, "step": 10, "cancel": 2, "settle": 5, "stop": 1.5, "cont": 2,
    "kill": 0.7, "start": 1.5, "rot": 0.7, "forget": 0.5,
}  # fmt: skip
ACTIONS = 60


class Storm:
    """One engine, and what is wrong with its services now."""

    def __init__(self, stack: LiveStack, seed: int) -> None:
        self.stack, self.rng = stack, random.Random(seed)
        self.requests: list[LlmRequest] = []
        self.stopped = 0
        """The process that stands still."""
        self.down = ""
        """The service that is killed."""
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Run the program; a wrong byte, a late step and a leak are errors."""
        rng = self.rng
        variables = {
            "KVBM_PROMISE_GB": rng.choice(["2e-6", "2e-3"]), "KVBM_LEASE_MS": "300",
            "KVBM_ONBOARD_DEADLINE_MS": str(ONBOARD_MS), "KVBM_OFFER_DEADLINE_MS": "700",
        }  # fmt: skip
        with ExitStack() as ends:
            monkeypatch = ends.enter_context(pytest.MonkeyPatch.context())
            engine = ends.enter_context(engine_on(
                self.stack, monkeypatch, variables=variables, ranks=rng.choice([1, 2]), wait=False,
                chunk_tokens=rng.choice([3, 8, 1000]), blocks=rng.choice([16, 40]),
                overtake=rng.random() < 0.5, rematch=rng.random() < 0.5,
            ))  # fmt: skip
            ends.callback(self.mend)
            half = engine.half
            wait_for(lambda: half.attached and half.streams_attached, deadline_s=ATTACH_S)
            for kind in rng.choices(list(KINDS), list(KINDS.values()), k=ACTIONS):
                self.act(engine, kind)
                engine.side.check()
            self.end(engine)

    def act(self, engine: Engine, kind: str) -> None:
        """Do one of KINDS, to the engine or to a service."""
        rng, stack = self.rng, self.stack
        self.counts[kind] += 1
        match kind:
            case "submit":
                self.submit(engine)
            case "go on" if self.requests:
                last = rng.choice(self.requests[-6:])
                tokens = [*last.tokens, *range(rng.randint(1, 5))][:ROOM]
                self.requests.append(engine.request(tokens, 2, cache_salt=last.cache_salt))
            case "step":
                for _ in range(rng.randint(1, 4)):
                    self.step(engine)
            case "cancel" if live := [*engine.active, *engine.waiting]:
                engine.cancel(rng.choice(live))
            case "settle":
                engine.settle()
                engine.forget()
            case "stop" if not self.stopped and not self.down:
                self.stopped = stack.stack.pids[self.service()]
                stop_child(self.stopped)
            case "cont":
                self.go_on()
            case "kill" if not self.down:
                self.go_on()
                self.down = self.service()
                stack.kill(self.down)
                if rng.random() < 0.6:
                    self.mend()
            case "start":
                self.mend()
            case "rot" if not self.down:
                corrupt_arena(stack.settings)
            case "forget" if not self.down:
                self.go_on()
                stack.forget("host-tier")

    def submit(self, engine: Engine) -> None:
        rng, start = self.rng, 100 * self.rng.randrange(4)
        self.requests.append(engine.request(
            range(start, start + rng.randint(1, 30)), rng.randint(1, 6),
            cache_salt=rng.choice([None, None, "a"]), deferred=rng.choice([0, 0, 1, 3]),
            honoured=rng.choice([None, None, 0, 3, 8]),
        ))  # fmt: skip

    def step(self, engine: Engine) -> None:
        began_s = time.monotonic()
        engine.step()
        took_s = time.monotonic() - began_s
        assert took_s < STEP_S, f"a step took {took_s:.1f} s"

    def service(self) -> str:
        return self.rng.choice(("host-tier", "host-tier", "consolidator", "disk-tier"))

    def go_on(self) -> None:
        """Let the process that stands still go on."""
        pid, self.stopped = self.stopped, 0
        if pid:
            os.kill(pid, signal.SIGCONT)

    def mend(self) -> None:
        """Have all services serve."""
        self.go_on()
        service, self.down = self.down, ""
        if service:
            self.stack.start(service)

    def end(self, engine: Engine) -> None:
        """Require that nothing is left of any request."""
        self.mend()
        engine.settle()
        engine.side.plan(None)
        assert engine.pool.free_count == engine.pool.block_count
        wait_for(engine.half.idle, "something is on offer, asked or leased")
        assert engine.keeper.promised == 0
        self.counts.update(engine.leader.counts())


def main() -> int:
    """Run programs until one fails, and say what they met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:10", help="A:B")
    arguments = parser.parse_args()
    low, _, high = arguments.seeds.partition(":")
    counts: Counter[str] = Counter()
    with live_stack(TIERS, SERVICES) as stack:
        for seed in range(int(low), int(high)):
            print(f"seed {seed}", flush=True)
            storm = Storm(stack, seed)
            storm.run()
            counts.update(storm.counts)
    print(dict(sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
