"""The choice between loading and computing, each decision compared with both outcomes.

Two stacks of real tiers meet the same slow disk (the process stands still most of the time) or busy
bucket (a proxy before moto that answers late). One decides, and learns from what it has chosen
alone. The other one loads everything, and tells what a load would have taken. Computing takes what
recorded steps of a real vLLM took (`prefill_record.py`), at several speeds; the meter sees only
those that were computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import boto3
import msgspec
import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.verbs import StatsReply, verb_subject
from kvbm_connectors.core.prefill_meter import PrefillMeter, PrefillStep

from benchmarks.harness import Row, info_row, rate_row
from benchmarks.probe import Probe
from tests.services.disk_tier.s3_server import S3Server

RECORDED = Path(__file__).parent / "prefill_steps.json"
BLOCK_BYTES = 64 * 1024
BLOCK_TOKENS = 16
STEP_TOKENS = 512
LENGTHS = (2, 4, 8, 16, 32, 64)
"""Blocks of a prompt: 32 to 1,024 tokens."""
TRIALS = 20
"""Prompts of a phase: conditions last, and then change."""
LEARNT = 4
"""Decisions after a change that tell of learning, and are shown apart."""
ARRIVAL_S = 0.2
"""Between the end of a request and the next one."""
REST_TOKENS = 16
"""Of a prompt, after what is stored: computed in any case."""
CLOSE = 1.1
TARGET = 0.95


@dataclass(frozen=True, slots=True)
class Phase:
    """How a medium and an engine are for a while."""

    name: str
    engine: float
    """Speed of the engine: times that of the recorded one."""
    still_ms: float = 0.0
    """The disk tier stands still for so long, and then runs for RUN_MS."""
    late_ms: tuple[float, float] = (0.0, 0.0)
    """The bucket answers late by the exponential of a normal: median, and deviation."""
    is_near: bool = False
    """Both ways take about as long: shown apart, since no estimate can tell which is shorter."""


RUN_MS = 1.5
STILL_MS = 20.0
"""Short beside a load, so that a load meets many of both."""
DISK = (
    Phase("disk, fast", 1.0),
    Phase("disk, slow", 1.0, still_ms=STILL_MS),
    Phase("disk, slow, fast engine", 20.0, still_ms=STILL_MS),
    Phase("disk, fast, fast engine", 20.0),
    Phase("near: disk, slow, engine of 4 times", 4.0, still_ms=STILL_MS, is_near=True),
)
BUCKET = (
    Phase("bucket, idle", 1.0, late_ms=(2.0, 0.1)),
    Phase("bucket, busy", 1.0, late_ms=(60.0, 0.4)),
    Phase("bucket, busy, fast engine", 20.0, late_ms=(60.0, 0.4)),
    Phase("bucket, idle, fast engine", 20.0, late_ms=(2.0, 0.1)),
    Phase("near: bucket, idle, engine of 4 times", 4.0, late_ms=(2.0, 0.1), is_near=True),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One decision: how much was loaded, and what each way takes in ms."""

    phase: str
    number: int
    blocks: int
    loaded: int
    chosen_ms: float
    load_ms: float
    compute_ms: float
    is_near: bool

    @property
    def best_ms(self) -> float:
        """What the better way takes."""
        return min(self.load_ms, self.compute_ms)

    @property
    def is_right(self) -> bool:
        """Whether what was chosen is the better way."""
        return self.chosen_ms <= self.best_ms

    @property
    def is_close(self) -> bool:
        """Whether it is right, or within a tenth of it."""
        return self.chosen_ms <= CLOSE * self.best_ms


def run() -> list[Row]:
    """Return how many decisions were right, and what they cost beside the best and beside always
    the same."""
    trials = asyncio.run(_measure())
    rows: list[Row] = []
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.phase].append(trial)
    for phase, some in groups.items():
        rows += [
            info_row(f"{phase}: right, or within 10 %", _share(some, "is_close"), unit="of 1"),
            info_row(f"{phase}: loaded", sum(bool(one.loaded) for one in some) / len(some),
                     unit="of 1"),
            info_row(f"{phase}: time over that of the best", _over(some), unit="×"),
        ]  # fmt: skip
    near = [one for one in trials if one.is_near]
    trials = [one for one in trials if not one.is_near]
    settled = [one for one in trials if one.number >= LEARNT]
    return [
        rate_row("right, or within 10 % of the better way", _share(trials, "is_close"),
                 unit="of 1", target=TARGET),
        info_row("right, strictly", _share(trials, "is_right"), unit="of 1"),
        info_row("right or within 10 %, but the first 4 of a phase", _share(settled, "is_close"),
                 unit="of 1"),
        info_row("time over that of always the better way", _over(trials), unit="×"),
        info_row("always load, over the same", _over(trials, "load_ms"), unit="×"),
        info_row("always compute, over the same", _over(trials, "compute_ms"), unit="×"),
        info_row("decisions", len(trials), unit=""),
        info_row("where both take about as long: right, or within 10 %", _share(near, "is_close"),
                 unit="of 1"),
        info_row("where both take about as long: time over that of the better way", _over(near),
                 unit="×"),
        *rows,
    ]  # fmt: skip


