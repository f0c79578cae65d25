"""Object store: the interfaces of a bucket or directory, one for names and one for bytes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvbm_common.errors import KvbmError
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.objects.core.answers import FolderList, Page
from kvbm_disk_tier.objects.core.packing import Packing

OK = ""
CORRUPT = "corrupt"
"""The object has other bytes than its name says."""
CHANGED = "source_changed"
"""The arena's slot has other bytes than the lease said: it was reused."""
TOO_LATE = "too_late"
NO_LANE = "no_lane"
"""There is no memory for lanes of this length."""
GONE = "gone"
"""There is no such object."""

Sums = bytes
PAGE_MAX = 1_000
"""S3's own limit, for lists and for deletes."""
PASSING = frozenset(
    ["InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"]
) | {
    os.strerror(number)
    for number in (
        errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ENFILE, errno.ENOMEM,
        errno.ESTALE, errno.ETIMEDOUT,
    )
}  # fmt: skip
"""Reasons why one name of a batch is left that say nothing of the next attempt: S3's, a file's."""
PAUSE_S = 0.2
PAUSE_MAX_S = 5.0


class BucketError(KvbmError):
    """A call to the object store has failed. The text names the variable to look at."""

    code = "bucket"
    retry = True
    """True: another attempt at once may help."""


class BucketRefused(BucketError):
    """The store has refused a call: wrong keys, rights or bucket."""

    code = "bucket_refused"
    retry = False


def backoff(pause_s: float = PAUSE_S, max_s: float = PAUSE_MAX_S) -> Iterator[float]:
    """Yield pauses in seconds that double up to `max_s`.

    Each is between half and all of its step, so that many clients do not retry at once.
    """
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, max_s)


class ObjectStore(Protocol):
    """The names of a store. Failures are BucketErrors, whose text names the variable."""

    where: str
    """The name of the store in logs."""
    check_s: float | None
    """The interval at which an idle store is probed; None: never."""

    async def folders(self, prefix: str) -> FolderList:
        """Return the prefixes that go on to the next `/` below this one."""

    async def page(self, prefix: str, after: str) -> Page:
        """Return a page of the names with this prefix, after a given one."""

    async def size(self, name: str) -> int | None:
        """Return the size of an object; None: no such object."""

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Delete up to a page of objects; returns those that are still there, and why."""

    async def probe(self, prefix: str, *, write: bool) -> None:
        """Try the cheapest requests: list one name and, with `write`, put an empty object."""


class Carrier(Protocol):
    """The bytes of a store. A failed move is returned, not raised; only defects of KVBM raise."""

    packing: Packing

    @property
    def buffer_bytes(self) -> int:
        """Memory through which blocks pass."""

    def close(self) -> None:
        """End the threads; memory that late bytes may come into stays."""

    def use_arena(self, reply: ArenaReply) -> None:
        """Map the arena of another life; raises KvbmError or OSError."""

    def drop_arena(self, instance: str) -> None:
        """Drop the arena of a host tier that has left or begun a new life."""

    async def put(
        self, name: str, block: Block, *, epoch: int, offset: int, deadline_s: float
    ) -> str:
        """Write the arena's bytes at `offset` as an object; return OK or what was wrong."""

    async def get(
        self, name: str, block: Block, *, epoch: int, offset: int, until_ms: int
    ) -> str | Sums:
        """Read an object into the arena at `offset`; return its sums or what was wrong."""
