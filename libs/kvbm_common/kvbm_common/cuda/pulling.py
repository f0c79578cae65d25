"""Pulling: the host tier's way to blocks on a GPU of this host, by CUDA IPC into the arena."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvbm_common.cuda.copies import Copies, OutsideWindows, Window, through
from kvbm_common.cuda.lending import DeviceMemory
from kvbm_common.cuda.measure import choose, describe, measure
from kvbm_common.cuda.mover import CLOSE_DEADLINE_S, DeviceMover
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import CudaError, CupyRuntime, Runtime
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfers import PeerLost, TransferError, TransferFailed, Transferred

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Device:
    runtime: Runtime
    mover: DeviceMover


@dataclass(slots=True)
class _Peer:
    device: _Device
    windows: list[Window] = field(default_factory=list)
    reads: int = 0
    """Reads whose last byte may not have landed."""
    leaving: bool = False


class DevicePuller:
    """Opens the memory of workers and reads it into one range of host memory, the arena."""

    def __init__(
        self,
        address: int,
        length: int,
        *,
        runtime_at: Callable[[str], Runtime] | None = None,
    ) -> None:
        self._address, self._bytes = address, length
        self._runtime_at = runtime_at or CupyRuntime.at
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._devices: dict[str, _Device] = {}
        self._peers: dict[str, _Peer] = {}
        self._pinning: Pinning | None = None

    def attach(self, name: str, memory: DeviceMemory) -> None:
        """Open a worker's memory. May take a second. Raises CudaError, CudaUnavailable."""
        if not memory.allocations:
            raise CudaError("the worker has no handles of CUDA IPC")
        device = self._device(memory.bus_id)
        device.runtime.use()
        peer = _Peer(device)
        try:
            for allocation in memory.allocations:
                ours = device.runtime.open(allocation)
                peer.windows.append(Window(allocation.address, allocation.size, ours))
        except CudaError:
            _close(peer)
            raise
        with self._lock:
            self._peers[name] = peer

    def knows(self, name: str) -> bool:
        """Return whether this worker's memory is open."""
        return name in self._peers

    def read(
        self, name: str, target: Spans, source: Spans, *, deadline_s: float
    ) -> Future[Transferred]:
        """Read from the worker's addresses into ours, as `MoverThread.read` does."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                return _failed(PeerLost(f"{name} was removed"))
            peer.reads += 1
        try:
            ours = through(peer.windows, source.rows[:, 0], source.rows[:, 1])
        except OutsideWindows as error:
            self._landed(peer)
            return _failed(TransferFailed(str(error)))
        copies = Copies.of(target.rows[:, 0], ours, target.rows[:, 1])
        moving = peer.device.mover.move(copies, deadline_s=deadline_s)
        moving.add_done_callback(lambda done: self._ended(peer, done))
        return moving

    def detach(self, name: str) -> None:
        """Forget a worker. Its memory is closed when the last read has landed."""
        with self._lock:
            peer = self._peers.pop(name, None)
            if peer is None:
                return
            peer.leaving = True
            is_idle = peer.reads == 0
        if is_idle:
            _close(peer)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> Future[None]:
        """End the movers, and give the arena's pages back. A copy may outlive this call: keep the
        arena until the future ends."""
        movers = [device.mover.close(timeout_s) for device in self._devices.values()]
        for name in list(self._peers):
            self.detach(name)
        over: Future[None] = Future()
        self._release(movers, over)
        return over

    def _release(self, movers: list[Future[None]], over: Future[None]) -> None:
        """Unpin the arena when all movers are over, in the thread of the last one."""
        if movers:
            movers[0].add_done_callback(lambda _: self._release(movers[1:], over))
            return
        if self._pinning is not None:
            self._pinning.close()
        over.set_result(None)

    def _device(self, bus_id: str) -> _Device:
        """Return the device, with a mover of its own. The first one pins the arena for all."""
        with self._opening:  # Several ranks come at once.
            if bus_id not in self._devices:
                self._devices[bus_id] = self._make_device(bus_id)
            return self._devices[bus_id]

    def _make_device(self, bus_id: str) -> _Device:
        runtime = self._runtime_at(bus_id)
        rates = measure(runtime)
        log.info("copies of GPU %s: %s", bus_id, describe(rates))
        if self._pinning is None:
            self._pinning = Pinning(runtime, self._address, self._bytes)
            self._pinning.start()
        mover = DeviceMover(
            runtime, name=bus_id, urgent=False, pinning=self._pinning, host_side=0,
            kernel_below=choose(rates, "d2h"),
        )  # fmt: skip
        return _Device(runtime, mover)

    def _ended(self, peer: _Peer, done: Future[Transferred]) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, TransferError) and error.settling is not None:
            error.settling.add_done_callback(lambda _: self._landed(peer))
        else:
            self._landed(peer)

    def _landed(self, peer: _Peer) -> None:
        with self._lock:
            peer.reads -= 1
            is_over = peer.leaving and peer.reads == 0
        if is_over:
            _close(peer)


def _close(peer: _Peer) -> None:
    for window in peer.windows:
        try:
            peer.device.runtime.use()
            peer.device.runtime.close(window.ours)
        except CudaError as error:
            log.warning("a worker's memory could not be closed: %s", error)


def _failed(error: TransferError) -> Future[Transferred]:
    failed: Future[Transferred] = Future()
    failed.set_exception(error)
    return failed