def _share(trials: Sequence[Trial], what: str) -> float:
    return statistics.fmean(float(getattr(one, what)) for one in trials)


def _over(trials: Sequence[Trial], what: str = "chosen_ms") -> float:
    spent_ms = sum(float(getattr(one, what)) for one in trials)
    return spent_ms / sum(one.best_ms for one in trials)


# --- the engine ---------------------------------------------------------------------------------


class Engine:
    """An engine that computes as the recorded one did, so many times faster.

    A step takes what a line through all recorded steps says, times the error of one of them. Its
    start is paid for the tokens after a hit in any case, so that it belongs to neither way.
    """

    def __init__(self, speed: float, recorded: Sequence[Sequence[float]], seed: int) -> None:
        self._rng = random.Random(seed)
        table = np.array(recorded)
        features = np.column_stack([np.ones(len(table)), table[:, :2]])
        relative = 1 / table[:, 2]
        found, *_ = np.linalg.lstsq(features * relative[:, None], np.ones(len(table)), rcond=None)
        self._parts_us = np.maximum(found, 0.0) / speed
        self._errors = (table[:, 2] / (features @ np.maximum(found, 0.0))).tolist()
        self._meter = PrefillMeter(step_tokens_max=STEP_TOKENS)
        self._now_us = 0.0
        for _ in range(10):  # Prompts that nothing had: what every engine begins with.
            self.compute(0, self._rng.choice((64, 200, 512, 1_024)), self.error())

    def cost(self) -> PrefillCost | None:
        """Return what its connector says of it."""
        return self._meter.cost(0)

    def error(self) -> float:
        """Return how much longer than usual steps take now."""
        return float(self._rng.choice(self._errors))

    def compute(self, first: int, end: int, error: float, *, is_seen: bool = True) -> float:
        """Return the ms that the tokens from `first` to `end` take, which the meter sees or not."""
        took_us = -float(self._parts_us[0]) * error
        for start in range(first, end + REST_TOKENS, STEP_TOKENS):
            tokens = min(STEP_TOKENS, end + REST_TOKENS - start)
            pairs = tokens * (start + tokens / 2)
            us = float(self._parts_us @ np.array([1.0, tokens, pairs])) * error
            took_us += us
            if is_seen:
                self._meter.planned(PrefillStep(tokens, 0, pairs), int(self._now_us))
                self._now_us += us
                self._meter.ended(int(self._now_us))
        return max(0.001, took_us / 1000)


# --- the tiers ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Side:
    """One stack with its engine; `decides` or loads everything."""

    stack: Stack
    bus: Bus
    probe: Probe
    kind: str

    async def store(self, seeds: Sequence[int], lengths: Sequence[int]) -> None:
        """Have all sequences below, in the order of their use."""
        total = 0
        for seed, blocks in zip(seeds, lengths, strict=True):
            names = self.probe.chain(seed, blocks)
            await asyncio.to_thread(self.probe.offload, names)
            total += blocks
            async with asyncio.timeout(120):
                while await self._stored() < total:  # noqa: ASYNC110  It tells by events alone.
                    await asyncio.sleep(0.02)

    async def _stored(self) -> int:
        settings = self.stack.settings
        subject = verb_subject(self.kind, "stats", host=settings.host, instance=settings.instance)
        reply = await self.bus.request(subject, b"{}", deadline_s=30)
        slots = msgspec.json.decode(reply, type=StatsReply).slots
        return slots["inactive"] + slots["active"]

    def look_up(
        self, seed: int, blocks: int, cost: Callable[[], PrefillCost | None]
    ) -> tuple[int, float]:
        """Return how many blocks were found, and the ms until all of them were here."""
        names, request = self.probe.chain(seed, blocks), f"cmpl-{seed}"
        started = time.perf_counter()
        said = cost()
        while (hit := self.probe.scheduler.lookup(request, names, prefill=said)) is None:
            self.probe.wait_news()
        took_ms = (time.perf_counter() - started) * 1000
        self.probe.scheduler.forget(request)
        return hit.blocks, took_ms


async def _measure() -> list[Trial]:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    return await _of_disk(recorded) + await _of_bucket(recorded)


async def _of_disk(recorded: Sequence[Sequence[float]]) -> list[Trial]:
    overrides = {"disk_cache_gb": 1.0, "disable_disk_offload_filter": True}
    async with _sides("disk-tier", overrides) as sides:
        pids = [side.stack.pids["disk-tier"] for side in sides]

        @contextlib.contextmanager
        def inject(phase: Phase) -> Iterator[None]:
            with _standing_still(pids, phase.still_ms):
                yield

        return await _phases(sides, DISK, recorded, inject)


