"""A router's reader, made after vLLM's `kv_events_subscriber.py`, over kills of the consolidator.

The example takes numbers as they come, and asks only when one is larger than the next. What it asks
for comes over a DEALER here, a new one each time, for it leaves answers behind: over its own REQ
socket it can take only the first batch of an answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
import zmq
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
)

from tests.connectors.consolidator.shell.test_service import DEADLINE_S, Engine, settings_of
from tests.connectors.consolidator.test_router import short
from tests.waiting import wait_until

POLL_MS = 50
REPLAY_MS = 200


class ExampleReader(Thread):
    """The example's loop: SUB on one topic, `last_seq`, a replay where a number is passed over."""

    def __init__(self, settings: Settings, topic: str) -> None:
        super().__init__()
        self.held: set[int | bytes] = set()
        self.last_seq = -1
        self.ended = Event()
        self._settings = settings
        self._topic = topic

    def run(self) -> None:
        """Read until `ended` is set."""
        with zmq.Context() as context:
            sub = context.socket(zmq.SUB)
            sub.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            sub.connect(self._settings.router_endpoint)
            while not self.ended.is_set():
                if sub.poll(POLL_MS):
                    _, number, payload = sub.recv_multipart()
                    seq = int.from_bytes(number, "big")
                    if 0 <= self.last_seq < seq - 1:
                        with context.socket(zmq.DEALER) as replay:
                            replay.linger = 0
                            replay.connect(self._settings.router_replay_endpoint)
                            self._fill_gap(replay, seq)
                    self._process(payload)
                    self.last_seq = seq
            sub.close(linger=0)

    def _fill_gap(self, replay: zmq.Socket[bytes], seq: int) -> None:
        replay.send_multipart([b"", (self.last_seq + 1).to_bytes(8, "big")])
        while replay.poll(REPLAY_MS):
            *_, number, payload = replay.recv_multipart()
            if not payload:
                return
            replayed = int.from_bytes(number, "big")
            if replayed > self.last_seq:
                self._process(payload)
                self.last_seq = replayed
                if replayed >= seq - 1:
                    return

    def _process(self, payload: bytes) -> None:
        for event in decode_batch(payload).events:
            match event:
                case BlockStored():
                    self.held |= set(event.block_hashes)
                case BlockRemoved():
                    self.held -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.held.clear()


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return settings_of(nats_server, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_reader_made_after_the_example_survives_kills_of_the_consolidator(
    settings: Settings, tmp_path: Path
) -> None:
    """1. The reader holds what the engine holds. 2. Three times: the consolidator is killed, the
    engine drops one block and computes another, which the reader cannot hear; a new consolidator
    comes. The reader holds what the engine holds, and hears of what it computes next."""
    process = ServiceProcess(
        "consolidator",
        environ=os.environ | settings.as_environ(),
        restart=True,
        log_path=tmp_path / "log",
    )
    process.start()
    await process.wait_ready(deadline_s=DEADLINE_S)

    def restarted(before: int) -> bool:
        return process.pid not in (0, before)

    engine = Engine(settings)
    reader = ExampleReader(settings, engine.name)
    reader.start()
    device = engine.device
    try:
        engine.keep_attached()
        await wait_until(lambda: reader.last_seq >= 0)
        await engine.publish(device.store((1, 2, 3, 4), 0))
        await wait_until(lambda: reader.held == short(device.truth()))
        for life in range(3):
            before = process.pid
            os.kill(before, signal.SIGKILL)
            await engine.publish(device.evict(0), device.store((life, 5), 0))
            await wait_until(partial(restarted, before))
            await process.wait_ready(deadline_s=DEADLINE_S)
            await wait_until(lambda: reader.held == short(device.truth()))
            await engine.publish(device.store((life, 6), 0))
            await wait_until(lambda: reader.held == short(device.truth()))
    finally:
        reader.ended.set()
        await asyncio.to_thread(reader.join)
        await engine.close()
        await process.end(signal.SIGTERM, deadline_s=4.0)
