"""Pulls: a rank reads the blocks of a load out of the arena, and verifies them while it copies.

A pull that ends after its lease has failed, however good the bytes look. A block that did not
arrive intact is zeroed before the engine learns of it: unverified bytes do not stay in device
memory.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from kvbm_common.checksum import SUM_BYTES
from kvbm_common.copying import clear
from kvbm_common.copying.rank_pieces import BlockCopy, RankPieces, slot_starts
from kvbm_common.errors import KvbmError
from kvbm_common.nixl.layout import chunks_of
from kvbm_common.nixl.mover_thread import TransferError, TransferTimeout
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.tier.parts import Share
from kvbm_common.wire.local import Region

from kvbm_connectors.client.arena_access import Attached
from kvbm_connectors.client.arena_reader import Brought
from kvbm_connectors.core.messages import Load, LoadResult

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pulling:
    """A load on its way; only the verifier's thread writes to it."""

    load: Load
    verified: bool
    intact: list[bool]
    chunks_left: int
    corrupt: set[int] = field(default_factory=set)
    reason: str = ""
    begun: float = math.inf
    ended: float = -math.inf
    """The first and the last moment in which bytes moved."""


class Pulls:
    """All loads of one rank that are on their way. `on_end` takes each result, once."""

    def __init__(
        self,
        regions: Sequence[Region],
        *,
        name: str,
        share: Share,
        verify_every: int,
        counts: Counter[str],
        on_end: Callable[[LoadResult], None],
        gpu: Gpu | None,
    ) -> None:
        """Verify one load in `verify_every`, 0: none."""
        assert verify_every >= 0
        self.pieces = RankPieces(regions, share)
        self._gpu = gpu
        self._sum_on_gpu = gpu.sums(self.pieces) if gpu is not None and verify_every else None
        self._verify_every = verify_every
        self._loads = itertools.count()
        self._counts, self._on_end = counts, on_end
        self._limiter = OncePerKind(log)
        self._late = threading.Lock()
        """Guards what is left of loads that land after `close`, each in a thread of its own."""
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix=f"verify-{name}")

    def close(self) -> None:
        """End the verifier's thread; the reader's futures have ended."""
        self._verifier.shutdown(wait=True)

    def begin(self, load: Load, attached: Attached, left_s: float) -> None:
        """Read chunk by chunk, each copied and summed up by one of the reader's threads."""
        reader = attached.reader
        every = self._verify_every
        verified = every > 0 and next(self._loads) % every == every - 1
        chunks = chunks_of(len(load.blocks), self.pieces.bytes, reader.chunk_bytes)
        pulling = _Pulling(load, verified, [False] * len(load.blocks), chunks_left=len(chunks))
        for chunk in chunks:
            starts = slot_starts(
                load.slots[chunk],
                arena_address=attached.welcome.arena_address,
                slot_bytes=attached.welcome.slot_bytes,
            )
            copy = BlockCopy(self.pieces, load.blocks[chunk], starts)
            future = reader.read(copy, deadline_s=left_s, summed=verified)
            future.add_done_callback(partial(self._hand_over, pulling, chunk))

    def _hand_over(self, pulling: _Pulling, chunk: slice, future: Future[Brought]) -> None:
        """Leave the reader's thread, for which other copies wait.

        A read that may still write into our blocks has not ended: it is handed over when it has.
        """
        error = future.exception()
        if isinstance(error, TransferError) and error.settling is not None:
            error.settling.add_done_callback(lambda _: self._submit(pulling, chunk, future))
        else:
            self._submit(pulling, chunk, future)

    def _submit(self, pulling: _Pulling, chunk: slice, future: Future[Brought]) -> None:
        try:
            self._verifier.submit(self._chunk_ended, pulling, chunk, future)
        except RuntimeError:
            self._landed_late(pulling)

    def _landed_late(self, pulling: _Pulling) -> None:
        """Take a chunk that has landed after `close`, when the memory is no longer ours to clear.
        The engine waits for the end of its load all the same."""
        with self._late:
            pulling.chunks_left -= 1
            is_last = pulling.chunks_left == 0
        if is_last:
            load = pulling.load
            self._on_end(LoadResult(load, (False,) * len(load.blocks), (), "closed"))

    def _chunk_ended(self, pulling: _Pulling, chunk: slice, future: Future[Brought]) -> None:
        """Take a chunk, in the verifier's one thread: a load's chunks end one after the other."""
        try:
            self._take_chunk(pulling, chunk, future.result())
        except KvbmError as error:
            pulling.reason = error.code
        except Exception as error:  # The engine waits for the end of this load, whatever it is.
            log.exception("load of %s: a chunk could not be taken", pulling.load.request)
            pulling.reason = type(error).__name__
        pulling.chunks_left -= 1
        if pulling.chunks_left == 0:
            self._end(self._result(pulling))

    def _end(self, result: LoadResult) -> None:
        """Clear what did not arrive intact, and report the load when no zero can come any more: the
        engine may compute these blocks as soon as it hears."""
        blocks = zip(result.load.blocks, result.intact, strict=True)
        late = self._clear([block for block, ok in blocks if not ok])
        if late is None:
            self._on_end(result)
        else:
            late.add_done_callback(lambda _: self._on_end(result))

    def _take_chunk(self, pulling: _Pulling, chunk: slice, brought: Brought) -> None:
        pulling.begun = min(pulling.begun, brought.begun)
        pulling.ended = max(pulling.ended, brought.begun + brought.seconds)
        wrong = self._wrong(pulling, chunk, brought) if pulling.verified else set()
        for index in range(chunk.start, chunk.stop):
            pulling.intact[index] = index not in wrong

    def _wrong(self, pulling: _Pulling, chunk: slice, brought: Brought) -> set[int]:
        """Return the indices of blocks whose bytes are not those that were stored."""
        sums, load = brought.sums, pulling.load
        if sums is None:
            assert self._sum_on_gpu is not None, "only a GPU sums up by itself"
            sums = self._sum_on_gpu(load.blocks[chunk])
        share, packed = self.pieces.share, load.checksums[chunk]
        ours = np.array(sums, dtype="<u8").reshape(len(packed), len(share.parts))
        self._counts["verified_blocks"] += len(ours)
        known = np.array([len(one) == SUM_BYTES * share.grid.count for one in packed])
        theirs = np.frombuffer(b"".join(compress(packed, known)), dtype="<u8")
        theirs = theirs.reshape(-1, share.grid.count)[:, list(share.parts)]
        same = known.copy()
        same[known] = (ours[known] == theirs).all(axis=1)
        if not known.all():
            pulling.reason = "no_checksum"
        pulling.corrupt.update((chunk.start + np.flatnonzero(known & ~same)).tolist())
        return set((chunk.start + np.flatnonzero(~same)).tolist())

    def _result(self, pulling: _Pulling) -> LoadResult:
        load, intact = pulling.load, pulling.intact
        reason = pulling.reason or ("corrupt" if pulling.corrupt else "")
        if _now_ms() >= load.deadline_ms:  # The slots may have been another block's by then.
            intact, reason = [False] * len(intact), "lease_ended"
            pulling.corrupt.clear()
        self._counts["bytes.h2d"] += sum(intact) * self.pieces.bytes
        seconds = max(0.0, pulling.ended - pulling.begun)
        return LoadResult(load, tuple(intact), tuple(sorted(pulling.corrupt)), reason, seconds)

    def _clear(self, blocks: Sequence[int]) -> Future[None] | None:
        """Zero what no late byte can reach any more. The future, if there is one, ends when the
        zeros are there, late."""
        if not blocks:
            return None
        self._counts["cleared_blocks"] += len(blocks)
        try:
            places = self.pieces.coarse.on_device(blocks)
            if self._gpu is None:
                clear(places)
            else:
                self._gpu.clear(places)
        except TransferTimeout as error:  # The engine's stream waits for another rank, say.
            self._limiter.warning("late", f"{len(blocks)} blocks are zeroed late: {error}")
            return error.settling
        except KvbmError as error:  # A GPU that is lost takes the engine with it.
            self._limiter.warning("clear", f"{len(blocks)} blocks could not be zeroed: {error}")
        return None


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
