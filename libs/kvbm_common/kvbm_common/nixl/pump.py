"""Pump: the single-threaded half of the mover, with the agent and its transfers.

`mover_thread.py` has the theory; this module is driven by its thread only, so nothing here locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvbm_common.nixl.doorbell import only_new_ring, rings
from kvbm_common.nixl.library import (
    NIXL_ERRORS,
    add_agent,
    answer_peers,
    api,
    defaults_of,
    network_devices,
    prepare_object_plugin,
)
from kvbm_common.nixl.spans import Registration, Spans
from kvbm_common.nixl.transfer_errors import failure_of, proves_end
from kvbm_common.nixl.transfer_queue import Transfer, TransferQueue
from kvbm_common.nixl.transfers import (
    BadPeerMetadata,
    MoverBusy,
    MoverClosed,
    MoverStatistics,
    PeerLost,
    TransferError,
    TransferFailed,
    Transferred,
    TransferTimeout,
)

# GDS reports a batch that failed while others of the same transfer may still be moving.
UNPROVEN_FILE_ERRORS = {"GDS"}
# How often an idle mover lets UCX answer peers: 1.6 GB/s for a reader over TCP, 2–3 % of a core.
IDLE_POLL_S = 0.001
# The same while no peer is expected (`attend`); fifty polls a second took 0.9 % of a core.
QUIET_POLL_S = 0.25
# Time that a connection is expected to take: several polls on both sides.
CONNECT_S = 1.0
# Memory is polled tightly until nothing has ended for so long, then with a pause: no silent peer is
# worth a core. Files always with a pause, where no ring wakes us.
SPIN_S = 0.02
PAUSE_S = 0.00005
# Where the kernel wakes us this bounds the lateness of deadlines, and of a kernel that does not.
RING_PAUSE_S = 0.001
# Object stores answer in milliseconds at best, and threads of their own move the bytes.
OBJECT_PAUSE_S = 0.001

DONE = "done"
Outcome = str | Exception
"""The end of a transfer: DONE, or NIXL's error."""


@dataclass(slots=True, eq=False)
class Call:
    function: Callable[[Pump], Any]
    future: Future[Any] = field(default_factory=Future)


