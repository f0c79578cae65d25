"""The host tier's side of the peer reader: starts the process, sends requests, restarts it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from kvbm_common.access.nats_access import NatsAccess
from kvbm_common.config.secret_variables import environ_for
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nixl.library import NET_DEVICES
from kvbm_common.runtime.processes import dying_with_parent

from kvbm_host_tier.shell.peer_reader_messages import (
    Added,
    AddPeer,
    Arrived,
    ExpectPeer,
    Failed,
    FromReader,
    Opened,
    Read,
    RemovePeer,
    Settled,
    ToReader,
    frame,
    receive_frame,
)

BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses before the process is restarted; the last one repeats until it has opened."""
SETTLE_S = 5.0
"""The time that a failed read may take to settle before the process is killed."""
ENDS_MAX, ENDS_S = 3, 60.0
"""The process has a problem if it ends so many times within so many seconds."""
ANSWER_MARGIN_S = 1.0
"""Added to the deadlines that the process keeps itself, to find a process that hangs."""
CLOSE_DEADLINE_S = 1.0

log = logging.getLogger(__name__)


class PeerReaderClosed(KvbmError):
    """The peer reader process of this host tier is starting, or has just ended."""

    code = "reader_closed"


class DoorClosed(KvbmError):
    """Another host asks where it can read, and the peer reader here does not run."""

    code = "door_closed"


class ReadFailed(KvbmError):
    """A read has brought nothing; its `code` is the transfer's own."""

    def __init__(self, code: str, *, read: int) -> None:
        super().__init__(code)
        self.code = code
        self.read = read


