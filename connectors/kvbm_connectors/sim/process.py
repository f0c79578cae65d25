"""The process of a sim engine: sockets and threads around `SimEngine`.

python -m kvbm_connectors.sim.process '{"name": …}'        (an EngineConfig as JSON)
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from kvbm_common.copying.naming import NAMING
from kvbm_common.identity import Namespace, of_tenant, pack_hashes
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.consolidator import Attach

from kvbm_connectors.client.scheduler import SchedulerHalf, new_incarnation
from kvbm_connectors.core.messages import ConnectorLimits
from kvbm_connectors.sim.control import (
    Ask,
    Done,
    Dump,
    EngineConfig,
    Finished,
    Started,
    Stats,
    Submit,
    from_engine,
    to_engine,
)
from kvbm_connectors.sim.device import SimDevice
from kvbm_connectors.sim.engine import SimEngine
from kvbm_connectors.sim.event_stream import EventStream

if TYPE_CHECKING:
    from kvbm_common.cuda.runtime import Runtime

ATTACH_DEADLINE_S = 10.0
"""An engine waits no longer for its cache: then it starts without."""
POLL_MS_MAX = 100


def namespace_of(config: EngineConfig) -> Namespace:
    """Return the namespace that sim engines with the same model and blocks share, and no other
    engine."""
    namespace = Namespace(
        model=config.model,
        block_tokens=config.block_tokens,
        dtype="uint64",
        layout=f"flat/{config.block_bytes}",
        tensor_parallel=config.ranks,
    )
    return of_tenant(namespace, config.tenant)


def runtime_of(config: EngineConfig) -> Runtime | None:
    """Return the CUDA runtime, if the engine is to use it. Raises CudaUnavailable."""
    if config.device != "cuda":
        return None
    from kvbm_common.cuda.runtime import CupyRuntime  # Only where there is a GPU.

    return CupyRuntime()


class EngineProcess:
    """One engine, its control socket and its bell."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 500)
        self._control.setsockopt(zmq.SNDHWM, 0)
        self._control.setsockopt(zmq.RCVHWM, 0)
        self._control_path = f"{config.directory}/{config.name}.sock"
        self._control.bind(f"ipc://{self._control_path}")
        self._driver: bytes | None = None
        self._events = EventStream(self._context, directory=config.directory, name=config.name)
        namespace = namespace_of(config)
        incarnation = new_incarnation()
        self._device = SimDevice(
            config,
            incarnation=incarnation,
            namespace=namespace,
            on_news=self._ring,
            runtime=runtime_of(config),
        )
        self._scheduler = self._make_scheduler(namespace, incarnation) if config.connector else None
        self._engine = SimEngine(
            config,
            hasher=NAMING.hasher(namespace),
            device=self._device,
            scheduler=self._scheduler,
            events=self._events,
            finished=self._say_finished,
        )
        self._stopping = False

    def _make_scheduler(self, namespace: Namespace, incarnation: str) -> SchedulerHalf:
        config = self._config
        stream = Attach(
            engine=config.name,
            incarnation=incarnation,
            endpoint=self._events.endpoint,
            replay_endpoint=self._events.replay_endpoint,
            namespace=namespace,
        )
        return SchedulerHalf(
            engine=config.name,
            incarnation=incarnation,
            namespace=namespace,
            host_tier_endpoint=config.host_tier_endpoint,
            consolidator_endpoint=config.consolidator_endpoint,
            streams=[stream],
            world_size=config.ranks,
            limits=ConnectorLimits(
                lease_ms=config.lease_ms,
                onboard_deadline_ms=config.onboard_deadline_ms,
                offer_deadline_ms=config.offer_deadline_ms,
            ),
            on_news=self._ring,
        )

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        """Attach, then serve until told to stop."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._events.replay, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        self._device.start()
        if self._scheduler is not None:
            self._scheduler.start()
        give_up_s = time.monotonic() + ATTACH_DEADLINE_S
        announced = False
        while not self._stopping:
            self._take_control()
            self._events.answer_replays()
            self._engine.step()
            if not announced and self._driver is not None:
                announced = self._announce(give_up_s)
            ready = dict(poller.poll(min(POLL_MS_MAX, math.ceil(self._engine.wait_s() * 1000))))
            if self._bell in ready:
                os.eventfd_read(self._bell)
        self._close()

    def _announce(self, give_up_s: float) -> bool:
        scheduler = self._scheduler
        attached = scheduler is not None and scheduler.attached and scheduler.streams_attached
        if scheduler is None or attached or time.monotonic() >= give_up_s:
            self._say(Started(attached=attached))
            return True
        return False

    def _take_control(self) -> None:
        while True:
            try:
                driver, payload = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._driver = driver
            try:
                message = to_engine.decode(payload)
            except WireError as error:
                logging.warning("the driver sent nonsense: %s", error)
                continue
            match message:
                case Submit():
                    self._engine.submit(message)
                case Ask(what=what):
                    self._answer(what)

    def _answer(self, what: str) -> None:
        match what:
            case "hello":
                pass
            case "dump":
                self._say(Dump(names=pack_hashes(self._engine.pool.names())))
            case "stats":
                self._say(self._stats())
            case "reset":
                self._say(Done(ok=self._engine.reset()))
            case "stop":
                self._say(Done())
                self._stopping = True
            case _:
                self._say(Done(ok=False))

    def _stats(self) -> Stats:
        counts = self._device.counts()
        idle = self._engine.idle
        if self._scheduler is not None:
            idle = idle and self._scheduler.idle()
            counts |= self._scheduler.counts()
        return Stats(
            idle=idle,
            counts=counts,
            load_seconds=self._engine.load_seconds,
            load_bytes=self._engine.load_bytes,
        )

    def _say_finished(self, finished: Finished) -> None:
        self._say(finished)

    def _say(self, message: Started | Finished | Dump | Stats | Done) -> None:
        if self._driver is not None:
            self._control.send_multipart([self._driver, from_engine.encode(message)])

    def _close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self._device.close()
        self._events.close()
        self._control.close()
        self._context.term()
        Path(self._control_path).unlink(missing_ok=True)  # ZMQ leaves it.
        os.close(self._bell)


def main() -> None:
    """Run an engine: the entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The driver stops us; Ctrl-C is for it.
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    EngineProcess(msgspec.json.decode(sys.argv[1], type=EngineConfig)).run()


if __name__ == "__main__":
    main()