class Pump:
    """The agent and its transfers."""

    def __init__(
        self,
        name: str,
        backends: tuple[str, ...],
        parameters: dict[str, dict[str, str]],
        finished: Callable[[], None],
    ) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(name, config)
        only_files = tuple(backends) == ("POSIX",)
        others = rings() if only_files else set()
        for backend in backends:
            if backend == "OBJ":
                prepare_object_plugin(self._agent)
            with network_devices(backend):
                self._agent.create_backend(backend, parameters.get(backend) or defaults_of(backend))
        self.ring_fd = only_new_ring(others) if only_files else None
        """The descriptor on which the kernel signals the end of an I/O; None: polls find it."""
        self._file_errors_prove = not UNPROVEN_FILE_ERRORS & set(backends)
        self._serves = self._spins = "UCX" in backends
        self._quiet_poll_s: float | None = QUIET_POLL_S
        self._attend_until, self._connect_until = math.inf, 0.0
        self._attends_all, self._was_added = True, False
        self._busy_pause_s = OBJECT_PAUSE_S if backends == ("OBJ",) else PAUSE_S
        if self.ring_fd is not None:
            self._busy_pause_s = RING_PAUSE_S
        self._next_object = 1
        self._finished = finished
        self._queue = TransferQueue()
        self._leaving: dict[str, Future[None]] = {}
        self._unsettled: list[Future[None]] = []  # Of failed transfers whose error proves no end.
        self._last_event = self._serve_at = 0.0
        self._transfers_done = self._failures = self._timeouts = 0

    @property
    def pause_s(self) -> float | None:
        """The time to wait for a job before the next poll; None: there is nothing to poll."""
        if self._queue.in_flight_count:
            pauses = not self._spins or time.monotonic() - self._last_event > SPIN_S
            return self._busy_pause_s if pauses else 0.0
        if self._queue.posted or self._queue.waiting:
            return IDLE_POLL_S
        if not self._serves:
            return None
        attend_until = self._attend_until if self._attends_all or self._was_added else 0.0
        attentive = time.monotonic() < max(attend_until, self._connect_until)
        return IDLE_POLL_S if attentive else self._quiet_poll_s

    def accept(self, job: Call | Transfer) -> None:
        if isinstance(job, Transfer):
            job.accepted = time.monotonic()
            self._queue.waiting.append(job)
            return
        if job.future.set_running_or_notify_cancel():
            try:
                job.future.set_result(job.function(self))
            except TransferError as error:
                job.future.set_exception(error)
            except NIXL_ERRORS as error:
                job.future.set_exception(TransferFailed(str(error)))
            except Exception as error:  # The caller's mistake, so the caller's exception.
                job.future.set_exception(error)
        self._finished()

    def poll(self) -> bool:
        """Start what may start, ask NIXL about the rest, and fail what is late; return whether
        anything has ended."""
        now = time.monotonic()
        ended = [
            (one, outcome) for one in self._queue.posted if (outcome := self._ask(one)) is not None
        ]
        for transfer, _ in ended:
            self._take_out(transfer)
        # Before the end is reported: that takes as long as the listener keeps the lock.
        while (following := self._queue.pop(now)) is not None:
            self._start(following)
        for transfer, outcome in ended:
            self._land(transfer, outcome)
        for transfer in self._queue.posted:
            if transfer.settling is None and now > transfer.deadline:
                self._timeouts += 1
                self._drain(transfer, TransferTimeout, "the deadline passed in flight")
        if now >= self._serve_at:
            self._serve_at = now + IDLE_POLL_S / 2
            self._serve(now)
        return bool(ended)

    def finish(self, close_by: float) -> None:
        """Fail everything, drain until `close_by`, and end the agent."""
        while self._queue.waiting:
            self._refuse(self._queue.waiting.popleft(), MoverClosed("the mover was closed"))
        for transfer in self._queue.posted:
            if transfer.settling is None:
                self._drain(transfer, MoverClosed, "the mover was closed in mid-transfer")
        while self._queue.posted and time.monotonic() < close_by:
            self.poll()
            time.sleep(PAUSE_S)
        self._destroy()

    def register(self, registration: Registration) -> Registration:
        self._agent.register_memory([_row_of(registration)], registration.kind)
        return registration

    def deregister(self, registration: Registration) -> None:
        for transfer in self._queue.posted:
            if transfer.local.touch(registration) or transfer.remote.touch(registration):
                raise MoverBusy(f"a transfer still uses {registration}")
        descriptors = self._agent.get_reg_descs([_row_of(registration)], registration.kind)
        self._agent.deregister_memory(descriptors)

    def limit_files(self, *, read_bytes: int | None, written_bytes: int | None) -> None:
        self._queue.limit_files(read_bytes=read_bytes, written_bytes=written_bytes)

    def attend(self, seconds: float, *, if_added: bool = False) -> None:
        self._attend_until, self._attends_all = time.monotonic() + seconds, not if_added

    def look_out(self, every_s: float | None) -> None:
        self._quiet_poll_s = every_s

    def expect_peer(self) -> None:
        self._connect_until = time.monotonic() + CONNECT_S

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        name = ""
        try:
            name = add_agent(self._agent, metadata)
            # The first message opens the connection: it takes 10 to 180 ms off the first read.
            self._agent.send_notif(name, b"hello")
            self.expect_peer()
        except NIXL_ERRORS as error:
            if name:
                with contextlib.suppress(*NIXL_ERRORS):
                    self._agent.remove_remote_agent(name)
            raise BadPeerMetadata(f"{len(metadata)} bytes of peer metadata: {error}") from error
        return name

    def remove_peer(self, name: str, gone: Future[None]) -> None:
        if name in self._leaving:
            raise PeerLost(f"{name} is being removed already")
        self._leaving[name] = gone
        for transfer in [t for t in self._queue.waiting if t.peer == name]:
            self._queue.waiting.remove(transfer)
            self._refuse(transfer, PeerLost(f"{name} was removed"))
        for transfer in self._queue.posted:
            if transfer.peer == name and transfer.settling is None:
                self._drain(transfer, PeerLost, f"{name} was removed in mid-transfer")
        self._forget_if_settled(name)

    def statistics(self) -> MoverStatistics:
        return MoverStatistics(
            waiting=len(self._queue.waiting),
            in_flight=self._queue.in_flight_count,
            draining=self._queue.draining,
            transfers_done=self._transfers_done,
            failures=self._failures,
            timeouts=self._timeouts,
        )

    def _start(self, transfer: Transfer) -> None:
        if time.monotonic() > transfer.deadline:
            self._timeouts += 1
            self._refuse(transfer, TransferTimeout("the deadline passed in the queue"))
            return
        if transfer.peer in self._leaving:
            self._refuse(transfer, PeerLost(f"{transfer.peer} is being removed"))
            return
        if not transfer.future.set_running_or_notify_cancel():
            self._finished()
            return
        self._queue.note_posted(transfer)
        self._last_event = transfer.posted = time.monotonic()
        outcome: Outcome | None
        try:
            transfer.handle = self._prepare(transfer)
            outcome = DONE if self._agent.transfer(transfer.handle) == "DONE" else None
        except NIXL_ERRORS as error:
            outcome = error
        if outcome is not None:
            self._take_out(transfer)
            self._land(transfer, outcome)

    def _prepare(self, transfer: Transfer) -> Any:
        if transfer.name:
            self._register_object(transfer)
        local = self._agent.get_xfer_descs(transfer.local.rows, transfer.local.kind)
        remote = self._agent.get_xfer_descs(transfer.remote.rows, transfer.remote.kind)
        return self._agent.initialize_xfer(transfer.operation, local, remote, transfer.peer)

    def _register_object(self, transfer: Transfer) -> None:
        """Register an object, which NIXL knows by a number.

        There is one number for each transfer, never used again.
        """
        transfer.remote = Spans.of([0], transfer.local.bytes, device=self._next_object, kind="OBJ")
        self._next_object += 1
        self._agent.register_memory(_object_rows(transfer), "OBJ")

    def _ask(self, transfer: Transfer) -> Outcome | None:
        """Ask NIXL for the outcome of a transfer; None: it has not ended."""
        try:
            return DONE if self._agent.check_xfer_state(transfer.handle) == "DONE" else None
        except NIXL_ERRORS as error:
            return error

    def _take_out(self, transfer: Transfer) -> None:
        """Remove a transfer that NIXL has ended: another one has room."""
        self._queue.note_ended(transfer)
        self._last_event = transfer.ended = time.monotonic()

    def _drain(self, transfer: Transfer, kind: type[TransferError], reason: str) -> None:
        """Fail the transfer for its caller while NIXL still has it."""
        self._failures += 1
        self._queue.draining += 1
        transfer.settling = Future()
        transfer.future.set_exception(kind(reason, transfer.settling))

    def _refuse(self, transfer: Transfer, error: TransferError) -> None:
        """Fail a transfer that NIXL has not seen."""
        if transfer.future.set_running_or_notify_cancel():
            self._failures += 1
            transfer.future.set_exception(error)
        self._finished()

    def _land(self, transfer: Transfer, outcome: Outcome) -> None:
        """Tell how a transfer that is taken out has ended."""
        error = outcome if isinstance(outcome, Exception) else None
        proven = error is None or proves_end(
            self._agent, transfer, error, file_errors_prove=self._file_errors_prove
        )
        settling = transfer.settling
        if settling is not None:
            pass  # The caller has heard.
        elif error is not None:
            settling = None if proven else Future()
            self._failures += 1
            transfer.future.set_exception(failure_of(self._agent, transfer, error, settling))
        else:
            self._transfers_done += 1
            seconds = transfer.ended - transfer.posted
            transfer.future.set_result(Transferred(transfer.local.bytes, seconds))
        transfer.handle = None  # Its wrapper releases it.
        if transfer.remote.kind == "OBJ":
            with contextlib.suppress(*NIXL_ERRORS):
                rows = self._agent.get_reg_descs(_object_rows(transfer), "OBJ")
                self._agent.deregister_memory(rows)
        self._settle(settling, proven)
        self._forget_if_settled(transfer.peer)

    def _settle(self, settling: Future[None] | None, proven: bool) -> None:
        if settling is not None and not proven:
            self._unsettled.append(settling)  # It stays counted as unfinished: a bound.
            return
        if settling is not None:
            settling.set_result(None)
        self._finished()

    def _forget_if_settled(self, peer: str) -> None:
        if peer in self._leaving and all(one.peer != peer for one in self._queue.posted):
            with contextlib.suppress(*NIXL_ERRORS):
                self._agent.remove_remote_agent(peer)
            self.expect_peer()  # The end of a connection takes several polls, too.
            self._leaving.pop(peer).set_result(None)

    def _serve(self, now: float) -> None:
        """Let UCX answer peers, and expire what waits."""
        if self._serves and (came := answer_peers(self._agent)) is not False:
            self._was_added = True
            if came:
                self.expect_peer()
        for transfer in [t for t in self._queue.waiting if now > t.deadline]:
            self._queue.waiting.remove(transfer)
            self._timeouts += 1
            self._refuse(transfer, TransferTimeout("the deadline passed in the queue"))

    def _destroy(self) -> None:
        """End the agent, which settles UCX: its worker and connections are gone."""
        survivors, self._queue.posted = self._queue.posted, []
        if any(transfer.remote.kind == "OBJ" for transfer in survivors):
            _leak(self._agent, *(transfer.handle for transfer in survivors))
        for transfer in survivors:
            transfer.handle = None
        self._agent = None
        for transfer in survivors:
            if transfer.settling is not None and transfer.remote.kind not in ("FILE", "OBJ"):
                transfer.settling.set_result(None)
        for settling in (*self._unsettled, *self._leaving.values()):
            settling.set_result(None)


def _leak(*things: object) -> None:
    """Keep these things for the life of the process: they are never destroyed.

    The end of an agent whose request hangs waits for it, for up to ten seconds, and holds Python's
    lock all the time, so that not even a watchdog could run.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _object_rows(transfer: Transfer) -> list[tuple[int, int, int, str]]:
    [(_, length, number)] = transfer.remote.rows.tolist()
    return [(0, length, number, transfer.name)]


def _row_of(registration: Registration) -> tuple[int, int, int, str]:
    return (registration.address, registration.bytes, registration.device, "")
