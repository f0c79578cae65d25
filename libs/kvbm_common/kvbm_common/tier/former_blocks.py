"""Former blocks: which blocks have left so long ago that nothing else of them is remembered.

A block that is in here was held once; one that is not was never held, or left beyond the horizon.
A name is 16 bits of a bucket, as in a cuckoo filter (Fan et al. 2014), but it is never moved: in a
full bucket the oldest is overwritten. So nothing is rebuilt, and memory never grows.

    bucket = high 32 bits of the name's mix × buckets ÷ 2³²
    mark   = low 16 bits of the name's mix; 0 is written as 1, for 0 is an empty place

Errors: a name that was never held is found with a chance of at most 128 ÷ 65,536 = 0.2 %. Of the
names that were noted within the horizon, those of a bucket that is overfull may be overwritten:
under 1 % of the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvbm_common.eviction.sketch import mixed
from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.tier.small_pages import small_pages
from kvbm_common.wire.bounds import Usage

BUCKET = 128
"""Marks of a bucket. Larger ones are fuller at the same risk, and a look into one costs more."""
BUCKET_NAMES = 100
"""Names of the horizon for each bucket: with 128 places, one bucket in 200 is overfull."""
HORIZON_LEAST = 1 << 20
"""2.7 MB."""
HORIZON_SLOTS = 100
"""The name of a block that has left is kept until so many tiers full of blocks left after it."""
HORIZON_BELOW_MAX = 1 << 26
"""175 MB: the horizon of 671,000 blocks. Tiers with more blocks, below host memory, get no more."""
WAITING_MAX = 64
"""Names that are noted at once: numpy costs as much for one as for all of them."""
PERIODS = 64
"""The parts of the horizon that each have a time."""


def horizon_for(slot_count: int, below_count: int) -> int:
    """Return the horizon for what leaves so many slots, and so many blocks of tiers below."""
    assert slot_count >= 0, f"{slot_count} slots"
    assert below_count >= 0, f"{below_count} blocks below"
    all_tiers = min(HORIZON_BELOW_MAX, HORIZON_SLOTS * (slot_count + below_count))
    return max(HORIZON_LEAST, HORIZON_SLOTS * slot_count, all_tiers)


def _empty_marks(buckets: int) -> NDArray[np.uint16]:
    assert buckets > 0, f"{buckets} buckets"
    memory = small_pages(buckets * BUCKET * np.dtype(np.uint16).itemsize)
    return np.frombuffer(memory, np.uint16).reshape(buckets, BUCKET)


class FormerBlocks:
    """The last `horizon` blocks that were noted, 2.6 bytes each."""

    def __init__(self, horizon: int = HORIZON_LEAST) -> None:
        self.since_ms: int | None = None
        """Blocks that left before this time may be unknown here; None: none is."""
        self.set_horizon(horizon)

    def set_horizon(self, horizon: int) -> None:
        """Forget all, and remember so many blocks from now on."""
        assert horizon > 0, f"a horizon of {horizon} blocks"
        buckets = -(-horizon // BUCKET_NAMES)
        self._marks = _empty_marks(buckets)
        self._oldest = bytearray(buckets)
        """Bucket → the place that is written next."""
        self._waiting: list[SequenceHash] = []
        self._period = max(1, horizon // PERIODS)
        self._noted = 0
        self._times: deque[int] = deque([0], maxlen=PERIODS + 1)
        """Beginnings of the last periods; the first one begins with the first block."""

    @property
    def horizon(self) -> int:
        """The number of last noted blocks that are remembered."""
        return len(self._marks) * BUCKET_NAMES

    def usage(self, now_ms: int) -> Usage:
        """Return how full the horizon is, and how far back it reaches."""
        reach_s = None if self.since_ms is None else (now_ms - self.since_ms) / 1000
        used = min(self._noted, self.horizon)
        return Usage(used, self.horizon, self._noted - used, reach_s)

    def note(self, name: SequenceHash, now_ms: int) -> None:
        """Remember a block that nothing else remembers from now on."""
        self._waiting.append(name)
        self._noted += 1
        if self._noted % self._period == 0:
            self._times.append(now_ms)
            if self._noted >= self.horizon:
                self.since_ms = self._times[0]
        if len(self._waiting) >= WAITING_MAX:
            self._write()

    def among(self, names: Sequence[SequenceHash]) -> list[bool]:
        """Tell of each name whether it was noted."""
        if not self._noted:
            return [False] * len(names)
        if self._waiting:
            self._write()
        buckets, marks = self._places(names)
        found: list[bool] = (self._marks[buckets] == marks[:, None]).any(axis=1).tolist()
        assert len(found) == len(names), f"{len(found)} of {len(names)} names"
        return found

    def _write(self) -> None:
        names, self._waiting = self._waiting, []
        buckets, marks = self._places(names)
        known = (self._marks[buckets] == marks[:, None]).any(axis=1)
        for bucket, mark, is_known in zip(
            buckets.tolist(), marks.tolist(), known.tolist(), strict=True
        ):
            row, oldest = self._marks[bucket], self._oldest[bucket]
            assert oldest < BUCKET, f"place {oldest} of {BUCKET}"
            places = np.flatnonzero(row == mark).tolist() if is_known else []
            if places:
                # It becomes the newest, and takes no second place.
                newer = np.arange((oldest - 1 - places[0]) % BUCKET + 1)
                moved = (places[0] + newer) % BUCKET
                row[moved] = np.roll(row[moved], -1)
            else:
                row[oldest] = mark
                self._oldest[bucket] = (oldest + 1) % BUCKET

    def _places(
        self, names: Iterable[SequenceHash]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """Return each name's bucket and mark."""
        words = mixed(np.frombuffer(b"".join(names), np.dtype((np.void, HASH_BYTES))))
        buckets = ((words >> np.uint64(32)) * np.uint64(len(self._marks))) >> np.uint64(32)
        marks = np.maximum(words.astype(np.uint16), np.uint16(1))
        return buckets.astype(np.int64), marks