class PeerReader:
    """The peer reader process, one at a time. Requests fail when their process ends."""

    def __init__(self, name: str, *, devices: str = "") -> None:
        """Prepare the process; `devices` are those of the network that UCX uses in it."""
        self._name = name
        # Whatever reaches its port is not asked who it is.
        self._environ = environ_for("peer-reader", os.environ)
        self._environ |= {NET_DEVICES: devices} if devices else {}
        self._wanted = asyncio.Event()
        self._path = ""
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Added | Arrived]] = {}
        self._unsettled: dict[int, asyncio.TimerHandle] = {}
        self.on_settled: Callable[[int], None] = lambda _: None
        """Called with the number of a failed read when it has settled."""
        self._ends = deque[float](maxlen=ENDS_MAX)
        """The times at which the process has ended last, on the monotonic clock."""
        self.opened: Opened | None = None
        self.life = 0
        """Number of the present process: names of peers are valid in one process only."""

    @property
    def problem(self) -> str:
        """Return why no blocks go between this host and others; empty: they do, or need not."""
        ended = sum(time.monotonic() - at_s < ENDS_S for at_s in self._ends)
        if ended < ENDS_MAX:
            return ""
        return (
            "no blocks are read from other hosts, or by them: the peer reader ends again and again "
            f"({ended} times or more in {ENDS_S:.0f} s; KVBM_PEER_DEVICES names its network)"
        )

    def want(self, path: str) -> None:
        """Start the process for this arena, and keep it running."""
        self._path = path
        self._wanted.set()

    async def run(self) -> NoReturn:
        """Keep the process alive until cancelled; one that cannot be started counts as crashed."""
        await self._wanted.wait()
        failures = 0
        while True:
            self.life += 1
            try:
                await self._live()
            except OSError as error:  # No process, memory or descriptor is left now.
                log.warning("the peer reader cannot be started: %s", error)
            finally:
                was_open, self.opened = self.opened is not None, None
                self._end_all()
            self._ends.append(time.monotonic())
            failures = 1 if was_open else failures + 1
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            log.warning("the peer reader has ended; restarting in %s s", pause_s)
            await asyncio.sleep(pause_s)

    async def _live(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvbm_host_tier.shell.peer_reader_process",
            self._path, self._name,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=self._environ,
            preexec_fn=dying_with_parent(signal.SIGKILL), start_new_session=True,
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        try:
            while (message := await receive_frame(process.stdout)) is not None:
                self._take(message)
        finally:
            await _end(process)
            self._process = None

    def _take(self, message: FromReader) -> None:
        match message:
            case Opened():
                self.opened = message
            case Added() | Arrived():
                answer = self._answers.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Failed():
                self._failed(message)
            case Settled():
                self._settle(message.id)

    def _failed(self, failed: Failed) -> None:
        if not failed.settled:
            loop = asyncio.get_running_loop()
            self._unsettled[failed.id] = loop.call_later(SETTLE_S, self.kill)
        answer = self._answers.get(failed.id)
        if answer is not None and not answer.done():
            answer.set_exception(ReadFailed(failed.code, read=failed.id))

    def _settle(self, read: int) -> None:
        timer = self._unsettled.pop(read, None)
        if timer is not None:
            timer.cancel()
            self.on_settled(read)

    def may_write(self, read: int) -> bool:
        """Return whether a failed read may still write: it has not settled yet."""
        return read in self._unsettled

    @property
    def any_may_write(self) -> bool:
        """Tell whether a failed read has not settled yet."""
        return bool(self._unsettled)

    def kill(self) -> None:
        """Kill the process: its reads write nothing once it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _end_all(self) -> None:
        """Fail all calls and settle all reads: the process that could still write has ended."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerReaderClosed("the peer reader has ended"))
        for read in list(self._unsettled):
            self._settle(read)

    # --- requests ---------------------------------------------------------------------------

    async def add_peer(self, agent: bytes, *, deadline_s: float) -> str:
        """Learn a peer; raises PeerReaderClosed, ReadFailed and TimeoutError."""
        number = next(self._ids)
        added = await self._ask(AddPeer(id=number, agent=agent), number, deadline_s)
        assert isinstance(added, Added)
        return added.name

    def remove_peer(self, name: str) -> None:
        """Forget a peer that has left."""
        if self.opened is not None:
            self._send(RemovePeer(name=name))

    def expect_peer(self) -> None:
        """Have the process stand ready for a peer that adds its agent now."""
        if self.opened is not None:
            self._send(ExpectPeer())

    async def read(
        self, peer: str, sources: list[int], offsets: list[int], *, block_bytes: int,
        deadline_ms: int, parts: int = 1,
    ) -> Arrived:  # fmt: skip
        """Read blocks into the arena; raises PeerReaderClosed and ReadFailed.

        A process that does not keep the deadline is killed, so that its end can be told.
        """
        number = next(self._ids)
        read = Read(id=number, peer=peer, sources=sources, offsets=offsets,
                    block_bytes=block_bytes, deadline_ms=max(1, deadline_ms),
                    parts=parts)  # fmt: skip
        fuse_s = deadline_ms / 1000 + ANSWER_MARGIN_S
        fuse = asyncio.get_running_loop().call_later(fuse_s, self.kill)
        try:
            arrived = await self._ask(read, number, None)
        finally:
            fuse.cancel()
        assert isinstance(arrived, Arrived)
        return arrived

    async def _ask(
        self, request: ToReader, number: int, deadline_s: float | None
    ) -> Added | Arrived:
        if self.opened is None:
            raise PeerReaderClosed("the peer reader is starting")
        answer: asyncio.Future[Added | Arrived] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(request)
            async with asyncio.timeout(deadline_s):
                return await answer
        finally:
            del self._answers[number]

    def _send(self, message: ToReader) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))


def peer_devices(settings: Settings, access: NatsAccess) -> str:
    """Return the network devices for reads between hosts; with NATS on loopback, `lo`."""
    chosen = settings.peer_devices
    return chosen or ("lo" if access.is_local else os.environ.get(NET_DEVICES, "all"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process by the end of its input, or kill it after a deadline."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        if process.returncode is None:
            process.kill()
        await process.wait()