async def _of_bucket(recorded: Sequence[Sequence[float]]) -> list[Trial]:
    with tempfile.TemporaryDirectory() as directory:
        server = S3Server(free_port(), Path(directory) / "moto.log")
        server.start()
        proxy = LateProxy(server.port)
        try:
            client = boto3.client(
                "s3", endpoint_url=server.endpoint, aws_access_key_id="key",
                aws_secret_access_key="secret", region_name="us-east-1",
            )  # fmt: skip
            client.create_bucket(Bucket="kvbm-bench")
            overrides = {
                "object_enabled": True, "object_bucket": "kvbm-bench",
                "object_endpoint": f"http://127.0.0.1:{proxy.port}", "object_access_key": "key",
                "object_secret_key": "secret", "disable_object_offload_filter": True,
            }  # fmt: skip

            @contextlib.contextmanager
            def inject(phase: Phase) -> Iterator[None]:
                proxy.late_ms = phase.late_ms
                yield
                proxy.late_ms = (0.0, 0.0)

            async with _sides("object-tier", overrides) as sides:
                return await _phases(sides, BUCKET, recorded, inject)
        finally:
            proxy.close()
            server.kill()


@contextlib.asynccontextmanager
async def _sides(kind: str, overrides: Mapping[str, object]) -> AsyncIterator[list[Side]]:
    """Two stacks: the first one decides."""
    services = ("consolidator", "host-tier", kind)
    async with contextlib.AsyncExitStack() as ends:
        sides: list[Side] = []
        for number, decides in enumerate((True, False)):
            own: dict[str, object] = {"cpu_cache_gb": 0.02, "load_or_compute": decides,
                   "object_prefix": f"side-{number}"}  # fmt: skip
            stack = await ends.enter_async_context(
                Stack.private({**overrides, **own}, services=services)
            )
            bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
            ends.push_async_callback(bus.close)
            probe = Probe(stack.settings, "probe", block_bytes=BLOCK_BYTES, block_count=128)
            ends.callback(probe.close)
            await asyncio.to_thread(probe.start)
            sides.append(Side(stack, bus, probe, kind))
        yield sides


async def _phases(
    sides: Sequence[Side],
    phases: Sequence[Phase],
    recorded: Sequence[Sequence[float]],
    inject: Callable[[Phase], contextlib.AbstractContextManager[None]],
) -> list[Trial]:
    rng = random.Random(0)
    lengths = [rng.choice(LENGTHS) for _ in range(TRIALS * len(phases))]
    seeds = range(1, len(lengths) + 1)
    # Blocks stored after them take their places in the host tiers.
    after = [64] * 6
    more = range(1_000, 1_000 + len(after))
    for side in sides:
        await side.store([*seeds, *more], [*lengths, *after])
    engines = {phase.engine: Engine(phase.engine, recorded, 1) for phase in phases}
    trials: list[Trial] = []
    for at, phase in enumerate(phases):
        with inject(phase):
            for number in range(TRIALS):
                seed, blocks = seeds[at * TRIALS + number], lengths[at * TRIALS + number]
                trials.append(
                    await asyncio.to_thread(
                        _decide, sides, engines[phase.engine], phase, number, seed, blocks
                    )
                )
    return trials


def _decide(
    sides: Sequence[Side], engine: Engine, phase: Phase, number: int, seed: int, blocks: int
) -> Trial:
    deciding, loading = sides
    found, load_ms = loading.look_up(seed, blocks, lambda: None)
    assert found == blocks, f"{phase.name}: {found} of {blocks} blocks were loaded"
    loaded, took_ms = deciding.look_up(seed, blocks, engine.cost)
    tokens, error = blocks * BLOCK_TOKENS, engine.error()
    compute_ms = engine.compute(0, tokens, error, is_seen=False)
    computed_ms = 0.0
    if loaded == blocks:
        load_ms = took_ms
    else:
        computed_ms = engine.compute(loaded * BLOCK_TOKENS, tokens, error)
    chosen_ms = took_ms + computed_ms if loaded else computed_ms
    time.sleep(ARRIVAL_S)
    if os.environ.get("KVBM_BENCH_TRACE"):
        print(f"{phase.name:28} {number:3} {blocks:3} loaded {loaded:3} load {load_ms:7.1f} "
              f"compute {compute_ms:7.1f} chosen {chosen_ms:7.1f} "
              f"{'' if chosen_ms <= CLOSE * min(load_ms, compute_ms) else 'WRONG'}")  # fmt: skip
    return Trial(phase.name, number, blocks, loaded, chosen_ms, load_ms, compute_ms, phase.is_near)


# --- what is slow -------------------------------------------------------------------------------


@contextlib.contextmanager
def _standing_still(pids: Sequence[int], still_ms: float) -> Iterator[None]:
    """Have processes stand still, and run for RUN_MS, in turn."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            over.wait(still_ms / 1000)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            over.wait(RUN_MS / 1000)

    thread = threading.Thread(target=work, name="standing-still")
    if still_ms:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if still_ms:
            thread.join()


class LateProxy:
    """A TCP proxy that passes requests on late."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.late_ms = (0.0, 0.0)
        self._rng = random.Random(0)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no further connection."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, target, is_late in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=self._pass_on, args=(source, target, is_late), daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_late: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                median_ms, deviation = self.late_ms
                if is_late and median_ms:
                    time.sleep(median_ms / 1000 * self._rng.lognormvariate(0, deviation))
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
