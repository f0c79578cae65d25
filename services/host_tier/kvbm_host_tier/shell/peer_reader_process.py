"""The peer reader: the process through which host tiers of other hosts read this arena.

It maps the arena, lends it to peers over NIXL, and reads theirs. It is a process of its own, since
UCX emulates READ over TCP: a reader that dies during a READ makes UCX *abort the owner's process*
(see kvbm_common.nixl.mover_thread). So a host that dies does not end the host tiers of others. And
a read that hangs writes nothing any more when this process has ended, whatever NIXL thinks of it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import BinaryIO

import numpy as np
from kvbm_common.copying.block_sums import sums_at
from kvbm_common.errors import KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.spans import Spans
from kvbm_common.tier.parts import grid_of

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
    read_frame,
)

CALL_DEADLINE_S = 10.0
"""Deadline of a call, as in the puller."""
CLOSE_S = 0.5
"""For what is in flight when the host tier ends."""


class PeerReaderProcess:
    """One agent over one arena. Checksums are taken in a thread of their own."""

    def __init__(self, arena: Arena, mover: MoverThread, out: BinaryIO) -> None:
        self._arena, self._mover, self._out = arena, mover, out
        self._writing = threading.Lock()
        self._summer = ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def open(self) -> None:
        """Lend the arena, and say where it is. The agent rests until the first peer has added it:
        most hosts are never read from."""
        self._mover.attend(math.inf, if_added=True)
        self._mover.register_memory(self._arena.address, self._arena.bytes).result(CALL_DEADLINE_S)
        agent = self._mover.metadata().result(CALL_DEADLINE_S)
        self._say(Opened(agent=agent, address=self._arena.address))

    def take(self, message: ToReader) -> None:
        """Carry out one request."""
        match message:
            case AddPeer():
                added = self._mover.add_peer(message.agent)
                added.add_done_callback(partial(self._added, message.id))
            case RemovePeer():
                self._mover.remove_peer(message.name)
            case ExpectPeer():
                self._mover.expect_peer()
            case Read():
                self._read(message)

    def _added(self, number: int, added: Future[str]) -> None:
        error = added.exception()
        if error is None:
            self._say(Added(id=number, name=added.result()))
        else:
            self._say(Failed(id=number, code=_code_of(error), settled=True))

    def _read(self, read: Read) -> None:
        offsets = np.asarray(read.offsets, dtype=np.uint64)
        assert int(offsets.max()) + read.block_bytes <= self._arena.bytes, "after the arena's end"
        moving = self._mover.read(
            read.peer,
            Spans.of(offsets + np.uint64(self._arena.address), read.block_bytes),
            Spans.of(read.sources, read.block_bytes),
            deadline_s=read.deadline_ms / 1000,
        )
        # Out of the mover's thread: other transfers would wait for these checksums.
        moving.add_done_callback(lambda moved: self._summer.submit(self._ended, read, moved))

    def _ended(self, read: Read, moved: Future[Transferred]) -> None:
        error = moved.exception()
        if error is None:
            starts = [self._arena.address + offset for offset in read.offsets]
            grid = grid_of(read.parts)
            assert grid is not None, "the host tier has looked at it"
            sums = sums_at(starts, read.block_bytes, grid)
            self._say(Arrived(id=read.id, sums=sums, seconds=moved.result().seconds))
            return
        settling = error.settling if isinstance(error, TransferError) else None
        settled = settling is None or settling.done()
        self._say(Failed(id=read.id, code=_code_of(error), settled=settled))
        if settling is not None and not settled:
            settling.add_done_callback(lambda _: self._say(Settled(id=read.id)))

    def _say(self, message: FromReader) -> None:
        with self._writing:
            self._out.write(frame(message))
            self._out.flush()


def _code_of(error: BaseException) -> str:
    return error.code if isinstance(error, KvbmError) else "mistake"


def main() -> None:
    """Serve until the host tier closes the pipe, or dies."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What libraries print must not get between frames.
    path, name = sys.argv[1:]
    with Arena.attach(path) as arena:
        mover = MoverThread(name)
        reader = PeerReaderProcess(arena, mover, out)
        try:
            reader.open()
            while (message := read_frame(sys.stdin.buffer)) is not None:
                reader.take(message)
        finally:
            mover.close(CLOSE_S)


if __name__ == "__main__":
    main()
