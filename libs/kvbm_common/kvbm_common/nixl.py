"""NIXL, the mover of bytes: one agent in one thread, transfers with deadlines, errors with types.

The only module that imports nixl. What it guards against was met by somebody (NIXL 1.5.1):

- An agent is not thread-safe, and its calls can block for milliseconds: it lives in a thread of its
  own, and everybody else hands it jobs and gets futures.
- NIXL's progress thread burns a core per idle agent: it is off, and our thread makes progress,
  tightly while something flies and now and then while nothing does (a peer's connection needs it).
- A transfer may never end: every one has our own deadline.
- Memory that is deregistered in mid-transfer ends in "done" without an error: registrations are
  jobs like transfers, and `close` waits for what flies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# Debian's ibverbs-providers brings a second libnl that crashes every UCX process at its exit.
os.environ.setdefault("UCX_MODULES", "^ib")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvbm_common.errors import KvbmError

JOBS_MAX = 4096
"""Jobs that wait for the thread; more means that somebody does not bound his transfers."""
IDLE_POLL_S = 0.002
"""How often an idle agent makes progress: a peer's first transfer waits for it once."""
CALL_DEADLINE_S = 10.0
"""Registrations and metadata: milliseconds, unless the thread is inside a long transfer call."""
CLOSE_DEADLINE_S = 2.0

T = TypeVar("T")
Rows = npt.NDArray[np.uint64]


class TransferError(KvbmError):
    """A transfer did not succeed.

    Unless `settled`, its bytes may still arrive: the destination must not be used for anything
    else until the source is gone.
    """

    code = "transfer_failed"

    def __init__(self, message: str, *, settled: bool = True) -> None:
        super().__init__(message)
        self.settled = settled


class TransferTimeout(TransferError):
    """The deadline has passed."""

    code = "transfer_timeout"


class PeerLost(TransferError):
    """The other side has died, or was never there."""

    code = "peer_lost"


class MoverBusy(KvbmError):
    """Too many jobs wait for the agent."""

    code = "mover_busy"


class MoverClosed(TransferError):
    """The agent was closed."""

    code = "mover_closed"


@dataclass(frozen=True, slots=True)
class Spans:
    """Where bytes are: rows of (address, length, 0), for a file (offset, length, 0)."""

    rows: Rows

    @classmethod
    def of(cls, addresses: npt.ArrayLike, length: int) -> Spans:
        """Spans of one length."""
        starts = np.asarray(addresses, dtype=np.uint64).reshape(-1)
        rows = np.zeros((len(starts), 3), dtype=np.uint64)
        rows[:, 0] = starts
        rows[:, 1] = length
        return cls(rows)

    @classmethod
    def of_pieces(cls, pieces: Sequence[tuple[Rows, int]]) -> Spans:
        """Spans of several groups, each with one length."""
        return cls(np.concatenate([cls.of(starts, length).rows for starts, length in pieces]))

    @property
    def bytes(self) -> int:
        """The sum of all lengths."""
        return int(self.rows[:, 1].sum())


