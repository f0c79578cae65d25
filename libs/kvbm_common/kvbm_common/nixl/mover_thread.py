"""The mover: one NIXL agent in one thread of its own, which alone calls it.

    any thread                     │ the mover's thread
                                   │                        ┌─ done ─────► Transferred
    read · read_file · write_file ─┼─► waiting ─► in flight ┼─ error ────► TransferError
    register · add_peer · …       ─┼─► (done at once)       └─ deadline ─► draining ─► settled
    (each returns a Future)        │

Why our own thread: over CMA and shared memory NIXL's `transfer()` copies before it returns, POSIX
I/O moves only while a thread polls, and NIXL's own progress thread burns a core per idle agent.

Why *draining*: NIXL 1.5.1 cannot abort. After releasing the handle of a UCX read over TCP, and even
after removing its peer, all 64 MiB still arrived; releasing a POSIX handle corrupts the queue that
it shares with others. So a transfer that misses its deadline fails at once for its caller, and its
handle stays here until NIXL reports an end. Until then the error's `settled` is False: the local
memory may still be written. What settles: DONE; any error of a POSIX or GDS_MT transfer (it comes
after the last I/O), but none of GDS; a lost peer (UCX has failed the endpoint); and the end of the
agent in `close`, but for files and objects that are in flight then.

What owners of memory must know: over CMA or RDMA the owner is not asked, so a stopped process is
read like a running one. Over TCP UCX emulates READ and the owner takes part: an idle mover polls
for it. There a reader that dies in mid-READ makes UCX *abort the owner's process* ("ucp_request.inl
Fatal: unexpected error"); `close` drains first for that reason, a SIGKILL cannot.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

from kvbm_common.nixl.doorbell import Doorbell
from kvbm_common.nixl.library import POSIX_IO_COUNT_MAX, posix_defaults, probe_posix
from kvbm_common.nixl.pump import PAUSE_S, Call, Pump
from kvbm_common.nixl.spans import Registration, Spans
from kvbm_common.nixl.transfer_queue import Transfer
from kvbm_common.nixl.transfers import (
    BadPeerMetadata,
    MoverBusy,
    MoverClosed,
    MoverStatistics,
    MoverUnavailable,
    PeerLost,
    TransferError,
    TransferFailed,
    Transferred,
    TransferTimeout,
)

__all__ = [
    "BadPeerMetadata",
    "MoverBusy",
    "MoverClosed",
    "MoverStatistics",
    "MoverThread",
    "MoverUnavailable",
    "PeerLost",
    "Registration",
    "Spans",
    "TransferError",
    "TransferFailed",
    "TransferTimeout",
    "Transferred",
    "posix_defaults",
    "probe_posix",
]

T = TypeVar("T")

# Jobs accepted and not yet ended, draining ones included; above it callers get `MoverBusy`.
JOB_COUNT_MAX = 1024
# An agent starts in 0.05 to 0.5 s; a machine in trouble may take many times that.
START_TIMEOUT_S = 30.0
# Ending an agent took up to 0.22 s with an unresponsive peer.
AGENT_END_S = 1.0


class MoverThread:
    """One agent in one thread. Every method may be called from any thread.

    A future may be cancelled while its job waits; once in flight, cancelling the asyncio wrapper
    of a future leaves the transfer running to its end or its deadline.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        posix_params: Mapping[str, str] | None = None,
        object_params: Mapping[str, str] | None = None,
    ) -> None:
        """Start the thread and its agent. `posix_params` default to `posix_defaults()`;
        `object_params` say where the bucket of the back end OBJ is.

        Raises `MoverUnavailable`. The agent's name, by which peers know it, is `name` and a random
        suffix: NIXL would take a restarted process for its former self and read stale memory.
        """
        self.agent_name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._inbox: deque[Call | Transfer] = deque()
        # Guards the inbox and the two below; notified when there is work or the end.
        self._work = threading.Condition()
        self._unfinished = 0
        self._close_by: float | None = None
        self._bell: Doorbell | None = None
        self._attends_until = math.inf
        started: Future[Pump] = Future()
        given = {"POSIX": posix_params, "OBJ": object_params}
        parameters = {name: dict(value) for name, value in given.items() if value is not None}
        self._thread = threading.Thread(
            target=self._run, args=(tuple(backends), parameters, started), daemon=True
        )
        self._thread.name = f"mover-{name}"
        self._thread.start()
        try:
            self._statistics_of = started.result(START_TIMEOUT_S).statistics
        except TimeoutError:
            self._close_by = time.monotonic()  # Whenever it does start, it ends.
            raise MoverUnavailable(f"{name} did not start within {START_TIMEOUT_S} s") from None
        # A daemon thread inside NIXL while the interpreter ends would crash the process.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def register_memory(
        self, address: int, length: int, *, kind: str = "DRAM", device: int = 0
    ) -> Future[Registration]:
        """Make `length` bytes at `address` usable by this agent and, by metadata, its peers."""
        registration = Registration(kind, address, length, device)
        return self._call(lambda pump: pump.register(registration))

    def register_file(self, fd: int, length: int) -> Future[Registration]:
        """Make the first `length` bytes of an open file usable. The caller keeps `fd` open."""
        return self._call(lambda pump: pump.register(Registration("FILE", 0, length, fd)))

    def limit_files(self, *, read_bytes: int | None, written_bytes: int | None) -> Future[None]:
        """Have so many bytes in flight from files, and to files, and the rest wait here: one that
        ends makes way for the next without another thread. One transfer of each direction always
        may be in flight. None: no limit."""
        return self._call(
            lambda pump: pump.limit_files(read_bytes=read_bytes, written_bytes=written_bytes)
        )

    def deregister(self, registration: Registration) -> Future[None]:
        """Undo a registration. `MoverBusy` while an unsettled transfer uses it: NIXL would
        report such a transfer as done."""
        return self._call(lambda pump: pump.deregister(registration))

    def attend(self, seconds: float, *, if_added: bool = False) -> None:
        """Say for how long peers are expected to read from here. By default without end: an idle
        mover polls for them. What comes at other times is served, more slowly. With `if_added`,
        none is expected as long as no peer has added this agent (`add_peer`)."""
        self._attends_until = time.monotonic() + seconds
        self._call(lambda pump: pump.attend(seconds, if_added=if_added))

    def expect_peer(self) -> None:
        """Say that a peer adds this agent now: a connection takes several polls on both sides."""
        self._call(lambda pump: pump.expect_peer())

    def look_out(self, every_s: float | None) -> None:
        """Say how often an idle mover looks for peers that were not announced (`attend`); None:
        never. Without a word it does so every QUIET_POLL_S."""
        self._call(lambda pump: pump.look_out(every_s))

    @property
    def attends(self) -> bool:
        """Tell whether the thread stands ready for peers that read from here, as it does until the
        first `attend`."""
        return time.monotonic() < self._attends_until

    def metadata(self) -> Future[bytes]:
        """Return what peers need to read from here, as of now: ask after the last registration."""
        return self._call(lambda pump: pump.metadata())

    def add_peer(self, metadata: bytes) -> Future[str]:
        """Learn a peer, or its newer metadata, and begin to connect. The result is its name.
        Fails with `BadPeerMetadata`."""
        return self._call(lambda pump: pump.add_peer(metadata))

    def remove_peer(self, name: str) -> Future[None]:
        """Fail the peer's transfers with `PeerLost` and forget it. Done when they have settled;
        with a stopped peer that may be never."""
        gone: Future[None] = Future()
        call = self._call(lambda pump: pump.remove_peer(name, gone))
        call.add_done_callback(lambda call: _pass_on_failure(call, gone))
        return gone

    def read(
        self, peer: str, local: Spans, remote: Spans, *, deadline_s: float
    ) -> Future[Transferred]:
        """Pull from a peer's memory into ours (UCX READ). Spans pair by position, equal in length.

        All or nothing for the caller: on a `TransferError` any part may have been written.
        """
        return self._submit(Transfer("READ", peer, local, remote, _after(deadline_s)))

    def read_file(
        self, fd: int, memory: Spans, file_spans: Spans, *, deadline_s: float
    ) -> Future[Transferred]:
        """Read from a file into memory; a short read fails.

        With O_DIRECT, addresses, lengths and offsets are multiples of 4 KiB. At most
        `POSIX_IO_COUNT_MAX` spans.
        """
        return self._submit_file("READ", memory, file_spans.in_file(fd), _after(deadline_s))

    def write_file(
        self, fd: int, memory: Spans, file_spans: Spans, *, deadline_s: float
    ) -> Future[Transferred]:
        """Write memory to a file, by the rules of `read_file`. Nothing is synced to the medium."""
        return self._submit_file("WRITE", memory, file_spans.in_file(fd), _after(deadline_s))

    def read_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Read the beginning of an object into one span of memory.

        A shorter object fills a part of it without an error: compare a checksum.
        """
        return self._submit_object("READ", name, memory, deadline_s)

    def write_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Write one span of memory as an object, all of it or nothing."""
        return self._submit_object("WRITE", name, memory, deadline_s)

    def statistics(self) -> MoverStatistics:
        """Read without a lock: each number is right, their moment may differ by one poll."""
        return self._statistics_of()

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what is under way with `MoverClosed`, let it drain, and end the agent.

        Returns within about `timeout_s`; a second call only waits. Then every UCX transfer is
        settled. A file transfer that outlived the deadline is not: keep its memory mapped.
        """
        with self._work:
            if self._close_by is None:
                self._close_by = _after(timeout_s)
            self._notify()
        self._thread.join(timeout_s + AGENT_END_S)
        atexit.unregister(self.close)

    def _call(self, function: Callable[[Pump], T]) -> Future[T]:
        call = Call(function)
        self._enqueue(call)
        return call.future

    def _submit_file(
        self, operation: str, memory: Spans, file: Spans, deadline: float
    ) -> Future[Transferred]:
        transfer = Transfer(operation, self.agent_name, memory, file, deadline)
        if file.count > POSIX_IO_COUNT_MAX:
            transfer.future.set_exception(
                TransferFailed(f"{file.count} spans in one file transfer: {POSIX_IO_COUNT_MAX} fit")
            )
            return transfer.future
        return self._submit(transfer)

    def _submit_object(
        self, operation: str, name: str, memory: Spans, deadline_s: float
    ) -> Future[Transferred]:
        assert memory.count == 1, "an object is one span"
        nowhere = Spans.of([0], memory.bytes, kind="OBJ")
        deadline = _after(deadline_s)
        return self._submit(
            Transfer(operation, self.agent_name, memory, nowhere, deadline, name=name)
        )

    def _submit(self, transfer: Transfer) -> Future[Transferred]:
        self._enqueue(transfer)
        return transfer.future

    def _enqueue(self, job: Call | Transfer) -> None:
        with self._work:
            if self._close_by is not None:
                job.future.set_exception(MoverClosed("the mover is closed"))
            elif self._unfinished >= JOB_COUNT_MAX:
                job.future.set_exception(MoverBusy(f"{self._unfinished} jobs are under way"))
            else:
                self._unfinished += 1
                self._inbox.append(job)
                self._notify()

    def _notify(self) -> None:
        self._work.notify()
        if self._bell is not None:
            self._bell.ring()

    def _finished(self) -> None:
        with self._work:
            self._unfinished -= 1

    def _run(
        self,
        backends: tuple[str, ...],
        parameters: dict[str, dict[str, str]],
        started: Future[Pump],
    ) -> None:
        try:
            pump = Pump(self.agent_name, backends, parameters, self._finished)
        except Exception as error:  # Whatever it is, the constructor raises it to its caller.
            reason = f"no NIXL agent {self.agent_name} with {backends}: {error!r}"
            started.set_exception(MoverUnavailable(reason))
            return
        if pump.ring_fd is not None:
            self._bell = Doorbell(pump.ring_fd)
        started.set_result(pump)
        try:
            while self._close_by is None:
                completed = self._wait_for_work(pump)
                self._deliver(pump)
                if not pump.poll() and completed:
                    time.sleep(PAUSE_S)  # The I/Os of a transfer complete one by one.
        finally:  # Even a bug of ours may not leave a caller with a future that never ends.
            with self._work:
                self._close_by = self._close_by or time.monotonic()
                bell, self._bell = self._bell, None
            if bell is not None:
                bell.close()
            self._deliver(pump)
            pump.finish(self._close_by)

    def _deliver(self, pump: Pump) -> None:
        while self._inbox:
            pump.accept(self._inbox.popleft())

    def _wait_for_work(self, pump: Pump) -> bool:
        """Wait for work; return whether the kernel has completed I/Os, which only a ring tells."""
        pause_s = pump.pause_s
        if pause_s == 0.0:
            return False
        if self._bell is not None:
            idle = not self._inbox and self._close_by is None
            return idle and self._bell.wait(pause_s)
        with self._work:
            if not self._inbox and self._close_by is None:
                self._work.wait(pause_s)
        return False


def _after(seconds: float) -> float:
    return time.monotonic() + seconds


def _pass_on_failure(source: Future[None], target: Future[None]) -> None:
    error = MoverClosed("cancelled") if source.cancelled() else source.exception()
    if error is not None:
        target.set_exception(error)
