"""The probe: an engine's two halves with plain memory behind them, for measuring the paths."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import zmq
from kvbm_common.config.settings import Settings
from kvbm_common.identity import Hasher, Namespace, SequenceHash, of_tenant
from kvbm_common.wire.consolidator import Attach
from kvbm_common.wire.local import Region
from kvbm_connectors.client.scheduler import SchedulerHalf, new_incarnation
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import ConnectorLimits, Hit, LoadResult, OfferRun
from kvbm_connectors.sim.event_stream import EventStream

from benchmarks.harness import wait_for

DEADLINE_MS = 60_000


class Probe:
    """One engine in this process: `block_count` blocks of `block_bytes`."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        block_bytes: int,
        block_count: int,
        block_tokens: int = 16,
        model: str = "probe",
        deadline_ms: int = DEADLINE_MS,
        tenant: str = "",
    ) -> None:
        self._deadline_ms = deadline_ms
        self.block_bytes, self.block_count = block_bytes, block_count
        namespace = Namespace(model=model, block_tokens=block_tokens, layout=f"flat/{block_bytes}")
        self.namespace = of_tenant(namespace, tenant)
        self.hasher = Hasher(self.namespace)
        self.memory = np.empty((block_count, block_bytes // 8), dtype=np.uint64)
        self.memory[:] = np.random.default_rng(0).integers(
            0, 1 << 63, (1, block_bytes // 8), dtype=np.uint64
        )
        self._news = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = EventStream(self._context, directory=str(settings.runtime_dir), name=name)
        incarnation = new_incarnation()
        region = Region(
            address=self.memory.ctypes.data,
            stride=block_bytes,
            piece_bytes=block_bytes,
            blocks=block_count,
        )
        self.worker = WorkerHalf(
            engine=name,
            incarnation=incarnation,
            namespace=self.namespace,
            regions=[region],
            host_tier_endpoint=settings.host_tier_endpoint,
            verify_every=1,
            on_news=self._news.set,
        )
        self.scheduler = SchedulerHalf(
            engine=name,
            incarnation=incarnation,
            namespace=self.namespace,
            host_tier_endpoint=settings.host_tier_endpoint,
            consolidator_endpoint=settings.consolidator_endpoint,
            streams=[
                Attach(
                    engine=name,
                    incarnation=incarnation,
                    endpoint=self.events.endpoint,
                    replay_endpoint=self.events.replay_endpoint,
                    namespace=self.namespace,
                )
            ],
            limits=ConnectorLimits(
                lease_ms=deadline_ms,
                onboard_deadline_ms=deadline_ms,
                offer_deadline_ms=deadline_ms,
                offers_max=100_000,
            ),
            on_news=self._news.set,
        )

    def start(self) -> None:
        """Attach; returns when both services have answered."""
        self.worker.start()
        self.scheduler.start()
        wait_for(
            lambda: self.scheduler.attached and self.scheduler.streams_attached,
            deadline_s=10,
            what="attaching",
        )

    def close(self) -> None:
        """Detach."""
        self.scheduler.close()
        self.worker.close()
        self.events.close()
        self._context.term()

    def chain(self, seed: int, count: int) -> list[SequenceHash]:
        """The names of a sequence of `count` blocks; another seed, another sequence."""
        tokens = np.random.default_rng(seed).integers(
            0, 32_000, count * self.namespace.block_tokens, dtype=np.uint32
        )
        return self.hasher.chain(tokens)

    def offload(self, names: list[SequenceHash], *, per_offer: int = 64) -> int:
        """Offer device blocks 0, 1, 2… under these names; returns how many were stored."""
        self.offer(names, per_offer=per_offer)
        return self.wait_offers(-(-len(names) // per_offer))

    def offer(self, names: list[SequenceHash], *, per_offer: int = 64) -> None:
        """Offer without waiting."""
        parent = self.hasher.root
        self.worker.expect_reads(expected=True)
        for start in range(0, len(names), per_offer):
            part = names[start : start + per_offer]
            blocks = tuple((start + i) % self.block_count for i in range(len(part)))
            assert self.scheduler.offer([OfferRun(parent, tuple(part), blocks)]) is not None
            parent = part[-1]

    def wait_offers(self, count: int) -> int:
        """Wait until so many offers have ended; returns the blocks stored."""
        stored = 0
        while count:
            self._news.wait(self._deadline_ms / 1000)
            self._news.clear()
            for ended in self.scheduler.drain_ended():
                count -= 1
                stored += ended.stored
        if self.scheduler.idle():  # As engines do: else its NIXL thread polls on.
            self.worker.expect_reads(expected=False)
        return stored

    def lookup(self, request: str, names: list[SequenceHash]) -> Hit:
        """Ask and wait for the answer."""
        while (hit := self.scheduler.lookup(request, names)) is None:
            self._news.wait(self._deadline_ms / 1000)
            self._news.clear()
        return hit

    def wait_news(self) -> None:
        """Wait until something has come."""
        self._news.wait(self._deadline_ms / 1000)
        self._news.clear()

    def lookups(self, requests: Mapping[str, list[SequenceHash]]) -> list[Hit]:
        """Ask all at once and wait for all answers, in their order."""
        hits = {
            request: self.scheduler.lookup(request, names) for request, names in requests.items()
        }
        while None in hits.values():
            self._news.wait(self._deadline_ms / 1000)
            self._news.clear()
            hits |= {
                request: self.scheduler.lookup(request, requests[request])
                for request, hit in hits.items()
                if hit is None
            }
        return [hit for hit in hits.values() if hit is not None]

    def start_load(self, request: str, blocks: range) -> None:
        """Load what a lookup has found into device blocks."""
        self.worker.start_load(self.scheduler.take(request, list(blocks)))

    def wait_loads(self, count: int) -> list[LoadResult]:
        """Wait until so many loads have ended."""
        results: list[LoadResult] = []
        while len(results) < count:
            self._news.wait(self._deadline_ms / 1000)
            self._news.clear()
            for result in self.worker.drain_ended():
                self.scheduler.load_ended(result)
                results.append(result)
        return results
