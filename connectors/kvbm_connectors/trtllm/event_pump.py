"""The event pump: pulls TensorRT-LLM's KV events, and publishes them as other engines do.

TensorRT-LLM 1.2 hands each event out once, to the first caller: in its own process, or at a path of
`trtllm-serve`. The pump pulls, translates (events.py) and publishes on `DYN_KVBM_TRTLLM_ZMQ_PORT`.
The consolidator connects there: the leader has told it the port.

    python -m kvbm_connectors.trtllm.event_pump --url http://127.0.0.1:8000 --block-tokens 32

Or beside an `LLM`: `EventPump(of_llm(llm), block_tokens=32, port=20081).start()`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import queue
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import zmq
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.logs import OncePerKind, set_up
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    EngineBatch,
    EngineEvent,
    encode_batch,
)

from kvbm_connectors.client.zmq_event_publisher import EventPublisher
from kvbm_connectors.trtllm.events import TrtllmEvents
from kvbm_connectors.trtllm.identity import endpoints_of

log = logging.getLogger(__name__)

Pulled = Sequence[Mapping[str, Any]]
PULL_S = 1.0
"""The time for which a pull may wait for the first event."""
HTTP_DEADLINE_S = 10.0
"""`trtllm-serve` waits 2 s for events."""
RETRY_S = 1.0
"""The pause after a pull that has failed."""
POLL_MS = 50
"""The time for which a batch may wait while no replay is requested."""
PULLS_MAX = 64
"""Pulls that wait to be published. Beyond this the pump does not pull. Then the engine drops its
oldest events, and the gap in their numbers shows it."""


class Llm(Protocol):
    """`LLM` (llmapi/llm.py of release 1.2)."""

    def get_kv_cache_events(self, timeout: float | None) -> Pulled: ...


def of_llm(llm: Llm) -> Callable[[], Pulled]:
    """Pull from an engine in this process."""
    return lambda: llm.get_kv_cache_events(PULL_S)


def of_server(url: str) -> Callable[[], Pulled]:
    """Pull from `trtllm-serve` (serve/openai_server.py of release 1.2: POST /kv_cache_events)."""
    address = url.rstrip("/") + "/kv_cache_events"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"not the address of a server: {url}")

    def pull() -> Pulled:
        request = urllib.request.Request(address, data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=HTTP_DEADLINE_S) as response:
            found: Pulled = json.load(response)
            return found

    return pull


class EventPump:
    """One engine's events, from a pull to a socket. Owns two threads: one pulls, one publishes."""

    def __init__(self, pull: Callable[[], Pulled], *, block_tokens: int, port: int) -> None:
        self.counts: Counter[str] = Counter()
        self._pull = pull
        self._block_tokens = block_tokens
        self._events = TrtllmEvents(block_tokens)
        self._endpoints = endpoints_of(port)
        self._pulled: queue.Queue[Pulled] = queue.Queue(PULLS_MAX)
        self._stop = threading.Event()
        self._limiter = OncePerKind(log)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads = [
            threading.Thread(target=target, name=f"kvbm-events-{name}", daemon=True)
            for name, target in (("pull", self._pull_all), ("publish", self._publish_all))
        ]
        self._publisher: EventPublisher | None = None

    def start(self) -> None:
        """Begin. Raises zmq.ZMQError when the ports are taken."""
        endpoint, replay_endpoint = self._endpoints
        self._publisher = EventPublisher(
            self._context, endpoint=endpoint, replay_endpoint=replay_endpoint
        )
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads; a pull that waits is left to its own deadline.

        The thread that publishes closes its sockets itself: no other thread may.
        """
        self._stop.set()
        publishing = self._threads[1]
        if self._publisher is not None:
            publishing.join(RETRY_S)
        if publishing.is_alive():
            log.warning("KV events are still being published: the sockets are closed after that")
        else:
            self._context.term()

    # --- the thread that pulls --------------------------------------------------------------

    def _pull_all(self) -> None:
        while not self._stop.is_set():
            try:
                pulled = self._pull()
            except Exception as error:  # Whatever the engine's API raises, the pump retries.
                self.counts["pulls_failed"] += 1
                self._limiter.warning("pull", f"no KV events: {error!r}")
                self._stop.wait(RETRY_S)
                continue
            self.counts["pulled_events"] += len(pulled)
            while pulled and not self._stop.is_set():
                try:
                    self._pulled.put(pulled, timeout=RETRY_S)
                    break
                except queue.Full:
                    self.counts["pulls_delayed"] += 1

    # --- the thread that publishes ----------------------------------------------------------

    def _publish_all(self) -> None:
        assert self._publisher is not None
        try:
            while not self._stop.is_set():
                self._publisher.replay.poll(POLL_MS)
                self._publisher.answer_replays()
                while not self._pulled.empty():
                    self._publish(self._pulled.get_nowait())
        finally:
            self._publisher.close()

    def _publish(self, pulled: Pulled) -> None:
        assert self._publisher is not None
        events = self._translated(pulled)
        if events:
            batch = EngineBatch(ts=time.time(), events=tuple(events), dp_rank=0)
            self._publisher.publish(encode_batch(batch))
            self.counts["published_events"] += len(events)

    def _translated(self, pulled: Pulled) -> list[EngineEvent]:
        try:
            events = self._events.translate(pulled)
        except (KeyError, TypeError, ValueError) as error:
            # The engine's blocks are unknown from here on: announce that all are gone.
            self.counts["pulls_malformed"] += 1
            self._limiter.warning("layout", f"KV events of another layout: {error!r}")
            self._events = TrtllmEvents(self._block_tokens)
            events = [AllBlocksCleared()]
        return events


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pump from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="event_pump")
    parser.add_argument("--url", required=True, help="where trtllm-serve listens")
    parser.add_argument("--block-tokens", type=int, required=True,
                        help="kv_cache_config.tokens_per_block")  # fmt: skip
    options = parser.parse_args(arguments)
    settings = Settings.load()
    if settings.trtllm_zmq_port is None:
        parser.error("DYN_KVBM_TRTLLM_ZMQ_PORT says where to publish, and is not set")
    if not settings.engines_open:
        parser.error(
            "every user of this machine can read the tokens of prompts at this port; "
            "KVBM_ENGINES_OPEN=true says that they may"
        )
    set_up("trtllm-events", settings.log_level)
    pump = EventPump(
        of_server(options.url), block_tokens=options.block_tokens, port=settings.trtllm_zmq_port
    )
    asyncio.run(_pump_until_signal(pump))
    return 0


async def _pump_until_signal(pump: EventPump) -> None:
    # Blocking the signals would not do: numpy's threads have begun, and would take them.
    stopping = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
    pump.start()
    await stopping.wait()
    pump.close()


if __name__ == "__main__":
    sys.exit(main())
