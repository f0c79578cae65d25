"""`kvbm demo`: the whole stack, sim engines, a workload, and every block compared."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
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
from kvbm_connectors.sim.driver import STOP_DEADLINE_S as ENGINE_STOP_DEADLINE_S
from kvbm_connectors.sim.driver import EngineHandle, run_turns, stop_all
from kvbm_connectors.sim.workload import TRACE_BLOCK_TOKENS, Turn, conversations, trace

from kvbm_cli.command_line import one_line, require_writable
from kvbm_cli.demo.attached import AttachedStack
from kvbm_cli.demo.check import (
    StackView,
    check_stack,
    tier_kinds,
    wait_moved,
    wait_opened,
    wait_until,
)
from kvbm_cli.demo.figures import figures_of, misses_of_engines, misses_of_tiers
from kvbm_cli.demo.pairs import PAIRS_MAX, compare
from kvbm_cli.demo.printed import print_report
from kvbm_cli.demo.progress import Progress
from kvbm_cli.demo.report import Counted, Report, Tally, make_report
from kvbm_cli.stack import STOP_DEADLINE_S, Stack

KIB = 1024
DEVICE_BLOCKS = 512
"""64 MiB per engine with the default block: a small device, so that the tiers matter."""
TRACE_DEVICE_BLOCKS = 1024
TRACE_PREFILL_US_PER_TOKEN = 4.0
"""Prompts of traces are tens of thousands of tokens long: a large machine, so that it ends."""
CONCURRENCY_PER_ENGINE = 4
CONNECT_DEADLINE_S = 5.0
BROKEN_OFF_DEADLINE_S = 0.7
"""A run that a signal ends is over within 3 s: an engine's answer, its end, that of services and
NATS. What has not ended by then is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line."""

    requests: int = 1200
    engines: int = 2
    trace: Path | None = None
    host_gb: float = 0.3
    disk_gb: float = 2.0
    block_kib: int = 128
    seed: int = 0
    tensor_parallel: int = 1
    device: str = "cpu"
    """The memory of the sim engines' blocks: `cpu` or `cuda`."""
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
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many requests.")] = 1200,
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0,
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
        if 0 < size_gb * 1e9 < block_kib * KIB:
            text = f"blocks of {block_kib * KIB} bytes do not fit into {size_gb * 1e9:.0f} bytes"
            raise typer.BadParameter(text, param_hint=name)
    if host_gb == 0 and disk_gb == 0:
        raise typer.BadParameter("one tier must have a size", param_hint="--host-gb")
    if trace is not None and not trace.is_file():  # A pipe is empty after the first time.
        text = f"'{trace}' is no regular file, and is read more than once"
        raise typer.BadParameter(text, param_hint="--trace")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter("must be cpu or cuda", param_hint="--device")
    if json is not None:
        require_writable(json, option="--json")
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
    try:
        if device == "cuda":
            CupyRuntime()  # Told before anything starts.
        report = asyncio.run(_run_until_ended(options))
    except asyncio.CancelledError as ended:
        number = signal.Signals(int(str(ended)))
        print(f"ended by {number.name}")
        sys.exit(128 + number)
    except KvbmError as error:
        print(one_line(f"failed: {error}"))
        sys.exit(1)
    print_report(report)
    if json is not None:
        _write(json, report)
    sys.exit(0 if report.passed else 1)


def _write(json: Path, report: Report) -> None:
    """Write the figures, or end with the reason why not."""
    try:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        print(one_line(f"failed: the figures cannot be written: {error}"))
        sys.exit(1)


async def _run_until_ended(options: DemoOptions) -> Report:
    """Run the demo; a signal cancels it, says which it was, and leaves nothing behind."""
    here = asyncio.current_task()
    assert here is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, here.cancel, str(int(number)))
    return await run_demo(options)


async def run_demo(options: DemoOptions) -> Report:
    """Start everything, run the workload, check, stop."""
    # A trace that cannot be read, or has nothing, is an error before anything starts.
    if next(iter(options.turns()), None) is None:
        raise KvbmError(f"{options.trace} has no request")
    async with AsyncExitStack() as cleanup:
        stack = await _enter_stack(options, cleanup)
        _say(f"the stack is up: NATS {stack.nats_url}, API on port {stack.settings.metrics_port}")
        try:
            report = await _run_on(stack, options, cleanup)
        except KvbmError:
            _keep_logs(stack)
            raise
        if not report.passed:
            _keep_logs(stack)
        return report


async def _run_on(
    stack: Stack | AttachedStack, options: DemoOptions, cleanup: AsyncExitStack
) -> Report:
    bus = await Bus.connect(
        stack.admin, "kvbm-demo", counters=Metrics(), deadline_s=CONNECT_DEADLINE_S
    )
    cleanup.push_async_callback(bus.close)
    list_tiers = stack.tiers if isinstance(stack, AttachedStack) else None
    view = StackView(bus, stack.settings, list_tiers=list_tiers)
    with_disk = options.disk_gb > 0 and bool(await view.instances("disk-tier"))
    kinds = tier_kinds(with_disk=with_disk)
    before = await figures_of(view)
    engines = await _start_engines(options, stack, cleanup)
    for trouble in await wait_opened(view, kinds):
        _say(f"not ready: {trouble}")
    tally = Tally()
    started_s = time.perf_counter()
    await _run_workload(options, engines, tally)
    seconds = time.perf_counter() - started_s
    has_moved = await wait_moved(view, engines, kinds)
    counted = Counted(
        seconds=seconds,
        has_moved=has_moved,
        moved_seconds=time.perf_counter() - started_s,
        engines=[await engine.stats() for engine in engines],
        tiers=(await figures_of(view)).since(before),
        is_shared=view.is_shared,
    )
    await _run_pairs(options, engines, tally)
    verdict = await check_stack(view, engines, with_disk=with_disk)
    if view.is_shared:
        misses = await misses_of_engines(view, [engine.config.name for engine in engines])
    else:
        misses = misses_of_tiers((await figures_of(view)).since(before))
    return make_report(
        tally, verdict, counted=counted, misses=misses, block_bytes=options.block_kib * KIB
    )


