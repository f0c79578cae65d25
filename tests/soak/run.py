"""One soak, from the start of its stack to its verdict.

    tenths   1 warm-up · 2 quiet · 3 to 8 faults · 9 recovery · 10 quiet

The second and the last tenth are compared. Growth is judged from the fourth on, and in each life of
a process from its second tenth of the run on: before that its histories fill.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
from kvbm_cli.demo.check import StackView, check_stack
from kvbm_cli.stack import NATS, Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port

from tests.soak import judge
from tests.soak.faults import Faults, plan
from tests.soak.fills import fills
from tests.soak.judge import Finding, Point, Tenth
from tests.soak.measure import Meter
from tests.soak.surroundings import Surroundings, enter
from tests.soak.traffic import Traffic

SAMPLES = 120
"""At least two seconds apart."""
SETTLE_MAX_S = 180.0
DISK_GB = 0.2
SIZES: dict[str, object] = {
    "cpu_cache_gb": 0.05,
    "disk_cache_gb": DISK_GB,
    "object_num_blocks": 3_000,
    "explain_requests": 200,
    "disable_disk_offload_filter": False,
}
"""All other settings have their defaults."""


class Report(msgspec.Struct):
    """What a soak has found."""

    seed: int
    seconds: float
    engines: int
    requests: int
    lookups: int
    mismatches: int
    findings: list[Finding]
    second: Tenth
    last: Tenth
    faults: dict[str, int]
    troubles: dict[str, int]
    wrong: list[str]
    bounds: dict[str, float]
    streams: dict[str, float]
    series: dict[str, list[Point]]
    marks: list[tuple[float, str]]

    @property
    def red(self) -> list[str]:
        """What has failed, a line each."""
        return self.wrong + [f"{one.what} grew" for one in self.findings if one.is_red]


async def soak(*, seconds: float, seed: int, logs: Path | None = None) -> Report:
    """Run a stack for so long and judge it. Its logs are kept where `logs` says, if anywhere."""
    async with AsyncExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-soak-")))
        around = enter(directory, seed, cleanup.enter_context(ExitStack()), seconds=seconds)
        token = secrets.token_hex(16)
        stack = await cleanup.enter_async_context(_stack(directory, token, around, logs))
        bus = await Bus.connect(stack.admin, "soak", counters=Metrics(), deadline_s=5)
        cleanup.push_async_callback(bus.close)
        meter = Meter(stack, bus, token, census=directory / "census")
        cleanup.push_async_callback(meter.close)
        traffic = Traffic(stack, seed)
        faults = Faults(stack, bus, traffic, seed=seed, around=around)
        run = _Run(stack, bus, meter, traffic, faults, seconds=seconds, seed=seed)
        return await run.run()


def _stack(directory: Path, token: str, around: Surroundings, logs: Path | None) -> Stack:
    log_dir = logs or directory / "logs"
    for path in (directory / "run", directory / "state", log_dir):
        path.mkdir(mode=0o700, exist_ok=True)
    overrides = SIZES | around.object_settings | {
        "host": directory.name.replace("_", "-").lower(),
        "runtime_dir": directory / "run",
        "disk_cache_dirs": directory / "disk",
        "nats_url": f"nats://127.0.0.1:{free_port()}",
        "metrics_port": free_port(),
        "admin_token": token,
    }  # fmt: skip
    return Stack(overrides, state_dir=directory / "state", log_dir=log_dir)


class _Run:
    def __init__(
        self, stack: Stack, bus: Bus, meter: Meter, traffic: Traffic, faults: Faults,
        *, seconds: float, seed: int,
    ) -> None:  # fmt: skip
        self._stack, self._bus, self._meter = stack, bus, meter
        self._traffic, self._faults = traffic, faults
        self._seconds, self._seed = seconds, seed
        self._began_s = time.monotonic()

    async def run(self) -> Report:
        """Run all tenths, let everything come to rest, and judge."""
        traffic = asyncio.create_task(self._traffic.run(), name="traffic")
        sampling = asyncio.create_task(self._sample(), name="samples")
        try:
            await self._until(0.2, traffic, sampling)
            services = tuple(self._stack.services)
            planned = plan(self._seed, services, seconds=0.6 * self._seconds)
            await self._faults.run(planned)
            await self._until(0.8, traffic, sampling)
            await self._faults.undo()
            await self._until(1.0, traffic, sampling)
        finally:
            for task in (sampling, traffic):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return self._report(self._wrong() + await self._leftovers())

    async def _until(self, part: float, *tasks: asyncio.Task[None]) -> None:
        left_s = self._began_s + part * self._seconds - time.monotonic()
        done, _ = await asyncio.wait(
            tasks, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()

    async def _sample(self) -> None:
        while True:
            await self._meter.take(self._traffic.engines, self._faults.returns)
            await asyncio.sleep(_spacing_s(self._seconds))

    async def _leftovers(self) -> list[str]:
        """Return what is left when all engines have gone: leases, slots, blocks in the index."""
        view = StackView(self._bus, self._stack.settings)
        verdict = await check_stack(view, [], with_disk=True)
        found = verdict.differences + verdict.troubles
        if verdict.leases_left or verdict.staged_left:
            found.append(f"{verdict.leases_left} leases, {verdict.staged_left} staged slots left")
        return found

    def _wrong(self) -> list[str]:
        """Return what is wrong beside growth."""
        wrong = [f"the stream {name} is above its limit" for name in self._meter.over_limit]
        wrong += [
            f"{name} took {taken / judge.MIB:.0f} MiB, declared are {bound / judge.MIB:.0f}"
            for name, (taken, bound) in self._meter.over_bound.items()
        ]
        if bad := sum(one.finished.mismatches for one in self._traffic.requests):
            wrong.append(f"{bad} blocks did not hold what they must")
        if self._traffic.engines < judge.ENGINES_MIN:
            wrong.append(f"only {self._traffic.engines} engines came: the machine is too busy")
        for name in set(self._stack.services) | {NATS}:
            if name not in self._stack.pids:
                wrong.append(f"{name} does not run")
        return wrong

    def _report(self, wrong: list[str]) -> Report:
        second, last = self._tenth(0.1, 0.2), self._tenth(0.9, 1.0)
        after_s = self._began_s + 0.3 * self._seconds
        settle_s = min(SETTLE_MAX_S, 0.2 * self._seconds)
        faults_end_s = self._began_s + 0.8 * self._seconds
        findings = judge.compare(second, last, self._seconds / 10)
        for (quantity, whose), points in sorted(self._meter.series.items()):
            bound = judge.bound_of(whose, quantity, has_bucket=self._faults.has_bucket)
            what = f"{whose}: {quantity}"
            until_s = faults_end_s if quantity in judge.BY_FAULT else None
            if bound is None or (quantity == "entries" and fills(whose)):
                continue
            found = [
                judge.judge(
                    what, bound, points, after_s=after_s, settle_s=settle_s, faults_end_s=until_s
                )
            ]
            if quantity in judge.BY_RETURN:
                faults_s = self._began_s + 0.2 * self._seconds
                found.append(judge.judge_returns(what, bound, points, after_s=faults_s))
            findings += [one for one in found if one is not None]
        findings = [one for one in findings if one.is_red or not one.what.endswith(": entries")]
        red = {one.what for one in findings if one.is_red}
        return Report(
            seed=self._seed,
            seconds=self._seconds,
            engines=self._traffic.engines,
            requests=len(self._traffic.requests),
            lookups=len(self._traffic.looks),
            mismatches=sum(one.finished.mismatches for one in self._traffic.requests),
            findings=findings,
            second=second,
            last=last,
            faults=dict(self._faults.done),
            troubles=dict(self._traffic.troubles),
            wrong=wrong,
            bounds=self._meter.bounds,
            streams={
                f"{whose}: {quantity}": points[-1].value
                for (quantity, whose), points in self._meter.series.items()
                if quantity.startswith("stream")
            },
            series={f"{whose}: {quantity}": self._since(points)
                    for (quantity, whose), points in self._meter.series.items()
                    if quantity != "entries" or f"{whose}: {quantity}" in red},
            marks=[(at_s - self._began_s, what) for at_s, what in self._faults.log],
        )  # fmt: skip

    def _since(self, points: Iterable[Point]) -> list[Point]:
        return [msgspec.structs.replace(p, at_s=p.at_s - self._began_s) for p in points]

    def _tenth(self, begin: float, end: float) -> Tenth:
        from_s, to_s = (self._began_s + part * self._seconds for part in (begin, end))
        requests = [r.finished for r in self._traffic.requests if from_s <= r.at_s < to_s]
        looks = [look for look in self._traffic.looks if from_s <= look.at_s < to_s]
        took, pings = [look.took_ms for look in looks], [look.ping_ms for look in looks]
        asked = sum(one.blocks - one.device_blocks for one in requests)
        found = sum(one.host_blocks + one.disk_blocks for one in requests)
        cpu_ms = {name: self._cpu_ms(samples, from_s, to_s)
                  for name, samples in self._meter.cpu_s.items()}  # fmt: skip
        lines = _gain(self._meter.log_lines, from_s, to_s)
        return Tenth(
            requests=len(requests),
            hit_rate=found / max(1, asked),
            lookup_p50_ms=judge.percentile(took, 50),
            lookup_p99_ms=judge.percentile(took, 99),
            ping_p50_ms=judge.percentile(pings, 50),
            ping_p99_ms=judge.percentile(pings, 99),
            cpu_ms_per_request=sum(cpu_ms.values()),
            cpu_ms_by_service=cpu_ms,
            work_us=judge.percentile([look.work_us for look in looks], 50),
            log_lines_per_hour=3600 * lines / (to_s - from_s),
        )

    def _cpu_ms(self, samples: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
        """Return a service's processor time for a request: the median pace of all pairs."""
        ends = sorted(request.at_s for request in self._traffic.requests)
        within = [(bisect(ends, at_s), cpu_s) for at_s, cpu_s in samples if from_s <= at_s < to_s]
        return 1000 * judge.pace(within)


def _spacing_s(seconds: float) -> float:
    return max(2.0, seconds / SAMPLES)


def _gain(samples: Iterable[tuple[float, float]], from_s: float, to_s: float) -> float:
    """Return by how much a sum has grown between two times, made longer to the whole of them."""
    within = [(at_s, value) for at_s, value in samples if from_s <= at_s < to_s]
    if len(within) < 2:
        return 0.0
    (first_s, first), (last_s, last) = within[0], within[-1]
    return (last - first) * (to_s - from_s) / (last_s - first_s)
