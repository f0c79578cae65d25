"""`kvbm demo`: the whole stack, sim engines, a workload, and every block compared."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from kvbm_common.config.settings import Settings
from kvbm_common.cuda.runtime import CupyRuntime
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_connectors.sim.control import EngineConfig, Finished, Submit
from kvbm_connectors.sim.driver import EngineHandle, run_turns
from kvbm_connectors.sim.workload import TRACE_BLOCK_TOKENS, Turn, conversations, trace
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvbm_cli import printing
from kvbm_cli.command_line import one_line
from kvbm_cli.demo.attached import AttachedStack
from kvbm_cli.demo.check import StackView, check_stack, wait_until
from kvbm_cli.demo.figures import figures_of
from kvbm_cli.demo.report import Report, Tally, make_report, print_report
from kvbm_cli.stack import Stack

KIB = 1024
DEVICE_BLOCKS = 512
"""64 MiB per engine with the default block: a small device, so that the tiers matter."""
TRACE_DEVICE_BLOCKS = 1024
TRACE_PREFILL_US_PER_TOKEN = 4.0
"""Prompts of traces are tens of thousands of tokens long: a large machine, so that it ends."""
CONCURRENCY_PER_ENGINE = 4
PAIRS_MAX = 24
"""Requests that are recomputed at the end, to compare their time to first token."""
CONNECT_DEADLINE_S = 5.0
SAY_S = 5.0
"""How often a run whose output is no terminal says how far it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says."""

    requests: int = 1200
    engines: int = 2
    trace: Path | None = None
    host_gb: float = 0.3
    disk_gb: float = 2.0
    block_kib: int = 128
    seed: int = 0
    tensor_parallel: int = 1
    device: str = "cpu"
    """Where the sim engines' blocks are: `cpu` or `cuda`."""
    attach: bool = False
    """Join the stack that runs here, instead of starting one."""

    def turns(self) -> Iterator[Turn]:
        """Return the workload to run."""
        if self.trace is not None:
            return trace(self.trace, requests=self.requests)
        return conversations(requests=self.requests, seed=self.seed)

    def engine_config(self, number: int, settings: Settings, *, name: str = "sim") -> EngineConfig:
        """Return the configuration of engine `number`."""
        is_trace = self.trace is not None
        return EngineConfig(
            name=f"{name}-{number}",
            directory=str(settings.runtime_dir),
            host_tier_endpoint=settings.host_tier_endpoint,
            consolidator_endpoint=settings.consolidator_endpoint,
            block_tokens=TRACE_BLOCK_TOKENS if is_trace else 16,
            block_bytes=self.block_kib * KIB,
            block_count=TRACE_DEVICE_BLOCKS if is_trace else DEVICE_BLOCKS,
            ranks=self.tensor_parallel,
            device=self.device,
            prefill_us_per_token=TRACE_PREFILL_US_PER_TOKEN if is_trace else 20.0,
            verify=settings.verify_host_reads,
            onboard_mover=settings.onboard_mover,
            lease_ms=settings.lease_ms,
            onboard_deadline_ms=settings.onboard_deadline_ms,
            offer_deadline_ms=settings.offer_deadline_ms,
        )


