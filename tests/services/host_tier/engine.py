"""An engine as the host tier meets it: real memory lent over NIXL, and a scheduler half by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from kvbm_common.config.settings import Settings
from kvbm_common.identity import Namespace, SequenceHash, pack_hashes
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.local import (
    Beat,
    Confirm,
    Found,
    FromHostTier,
    Hello,
    Lookup,
    Pulled,
    Refused,
    Region,
    Release,
    ToHostTier,
    Welcome,
    from_host_tier,
    to_host_tier,
)
from kvbm_common.wire.verbs import Offer, OfferRun, offers_subject
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.answers import checksums_of
from kvbm_connectors.core.messages import Load, LoadResult

from tests.services.host_tier.helpers import NAMESPACE, incarnation, name

DEADLINE_S = 10.0
BLOCK_BYTES = 8192
DEVICE_BLOCKS = 16
T = TypeVar("T")


class RealEngine:
    """One engine with one rank. Device block b holds `memory[b]`."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: str = "ada",
        life: int = 1,
        namespace: Namespace = NAMESPACE,
    ) -> None:
        self.engine, self.incarnation, self.host = engine, incarnation(life), settings.host
        self.namespace = namespace
        rng = np.random.default_rng(life)
        self.memory = rng.integers(0, 256, (DEVICE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(settings.host_tier_endpoint)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        region = Region(address=self.memory.ctypes.data, stride=BLOCK_BYTES,
                        piece_bytes=BLOCK_BYTES, blocks=DEVICE_BLOCKS)  # fmt: skip
        self.worker = WorkerHalf(
            engine=engine,
            incarnation=self.incarnation,
            namespace=namespace,
            regions=[region],
            host_tier_endpoint=settings.host_tier_endpoint,
            on_news=self._ring,
        )
        self._ids = 0

    def _ring(self) -> None:
        self._loop.call_soon_threadsafe(self._news.set)

    # --- messages ---------------------------------------------------------------------------

    async def say(self, *frames: ToHostTier | bytes) -> None:
        """Send one message, or any frames."""
        raw = [f if isinstance(f, bytes) else to_host_tier.encode(f) for f in frames]
        await self._socket.send_multipart(raw)

    async def hear(self, kind: type[T]) -> T:
        """The host tier's next message of this kind; others are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message: FromHostTier = from_host_tier.decode(await self._socket.recv())
                if isinstance(message, kind):
                    return message

    def hello(self) -> Hello:
        """The scheduler half's introduction."""
        return Hello(engine=self.engine, incarnation=self.incarnation, role="scheduler",
                     namespace=self.namespace)  # fmt: skip

    async def attach(self) -> Welcome:
        """Introduce both halves; the welcome comes when NIXL knows the worker."""
        self.worker.start()
        return await self.greet()

    async def greet(self) -> Welcome:
        """Introduce the scheduler half."""
        await self.say(self.hello())
        return await self.hear(Welcome)

    # --- blocks -----------------------------------------------------------------------------

    def offer(self, *numbers: int) -> Offer:
        """An offer of a chain: block n is in device block n."""
        self._ids += 1
        run = OfferRun(
            parent=name(numbers[0] - 1).hex(),
            hashes=[name(number).hex() for number in numbers],
            blocks=list(numbers),
        )
        return Offer(host=self.host, engine=self.engine, incarnation=self.incarnation,
                     offer=self._ids, namespace=self.namespace.digest.hex(), deadline_ms=5_000,
                     runs=[run])  # fmt: skip

    async def publish(self, bus: Bus, offer: Offer) -> Pulled:
        """What the consolidator does with an offer; returns how it ended."""
        await bus.publish(offers_subject(self.host), msgspec.json.encode(offer))
        return await self.hear(Pulled)

    async def store(self, bus: Bus, *numbers: int) -> None:
        """The whole offload path."""
        pulled = await self.publish(bus, self.offer(*numbers))
        assert pulled.pulled == len(numbers), pulled
        await self.say(
            Confirm(engine=self.engine, incarnation=self.incarnation, offer=pulled.offer, held=True)
        )

    def lookup(self, names: Sequence[SequenceHash], *, lease_ms: int = 5_000) -> Lookup:
        """A question."""
        self._ids += 1
        return Lookup(engine=self.engine, incarnation=self.incarnation, lookup=self._ids,
                      namespace=self.namespace.digest, hashes=pack_hashes(names), lease_ms=lease_ms,
                      deadline_ms=500)  # fmt: skip

    async def look_up(self, *numbers: int, lease_ms: int = 5_000) -> Found:
        """… and its answer."""
        await self.say(self.lookup([name(number) for number in numbers], lease_ms=lease_ms))
        return await self.hear(Found)

    async def found(self, *numbers: int) -> Found:
        """Ask until all are there: a confirm is not answered."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await self.look_up(*numbers)
                if len(found.slots) == len(numbers):
                    return found
                await self.release(found)

    async def release(self, found: Found) -> None:
        """Give a lease back."""
        await self.say(Release(engine=self.engine, incarnation=self.incarnation, lease=found.lease))

    async def load(self, found: Found, *blocks: int) -> LoadResult:
        """Pull what was found into device blocks; returns the worker's result."""
        count = len(blocks)
        self.worker.start_load(
            Load("r", found.epoch, found.lease, tuple(found.slots), blocks,
                 tuple(name(i) for i in range(count)), checksums_of(found), found.block_bytes,
                 2**60)
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE_S):
            while not (ended := self.worker.drain_ended()):
                self._news.clear()
                await self._news.wait()
        return ended[0]

    async def alive(self) -> None:
        """A round trip: what was said before has been taken."""
        await self.say(Beat(engine=self.engine, incarnation=self.incarnation))
        await self.hear(object)

    async def refused(self, *frames: ToHostTier | bytes) -> Refused:
        """Say something that is refused."""
        await self.say(*frames)
        return await self.hear(Refused)

    def close(self) -> None:
        """Fall silent, as if killed."""
        self.worker.close()
        self._socket.close(linger=0)
        self._context.term()

    @classmethod
    @asynccontextmanager
    async def living(
        cls, settings: Settings, **kwargs: int | str | Namespace
    ) -> AsyncIterator[RealEngine]:
        """An attached engine."""
        engine = cls(settings, **kwargs)  # type: ignore[arg-type]
        try:
            await engine.attach()
            yield engine
        finally:
            engine.close()
