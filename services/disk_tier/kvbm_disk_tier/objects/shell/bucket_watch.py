"""The watch over a bucket: when it is taken out of use, and when it works again.

Reads, writes and listings report how the bucket has answered; `bucket_health` judges. A bucket that
is down is probed until it answers. One that nothing has asked for a while is checked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvbm_common.runtime.logs import OncePerKind

from kvbm_disk_tier.core.messages import StoreDown, StoreUp
from kvbm_disk_tier.objects.core.bucket_health import BucketHealth
from kvbm_disk_tier.objects.shell.object_store import BucketError, ObjectStore, backoff

log = logging.getLogger(__name__)

Tell = Callable[[StoreDown | StoreUp], None]


class BucketWatch:
    """Follows one bucket, and tells the core when it goes down and comes up."""

    def __init__(self, store: ObjectStore, probe_prefix: str) -> None:
        """Start with a bucket that works; a probe asks for names with `probe_prefix`."""
        self.answers = 0
        """Answers of the bucket to reads, writes and listings."""
        self._store, self._probe_prefix = store, probe_prefix
        self._health = BucketHealth(backoff)
        self._is_down = asyncio.Event()
        self._tell: Tell = lambda _: None
        self._log = OncePerKind(log)

    @property
    def reason(self) -> str:
        """The reason why the bucket is down; empty: it is up."""
        return self._health.reason

    def answered(self, *, read: bool = False) -> None:
        """Note an answer; `read`: to a read of an object."""
        self.answers += 1
        self._health.good(read=read)

    def trouble(self, reason: str, *, refused: bool = False, alone: bytes = b"") -> None:
        """Note a failure, which may take the bucket out of use.

        `refused`: the bucket itself says no; `alone`: only this block is known to be concerned.
        """
        if self._health.trouble(reason, refused=refused, alone=alone):
            self._log.warning("down", reason)
            self._is_down.set()
            self._tell(StoreDown(reason))

    async def run(self, tell: Tell, opened: asyncio.Event) -> None:
        """Watch until cancelled: probe a bucket that is down; check an idle one once it is open."""
        self._tell = tell
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probe_when_down(), name="probe")
            tasks.create_task(self._check_when_idle(opened), name="check")

    async def _probe_when_down(self) -> None:
        while True:
            await self._is_down.wait()
            await asyncio.sleep(self._health.pause_s())
            try:
                await self._store.probe(self._probe_prefix, write=False)
            except BucketError as error:
                if self._health.still_down(str(error)):
                    self._log.warning(error.code, str(error))
                    self._tell(StoreDown(str(error)))
                continue
            self._health.up()
            self._is_down.clear()
            log.info("%s works again", self._store.where)
            self._tell(StoreUp())

    async def _check_when_idle(self, opened: asyncio.Event) -> None:
        """Check a bucket that nothing else asks; one failure takes it out, as a refusal does."""
        check_s = self._store.check_s
        if check_s is None:
            return
        await opened.wait()
        while True:
            before = self.answers
            await asyncio.sleep(check_s)
            if self._health.is_down or self.answers > before:
                continue
            try:
                await self._store.probe(self._probe_prefix, write=False)
            except BucketError as error:
                if self.answers == before:  # It may have waited for others' turns.
                    self.trouble(str(error), refused=True)