@dataclass(frozen=True, slots=True)
class Moved:
    """A finished transfer."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MoverStatistics:
    """What an agent has done."""

    in_flight: int
    transfers: int
    bytes: int
    failures: int


@dataclass(slots=True)
class _Flight:
    handle: Any
    future: Future[Moved]
    started_s: float
    deadline_s: float
    size: int


@dataclass(slots=True)
class _Call:
    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class _Transfer:
    start: Callable[[], Any]
    deadline_s: float
    size: int
    future: Future[Moved] = field(default_factory=Future)


class MoverThread:
    """One NIXL agent in its own daemon thread. Every method may be called from any thread."""

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        posix_params: Mapping[str, str] | None = None,
    ) -> None:
        """Make the agent; takes about half a second with UCX."""
        self.name = name
        self._jobs: queue.Queue[_Call | _Transfer | None] = queue.Queue(JOBS_MAX)
        self._flights: list[_Flight] = []
        self._files: dict[int, Any] = {}
        self._memories: dict[tuple[int, int], Any] = {}
        self._transfers = self._moved = self._failures = 0
        self._closed = False
        self._is_file = "POSIX" in backends
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(tuple(backends), posix_params), name=f"nixl {name}", daemon=True
        )
        self._thread.start()
        self._ready.result(CALL_DEADLINE_S * 3)

    # --- registrations and peers ------------------------------------------------------------

    def register_memory(self, address: int, length: int) -> None:
        """Make memory known, so that transfers may use it."""

        def register() -> None:
            rows = [(address, length, 0, "")]
            self._memories[address, length] = self._agent.register_memory(rows, "DRAM")

        self._call(register)

    def deregister_memory(self, address: int, length: int) -> None:
        """Forget memory. No transfer may be using it."""
        self._call(lambda: self._agent.deregister_memory(self._memories.pop((address, length))))

    def register_file(self, fd: int, length: int) -> None:
        """Make an open file known."""

        def register() -> None:
            self._files[fd] = self._agent.register_memory([(0, length, fd, "")], "FILE")

        self._call(register)

    def deregister_file(self, fd: int) -> None:
        """Forget a file. No transfer may be using it."""
        self._call(lambda: self._agent.deregister_memory(self._files.pop(fd)))

    def metadata(self) -> bytes:
        """What a peer needs to read our registered memory."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    def add_peer(self, metadata: bytes) -> str:
        """Learn where a peer's memory is; returns the name it has here."""

        def add() -> str:
            name = self._agent.add_remote_agent(metadata)
            return str(name.decode() if isinstance(name, bytes) else name)

        return self._call(add)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer's memory."""
        self._call(lambda: self._agent.remove_remote_agent(peer))

    # --- transfers --------------------------------------------------------------------------

    def read(self, peer: str, local: Spans, remote: Spans, *, deadline_s: float) -> Future[Moved]:
        """Pull: copy the peer's spans into ours, row by row."""
        return self._transfer("READ", local, remote, "DRAM", peer, deadline_s)

    def read_file(self, fd: int, memory: Spans, file: Spans, *, deadline_s: float) -> Future[Moved]:
        """Copy spans of a file into memory."""
        return self._transfer("READ", memory, _of_file(file, fd), "FILE", self.name, deadline_s)

    def write_file(
        self, fd: int, memory: Spans, file: Spans, *, deadline_s: float
    ) -> Future[Moved]:
        """Copy memory into spans of a file."""
        return self._transfer("WRITE", memory, _of_file(file, fd), "FILE", self.name, deadline_s)

    def statistics(self) -> MoverStatistics:
        """What has been done so far."""
        return MoverStatistics(len(self._flights), self._transfers, self._moved, self._failures)

    def close(self) -> None:
        """Let what flies land, for a short while, and end the thread."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join(CLOSE_DEADLINE_S + 1.0)

    def _transfer(
        self, verb: str, local: Spans, remote: Spans, kind: str, peer: str, deadline_s: float
    ) -> Future[Moved]:
        assert len(local.rows) == len(remote.rows) > 0

        def start() -> Any:
            agent = self._agent
            return agent.initialize_xfer(
                verb,
                agent.get_xfer_descs(local.rows, "DRAM"),
                agent.get_xfer_descs(remote.rows, kind),
                peer,
                b"",
            )

        job = _Transfer(start, time.monotonic() + deadline_s, local.bytes)
        self._put(job)
        return job.future

    def _call(self, call: Callable[[], T]) -> T:
        job = _Call(call)
        self._put(job)
        result: T = job.future.result(CALL_DEADLINE_S)
        return result

    def _put(self, job: _Call | _Transfer) -> None:
        if self._closed:
            raise MoverClosed(f"{self.name} is closed")
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise MoverBusy(f"{JOBS_MAX} jobs wait for {self.name}") from None

    # --- the thread -------------------------------------------------------------------------

    def _run(self, backends: tuple[str, ...], posix_params: Mapping[str, str] | None) -> None:
        try:
            self._agent = self._make_agent(backends, posix_params)
        except Exception as error:
            self._ready.set_exception(TransferError(f"no NIXL agent: {error}"))
            return
        self._ready.set_result(None)
        while self._take_jobs():
            self._poll()
        self._land()

    def _make_agent(self, backends: tuple[str, ...], posix_params: Mapping[str, str] | None) -> Any:
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = nixl_agent(self.name, config)
        for backend in backends:
            if backend != "POSIX":
                agent.create_backend(backend, {})
                continue
            wanted = [dict(posix_params)] if posix_params else [{"use_uring": "true"}, {}]
            for number, parameters in enumerate(wanted):
                try:
                    agent.create_backend("POSIX", parameters)
                    break
                except Exception:  # io_uring is forbidden, in a container for example: AIO.
                    if number == len(wanted) - 1:
                        raise
        return agent

    def _take_jobs(self) -> bool:
        """Start everything that waits; sleeps only while nothing flies. False: close."""
        try:
            job = (
                self._jobs.get(timeout=None if self._flights else IDLE_POLL_S)
                if not self._flights
                else self._jobs.get_nowait()
            )
            while True:
                if job is None:
                    return False
                self._start(job)
                job = self._jobs.get_nowait()
        except queue.Empty:
            return True

    def _start(self, job: _Call | _Transfer) -> None:
        if isinstance(job, _Call):
            try:
                job.future.set_result(job.call())
            except Exception as error:
                job.future.set_exception(_typed(error))
            return
        try:
            handle = job.start()
            started_s = time.monotonic()
            state = self._agent.transfer(handle)
        except Exception as error:
            self._failures += 1
            job.future.set_exception(_typed(error))
            return
        flight = _Flight(handle, job.future, started_s, job.deadline_s, job.size)
        if state == "PROC":
            self._flights.append(flight)
        else:
            self._end(flight, state)

    def _poll(self) -> None:
        if not self._flights:
            if not self._is_file:
                self._agent.get_new_notifs()
            return
        now_s = time.monotonic()
        flying: list[_Flight] = []
        for flight in self._flights:
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except Exception as error:
                self._fail(flight, _typed(error))
                continue
            if state != "PROC":
                self._end(flight, state)
            elif now_s >= flight.deadline_s:
                self._give_up(flight)
            else:
                flying.append(flight)
        self._flights = flying

    def _end(self, flight: _Flight, state: str) -> None:
        if state != "DONE":
            self._fail(flight, TransferError(f"NIXL says {state}"))
            return
        self._agent.release_xfer_handle(flight.handle)
        self._transfers += 1
        self._moved += flight.size
        flight.future.set_result(Moved(flight.size, time.monotonic() - flight.started_s))

    def _give_up(self, flight: _Flight) -> None:
        """NIXL may go on with a transfer that it was told to release: it is not settled."""
        text = "the transfer did not end by its deadline"
        self._fail(flight, TransferTimeout(text, settled=False))

    def _fail(self, flight: _Flight, error: TransferError) -> None:
        self._failures += 1
        try:
            self._agent.release_xfer_handle(flight.handle)
        except Exception:
            error.settled = error.settled and not isinstance(error, TransferTimeout)
        flight.future.set_exception(error)

    def _land(self) -> None:
        give_up_s = time.monotonic() + CLOSE_DEADLINE_S
        while self._flights and time.monotonic() < give_up_s:
            self._poll()
        for flight in self._flights:
            self._fail(flight, MoverClosed(f"{self.name} is closed", settled=False))
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.set_exception(MoverClosed(f"{self.name} is closed"))


def _of_file(spans: Spans, fd: int) -> Spans:
    rows = spans.rows.copy()
    rows[:, 2] = fd
    return Spans(rows)


def _typed(error: Exception) -> TransferError:
    name = type(error).__name__
    if "Disconnect" in name or "NotFound" in name:
        return PeerLost(f"{name}: {error}")
    return TransferError(f"{name}: {error}")