def demo(
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1200,
    engines: Annotated[int, typer.Option(min=1, max=16, help="How many sim engines.")] = 2,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A Mooncake-format trace to replay."),
    ] = None,
    host_gb: Annotated[
        float, typer.Option(min=0, help="Host tier; 0 with a disk: disk only.")
    ] = 0.3,
    disk_gb: Annotated[float, typer.Option(min=0, help="Disk tier; 0: none.")] = 2.0,
    block_kib: Annotated[int, typer.Option(min=4, max=16_384, help="Size of a block.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=8, help="Ranks per engine.")] = 1,
    attach: Annotated[
        bool, typer.Option("--attach", help="Use the services that run here (KVBM_* says where).")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where the engines' blocks are: cpu, or cuda on its first GPU.")
    ] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Run the whole stack with sim engines, and verify every block that comes back."""
    if block_kib * KIB % (4096 * tensor_parallel):
        text = f"must be a multiple of 4 KiB for each rank of --tensor-parallel={tensor_parallel}"
        raise typer.BadParameter(text, param_hint="--block-kib")
    for name, size_gb in (("--host-gb", host_gb), ("--disk-gb", disk_gb)):
        if not math.isfinite(size_gb):
            raise typer.BadParameter("must be a number of GB", param_hint=name)
    if host_gb == 0 and disk_gb == 0:
        raise typer.BadParameter("one tier must have a size", param_hint="--host-gb")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter("must be cpu or cuda", param_hint="--device")
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"{json.parent} is no directory", param_hint="--json")
    options = DemoOptions(
        requests=requests,
        engines=engines,
        trace=trace,
        host_gb=host_gb,
        disk_gb=disk_gb,
        block_kib=block_kib,
        seed=seed,
        tensor_parallel=tensor_parallel,
        device=device,
        attach=attach,
    )
    console = printing.console()
    try:
        if device == "cuda":
            CupyRuntime()  # Told before anything starts.
        report = asyncio.run(_run_until_ended(options, console))
    except asyncio.CancelledError:
        console.print("ended by SIGTERM")
        sys.exit(128 + signal.SIGTERM)
    except KvbmError as error:
        console.print(f"[bold red]failed[/]: {escape(one_line(str(error)))}")
        sys.exit(1)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    print_report(report, console)
    sys.exit(0 if report.passed else 1)


async def _run_until_ended(options: DemoOptions, console: Console) -> Report:
    """Run the demo; SIGTERM cancels it, and it leaves nothing behind."""
    here = asyncio.current_task()
    assert here is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, here.cancel)
    return await run_demo(options, console)


async def run_demo(options: DemoOptions, console: Console) -> Report:
    """Start everything, run the workload, check, stop."""
    options.turns()  # A trace that cannot be read is an error before anything starts.
    async with AsyncExitStack() as cleanup:
        stack = await _enter_stack(options, cleanup)
        console.print(f"the stack is up: NATS {stack.nats_url}, API on port "
                      f"{stack.settings.metrics_port}")  # fmt: skip
        try:
            report = await _run_on(stack, options, console, cleanup)
        except KvbmError:
            _keep_logs(stack, console)
            raise
        if not report.passed:
            _keep_logs(stack, console)
        return report


async def _run_on(
    stack: Stack | AttachedStack, options: DemoOptions, console: Console, cleanup: AsyncExitStack
) -> Report:
    bus = await Bus.connect(
        stack.admin, "kvbm-demo", counters=Metrics(), deadline_s=CONNECT_DEADLINE_S
    )
    cleanup.push_async_callback(bus.close)
    list_tiers = stack.tiers if isinstance(stack, AttachedStack) else None
    view = StackView(bus, stack.settings, list_tiers=list_tiers)
    before = await figures_of(view, bus, stack.settings)
    engines = await _start_engines(options, stack, cleanup)
    tally = Tally()
    started = time.perf_counter()
    await _run_workload(options, engines, tally, console)
    seconds = time.perf_counter() - started
    await _run_pairs(options, engines, tally)
    with_disk = options.disk_gb > 0 and bool(await view.instances("disk-tier"))
    verdict = await check_stack(view, engines, with_disk=with_disk)
    return make_report(
        tally,
        verdict,
        seconds=seconds,
        block_bytes=options.block_kib * KIB,
        engines=[await engine.stats() for engine in engines],
        tiers=(await figures_of(view, bus, stack.settings)).since(before),
    )


def _keep_logs(stack: Stack | AttachedStack, console: Console) -> None:
    """Have the logs of a failed run outlive it, where they are the run's own."""
    if isinstance(stack, Stack) and (kept := stack.keep_logs()) is not None:
        console.print(f"the logs of the services and engines are in {kept}")


async def _enter_stack(options: DemoOptions, cleanup: AsyncExitStack) -> Stack | AttachedStack:
    if options.attach:
        return await cleanup.enter_async_context(AttachedStack())
    overrides: dict[str, object] = {
        "cpu_cache_gb": options.host_gb,
        "disk_cache_gb": options.disk_gb,
    }
    return await cleanup.enter_async_context(Stack.private(overrides))


async def _start_engines(
    options: DemoOptions, stack: Stack | AttachedStack, cleanup: AsyncExitStack
) -> list[EngineHandle]:
    engines: list[EngineHandle] = []
    for number in range(options.engines):
        name = stack.name if isinstance(stack, AttachedStack) else "sim"
        config = options.engine_config(number, stack.settings, name=name)
        log_path = stack.log_dir / f"{config.name}.log" if stack.log_dir else None
        engine = EngineHandle(config, log_path=log_path)
        cleanup.push_async_callback(engine.stop)
        engines.append(engine)
    attached = await asyncio.gather(*(engine.start() for engine in engines))
    if not all(attached):
        raise KvbmError("an engine could not attach to the host tier and the consolidator")
    return engines


async def _run_workload(
    options: DemoOptions, engines: list[EngineHandle], tally: Tally, console: Console
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=options.requests)
        said_s = time.monotonic()

        def on_finished(_turn: Turn, finished: Finished) -> None:
            tally.add(finished)
            blocks = tally.blocks
            asked = blocks["asked"] or 1
            rates = " ".join(f"{t} {blocks[t] / asked:.0%}" for t in ("device", "host", "disk"))
            progress.update(task, advance=1, description=f"hits: {rates}")
            nonlocal said_s
            if not console.is_terminal and time.monotonic() > said_s + SAY_S:
                said_s = time.monotonic()
                done = f"{len(tally.finished)} of {options.requests} requests"
                console.print(f"{done}, hits: {rates}")

        await run_turns(
            engines,
            options.turns(),
            concurrency=CONCURRENCY_PER_ENGINE * len(engines),
            on_finished=on_finished,
        )


async def _run_pairs(options: DemoOptions, engines: list[EngineHandle], tally: Tally) -> None:
    """Repeat some requests that were onboarded, alone: once from the cache, once recomputed."""
    loaded = {f.request for f in tally.finished if f.host_blocks + f.disk_blocks > 0}
    turns = [t for number, t in enumerate(options.turns()) if f"r{number}" in loaded]
    chosen = random.Random(options.seed).sample(turns, min(PAIRS_MAX, len(turns)))
    for number, turn in enumerate(chosen):
        engine = engines[turn.conversation % len(engines)]
        prompt = turn.prompt.tobytes()
        await _wait_reset(engine)
        cached = await engine.request(Submit(request=f"cached-{number}", prompt=prompt))
        recomputed = await engine.request(
            Submit(request=f"recomputed-{number}", prompt=prompt, bypass=True)
        )
        tally.add_pair(cached, recomputed)


async def _wait_reset(engine: EngineHandle) -> None:
    """Empty the device's cache, so that what comes back comes from a tier."""
    await wait_until(engine.reset, f"{engine.config.name} is not idle")
