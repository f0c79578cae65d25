"""The bytes of objects that are files: read and written by threads, with deadlines.

It has the calls of NIXL's mover that the object tier's mover makes. Plain reads and writes, since a
block is a file of its own: NIXL wants each registered before and deregistered after, which takes
longer than the transfer, and its memory aligned as O_DIRECT wants. A file server that hangs may
still write into memory: the thread that waits for it keeps its lane until the read has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from kvbm_common.nixl.spans import Registration, Spans
from kvbm_common.nixl.transfers import TransferFailed, Transferred, TransferTimeout

from kvbm_disk_tier.objects.core.paths import path_of
from kvbm_disk_tier.objects.shell.directory import MARK
from kvbm_disk_tier.objects.shell.folders import UNFINISHED
from kvbm_disk_tier.shell.allocation import write_at


class _Move:
    """One read or write, on its way to a thread and back."""

    def __init__(self, run: Callable[[], int]) -> None:
        self.run = run
        self.outcome: Future[Transferred] = Future()
        self.settling: Future[None] = Future()
        self.is_begun = False
        self.is_late = False


class FileTransport:
    """Threads between memory and the files of one directory, for one event loop."""

    def __init__(self, root: Path, threads: int) -> None:
        """Start the threads: daemons, since one that hangs must not hold up the process's end."""
        self._root = root
        self._waiting: queue.SimpleQueue[_Move | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"files {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def register_memory(self, address: int, length: int) -> Future[Registration]:
        """Return what NIXL would; threads need none."""
        done: Future[Registration] = Future()
        done.set_result(Registration("DRAM", address, length, 0))
        return done

    def read_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Read a file into one span of memory; a shorter file fills a part of it."""
        view, path = _view(memory), self._root / path_of(name)
        return self._begin(_Move(lambda: _read(path, view)), deadline_s)

    def write_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Write one span of memory as a file, all of it or nothing."""
        view, path = _view(memory), self._root / path_of(name)
        mark = self._root / name.split("/", 1)[0] / MARK
        return self._begin(_Move(lambda: _write(path, view, mark)), deadline_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Let the threads end, as far as they do."""
        for _ in self._threads:
            self._waiting.put(None)
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _begin(self, move: _Move, deadline_s: float) -> Future[Transferred]:
        loop = asyncio.get_running_loop()
        late = loop.call_later(deadline_s, self._expire, move)

        def forget(_outcome: Future[Transferred]) -> None:
            """Keep no move until its deadline that has ended before."""
            with contextlib.suppress(RuntimeError):  # The event loop may have ended.
                loop.call_soon_threadsafe(late.cancel)

        move.outcome.add_done_callback(forget)
        self._waiting.put(move)
        return move.outcome

    def _expire(self, move: _Move) -> None:
        """Fail a move that is late; if a thread is at it, its memory is not free yet."""
        with self._lock:
            if move.outcome.done():
                return
            move.is_late = True
            settling = move.settling if move.is_begun else None
            move.outcome.set_exception(TransferTimeout("the file system is late", settling))

    def _work(self) -> None:
        while (move := self._waiting.get()) is not None:
            with self._lock:
                if move.is_late or not move.outcome.set_running_or_notify_cancel():
                    continue
                move.is_begun = True
            self._carry_out(move)

    def _carry_out(self, move: _Move) -> None:
        started_s = time.monotonic()
        moved, error = 0, ""
        try:
            moved = move.run()
        except OSError as failure:
            error = str(failure)
        with self._lock:
            move.settling.set_result(None)
            if move.is_late:
                return
            if error:
                move.outcome.set_exception(TransferFailed(error))
            else:
                move.outcome.set_result(Transferred(moved, time.monotonic() - started_s))


def _view(memory: Spans) -> memoryview:
    """Return the bytes of one span."""
    assert memory.count == 1, "an object is one span"
    address, length, _ = (int(number) for number in memory.rows[0])
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _read(path: Path, view: memoryview) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe holds up nothing.
    try:
        done = 0
        while done < len(view) and (count := os.preadv(fd, [view[done:]], done)):
            done += count
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # It is in host memory now.
        return done
    finally:
        os.close(fd)


def _write(path: Path, view: memoryview, mark: Path) -> int:
    """Write a file beside its place and rename it; what is left after a failure goes.

    It is not synchronised: a block is verified when it is read, and its size when it is listed.
    """
    unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        fd = _create(unfinished, mark)
        try:
            write_at(fd, view, 0)
        finally:
            os.close(fd)  # NFS sends what is left, and says here what went wrong.
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return len(view)


def _create(path: Path, mark: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        if not mark.exists():  # Folders are not made where no file system is mounted.
            raise
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)