def _say(text: str) -> None:
    """Print a line at once, whatever is in it."""
    print(one_line(text), flush=True)


def _keep_logs(stack: Stack | AttachedStack) -> None:
    """Have the logs of a failed run outlive it, where they are the run's own."""
    if isinstance(stack, Stack) and (kept := stack.keep_logs()) is not None:
        _say(f"the logs of the services and engines are in {kept}")


async def _enter_stack(options: DemoOptions, cleanup: AsyncExitStack) -> Stack | AttachedStack:
    if options.attach:
        return await cleanup.enter_async_context(AttachedStack(say=_say))
    overrides: dict[str, object] = {
        "cpu_cache_gb": options.host_gb,
        "disk_cache_gb": options.disk_gb,
    }
    stack = Stack.private(overrides)
    at_end(cleanup, stack.close, deadline_s=STOP_DEADLINE_S)
    try:
        await stack.open()
    except KvbmError:
        _keep_logs(stack)
        raise
    return stack


def at_end(
    cleanup: AsyncExitStack, stop: Callable[..., Awaitable[None]], *, deadline_s: float
) -> None:
    """Stop something at the end, with a deadline that is short when a signal ends the run."""

    async def end(kind: type[BaseException] | None, *_: object) -> None:
        is_broken_off = kind is not None and issubclass(kind, asyncio.CancelledError)
        await stop(deadline_s=BROKEN_OFF_DEADLINE_S if is_broken_off else deadline_s)

    cleanup.push_async_exit(end)


async def _start_engines(
    options: DemoOptions, stack: Stack | AttachedStack, cleanup: AsyncExitStack
) -> list[EngineHandle]:
    engines: list[EngineHandle] = []
    stop = functools.partial(stop_all, engines)
    at_end(cleanup, stop, deadline_s=ENGINE_STOP_DEADLINE_S)
    for number in range(options.engines):
        name = stack.name if isinstance(stack, AttachedStack) else "sim"
        config = options.engine_config(number, stack.settings, name=name)
        log_path = stack.log_dir / f"{config.name}.log" if stack.log_dir else None
        engine = EngineHandle(config, log_path=log_path)
        engines.append(engine)
    attached = await asyncio.gather(*(engine.start() for engine in engines))
    if not all(attached):
        raise KvbmError("an engine could not attach to the host tier and the consolidator")
    return engines


async def _run_workload(options: DemoOptions, engines: list[EngineHandle], tally: Tally) -> None:
    with Progress("requests", options.requests) as progress:

        def on_finished(_turn: Turn, finished: Finished) -> None:
            tally.add(finished)
            blocks = tally.blocks
            asked = blocks["asked"] or 1
            rates = " ".join(f"{t} {blocks[t] / asked:.0%}" for t in ("device", "host", "disk"))
            progress.advance(f"hits: {rates}")

        await run_turns(
            engines,
            options.turns(),
            concurrency=CONCURRENCY_PER_ENGINE * len(engines),
            on_finished=on_finished,
        )


async def _run_pairs(options: DemoOptions, engines: list[EngineHandle], tally: Tally) -> None:
    """Repeat requests that were onboarded, alone, in pairs, until their comparison is clear."""
    loaded = {f.request for f in tally.finished if f.host_blocks + f.disk_blocks > 0}
    turns: list[Turn] = []
    for number, turn in enumerate(options.turns()):
        if f"r{number}" in loaded:
            turns.append(turn)
        await asyncio.sleep(0)  # A signal does not wait for a hundred thousand turns.
    random.Random(options.seed).shuffle(turns)
    with Progress("pairs", PAIRS_MAX) as progress:
        for number, turn in zip(range(PAIRS_MAX), itertools.cycle(turns), strict=False):
            if (found := compare(tally.pairs)) is not None and found.is_narrow:
                return
            engine = engines[turn.conversation % len(engines)]
            tally.add_pair(*await _pair(engine, turn, number))
            progress.advance("once with the cache, once recomputed")


async def _pair(engine: EngineHandle, turn: Turn, number: int) -> tuple[Finished, Finished]:
    """Run a request with the cache and recomputed; which one is first alternates."""
    await _wait_reset(engine)
    prompt = turn.prompt.tobytes()
    cached = Submit(request=f"cached-{number}", prompt=prompt)
    recomputed = Submit(request=f"recomputed-{number}", prompt=prompt, bypass=True)
    if number % 2:
        second = await engine.request(recomputed)
        return await engine.request(cached), second
    return await engine.request(cached), await engine.request(recomputed)


async def _wait_reset(engine: EngineHandle) -> None:
    """Empty the device's cache, so that what comes back comes from a tier."""
    await wait_until(engine.reset, f"{engine.config.name} is not idle")
