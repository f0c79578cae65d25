"""The whole way of an event at speed: an engine's ZMQ socket, consolidator, JetStream, index."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockStored,
    EngineBatch,
    encode_batch,
)
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.verbs import StatsReply, verb_subject
from kvbm_connectors.sim.event_stream import engine_hash

from benchmarks.harness import Row, info_row, percentile, processor_s, rate_row, time_row
from benchmarks.probe import Probe

STEADY_PER_S = 200_000
"""Blocks a second while the way of single events is timed."""
FLOOD_PER_S = 500_000
"""Blocks a second that the consolidator, NATS and the index are to take on two cores."""
BLOCKS, ROUNDS = 1_000_000, 3
"""Of each round; before the next one the engine says that it has none any more."""
CHAIN_BLOCKS = 400
EVENT_BLOCKS = (4, 16)
SINGLES, SINGLES_PER_S = 120_000, 30_000
"""Events of one block, and how many come a second: half of what the consolidator takes."""
SAMPLE_EVENTS = 500
"""One event of so many is looked for in the index until it is there."""
AHEAD_S = 0.002
"""Events are sent so far ahead of time, and then waited for: a timer for each would cost more than
sending it."""
ASK_EVERY_S = 0.01
DEADLINE_S = 120.0

Sent = tuple[bytes, int, SequenceHash]
"""An event's bytes, its number of blocks, and the first block of its chain."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One flood of blocks."""

    sent: int
    held: int
    """What the index has of them in the end."""
    sent_s: float
    whole_s: float
    """Until it has all of them."""
    p99_s: float
    """From the socket to an answer."""


