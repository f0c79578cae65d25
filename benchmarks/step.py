"""What a step of vLLM costs with our connector: vLLM's scheduler, a real host tier, no model.

`make bench-step`. Requests decode, and each fills a block every 16 steps. `step_engine.py` runs in
vLLM's environment; a connector that does nothing is the control.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from kvbm_cli.stack import Stack

from benchmarks.harness import Row, info_row, percentile, time_row
from benchmarks.step_engine import Measured, Wanted
from tests.vllm.conftest import make_model
from tests.vllm.harness import ENVIRON, ROOT, VLLM_PYTHON

RUNNING = (64, 256)
STEPS = 480
DRAFTS, DRAFT_STEPS = 2, 240
"""Draft tokens of a request: its answer is twice as long after so many steps."""
P50_US, P99_US = 50.0, 300.0
"""Goals for all our calls of a step with 256 requests."""
NOTHING: dict[str, Any] = {
    "kv_connector": "NothingConnector",
    "kv_connector_module_path": "tests.vllm.nothing",
    "kv_role": "kv_both",
}


def run() -> list[Row]:
    """Return the rows for 64 and 256 requests, for 256 of a model with windows, and for 256 with
    draft tokens."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", "full")
        rows = [row for running in RUNNING for row in asyncio.run(_rows(model, running))]
        rows += asyncio.run(_rows(model, max(RUNNING), windowed=True))
        return rows + asyncio.run(_rows(model, max(RUNNING), drafts=DRAFTS))


async def _rows(model: str, running: int, *, windowed: bool = False, drafts: int = 0) -> list[Row]:
    ours, nothing = await _both(model, running, windowed=windowed, drafts=drafts)
    goal = running == max(RUNNING)
    kind = f"{', windows' if windowed else ''}{f', {drafts} drafts' if drafts else ''}"
    about = f"{running} requests{kind}: "
    loops = {
        "a loop that holds Python's lock": (ours.holding_us, nothing.holding_us),
        "a loop that gives it up 100 times": (ours.releasing_us, nothing.releasing_us),
    }
    threads_us = sum(ours.threads_us.values()) - sum(nothing.threads_us.values())
    return [
        _call_row(f"{about}our calls a step, p50", ours.calls_us, 0.5, P50_US if goal else None),
        _call_row(f"{about}our calls a step, p99", ours.calls_us, 0.99, P99_US if goal else None),
        info_row(f"{about}the same in time of the processor, beside a connector that does nothing, "
                 "p50", percentile(ours.processor_us, 0.5),
                 reference=percentile(nothing.processor_us, 0.5), unit="µs"),
        _call_row(f"{about}the same in time of the processor, p99", ours.processor_us, 0.99),
        info_row(f"{about}our threads beside them, processor time a step", threads_us, unit="µs"),
        *(
            info_row(f"{about}{name}, beside a connector that does nothing, p50",
                     percentile(with_us, 0.5), reference=percentile(without_us, 0.5), unit="µs")
            for name, (with_us, without_us) in loops.items()
        ),
    ]  # fmt: skip


def _call_row(name: str, times_us: list[float], share: float, goal: float | None = None) -> Row:
    value = percentile(times_us, share)
    if goal is None:
        return info_row(name, value, unit="µs")
    return time_row(name, value, unit="µs", target=goal)


async def _both(
    model: str, running: int, *, windowed: bool, drafts: int
) -> tuple[Measured, Measured]:
    services = ("consolidator", "index", "host-tier")
    async with Stack.private({"cpu_cache_gb": 0.3}, services=services) as stack:
        ours = {
            "kv_connector": "KvbmConnector",
            "kv_connector_module_path": "kvbm_connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"runtime_dir": str(stack.settings.runtime_dir)},
        }
        wanted = Wanted(ours, running, DRAFT_STEPS if drafts else STEPS, windowed=windowed,
                        drafts=drafts)  # fmt: skip
        measured = await asyncio.to_thread(measure, model, wanted)
    control = msgspec.structs.replace(wanted, connector=NOTHING)
    return measured, await asyncio.to_thread(measure, model, control)


def measure(model: str, wanted: Wanted) -> Measured:
    """Run the steps in a process of vLLM's environment."""
    asked = msgspec.json.encode(wanted).decode()
    command = [str(VLLM_PYTHON), "-m", "benchmarks.step_engine", model, asked]
    ended = subprocess.run(
        command, env=os.environ | ENVIRON, cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    (line,) = (one for one in ended.stdout.splitlines() if one.startswith(b"{"))
    return msgspec.json.decode(line, type=Measured)