def run() -> list[Row]:
    """As fast as the target says, for some seconds, several times."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    services = ("consolidator", "index", "host-tier")
    async with Stack.private({"cpu_cache_gb": 0.1}, services=services) as stack:
        bus = await Bus.connect(stack.admin, "bench", deadline_s=5)
        probe = Probe(stack.settings, "probe", block_bytes=4096, block_count=1)
        try:
            await asyncio.to_thread(probe.start)
            host = stack.settings.host
            singles = list(_events(probe, SINGLES, blocks=(1, 1), seed=1 << 20))
            rows = await _measure_singles(bus, probe, singles, stack)
            rounds: dict[int, list[_Round]] = {STEADY_PER_S: [], FLOOD_PER_S: []}
            for number in range(ROUNDS):
                events = list(_events(probe, BLOCKS, seed=number * BLOCKS))
                for per_s, measured in rounds.items():
                    await _clear(bus, probe, host)
                    measured.append(await _measure(bus, probe, events, host, per_s))
            return rows + _rows(rounds[STEADY_PER_S], rounds[FLOOD_PER_S])
        finally:
            probe.close()
            await bus.close()


def _events(
    probe: Probe, count: int, *, blocks: tuple[int, int] = EVENT_BLOCKS, seed: int = 0
) -> Iterator[Sent]:
    rng, size = random.Random(5), probe.namespace.block_tokens
    for number in range(seed, seed + count // CHAIN_BLOCKS):
        tokens = np.random.default_rng(number).integers(0, 32_000, CHAIN_BLOCKS * size).tolist()
        names = probe.hasher.chain(tokens)
        at = 0
        while at < len(names):
            run = names[at : at + rng.randint(*blocks)]
            event = BlockStored(
                block_hashes=tuple(map(engine_hash, run)),
                parent=engine_hash(names[at - 1]) if at else None,
                token_ids=tuple(tokens[at * size : (at + len(run)) * size]),
                block_size=size, medium="GPU",
            )  # fmt: skip
            yield encode_batch(EngineBatch(ts=0.0, events=(event,), dp_rank=0)), len(run), names[0]
            at += len(run)


async def _measure_singles(bus: Bus, probe: Probe, events: list[Sent], stack: Stack) -> list[Row]:
    """Events of one block at a steady rate: what each of two processes pays for all of them."""
    kinds = ("consolidator", "index")
    before = {kind: processor_s(stack.pids[kind]) for kind in kinds}
    begun_s = time.perf_counter()
    for number, (payload, _, _) in enumerate(events):
        pause_s = begun_s + number / SINGLES_PER_S - time.perf_counter()
        if pause_s > AHEAD_S or number % 64 == 0:
            await asyncio.sleep(max(0.0, pause_s))
        probe.events.publish(payload)
    held = await _settled(bus, stack.settings.host, len(events))
    assert held == len(events), (held, len(events))
    spent = {kind: processor_s(stack.pids[kind]) - before[kind] for kind in kinds}
    what = f"{SINGLES_PER_S:,} events of 1 block a second from an engine's socket: what the"
    return [
        info_row(f"{what} {kind} pays", seconds / len(events) * 1e6, unit="µs/block")
        for kind, seconds in spent.items()
    ]


async def flood(bus: Bus, probe: Probe, host: str, count: int) -> int:
    """Have the engine say so many blocks at a steady rate; return how many the index has of them.

    All of them must arrive.
    """
    one = await _measure(bus, probe, list(_events(probe, count)), host, STEADY_PER_S)
    assert one.held == one.sent, (one.held, one.sent)
    return one.held


async def _clear(bus: Bus, probe: Probe, host: str) -> None:
    batch = EngineBatch(ts=0.0, events=(AllBlocksCleared(),), dp_rank=0)
    probe.events.publish(encode_batch(batch))
    held = await _settled(bus, host, 0)
    assert held == 0, held


async def _measure(bus: Bus, probe: Probe, events: list[Sent], host: str, per_s: int) -> _Round:
    delays: list[float] = []
    samples: asyncio.Queue[tuple[SequenceHash, float] | None] = asyncio.Queue()
    watching = asyncio.create_task(_watch(bus, samples, delays))
    begun_s, sent, chain, taken = time.perf_counter(), 0, SequenceHash(b""), 0
    for number, (payload, blocks, first) in enumerate(events):
        pause_s = begun_s + sent / per_s - time.perf_counter()
        if pause_s > AHEAD_S or number % 64 == 0:
            await asyncio.sleep(max(0.0, pause_s))
        probe.events.publish(payload)
        sent += blocks
        if first != chain and taken * SAMPLE_EVENTS < number:
            samples.put_nowait((first, time.perf_counter()))
            taken += 1
        chain = first
    sent_s = time.perf_counter() - begun_s
    samples.put_nowait(None)
    await asyncio.wait_for(watching, DEADLINE_S)
    held = await _settled(bus, host, sent)
    whole_s = time.perf_counter() - begun_s
    return _Round(sent, held, sent_s, whole_s, percentile(delays, 0.99))


def _rows(steady: list[_Round], floods: list[_Round]) -> list[Row]:
    what = "engine's socket → index, 4 to 16 blocks per event"
    return [
        rate_row(what, median(one.sent / one.whole_s for one in floods) / 1e6,
                 unit="M blocks/s", target=FLOOD_PER_S / 1e6),
        info_row("the same, as it was sent", median(one.sent / one.sent_s for one in floods) / 1e6,
                 unit="M blocks/s"),
        rate_row(f"{what}, {STEADY_PER_S:,} blocks a second",
                 median(one.sent / one.whole_s for one in steady) / 1e6,
                 unit="M blocks/s", target=0.95 * STEADY_PER_S / 1e6),
        time_row("blocks that were lost on the way",
                 sum(one.sent - one.held for one in steady + floods), unit="blocks", target=0),
        time_row(f"from the socket to an answer, p99, {STEADY_PER_S:,} blocks a second",
                 median(one.p99_s for one in steady) * 1e3, unit="ms", target=200.0),
    ]  # fmt: skip


async def _watch(
    bus: Bus, samples: asyncio.Queue[tuple[SequenceHash, float] | None], delays: list[float]
) -> None:
    """One sample after the other, as they were sent: the more is on its way, the more are not asked
    for at once. Who asks for all of them makes the lag that he measures."""
    while (sample := await samples.get()) is not None:
        name, begun_s = sample
        request = msgspec.json.encode(MatchRequest(hashes=[name.hex()]))
        while not await _is_known(bus, request):  # noqa: ASYNC110 - nobody announces it.
            await asyncio.sleep(ASK_EVERY_S)
        delays.append(time.perf_counter() - begun_s)


async def _is_known(bus: Bus, request: bytes) -> bool:
    reply = await bus.request(verb_subject("index", "match"), request, deadline_s=DEADLINE_S)
    return bool(msgspec.json.decode(reply, type=MatchReply).matches)


async def _settled(bus: Bus, host: str, blocks: int) -> int:
    """How many the index has when it has all, or when none has come for a second."""
    subject = verb_subject("index", "stats", host=host, instance="0")
    held, since_s = -1, time.perf_counter()
    while held != blocks and time.perf_counter() - since_s < 1.0:
        try:
            reply = await bus.request(subject, b"", deadline_s=5)
        except KvbmError:
            continue
        now = int(msgspec.json.decode(reply, type=StatsReply).figures["blocks"])
        if now != held:
            held, since_s = now, time.perf_counter()
        await asyncio.sleep(0.02)
    return held
