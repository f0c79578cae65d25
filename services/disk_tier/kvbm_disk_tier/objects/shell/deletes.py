"""Deletes: names of objects that leave the bucket, gathered into batches.

Only a write of the same name waits for a delete. A delete that fails is tried again, also where it
was refused: keys are renewed. A store may refuse some names of a batch, and delete others: those
are not tried again, unless the reason passes. What is not deleted (it was refused, the queue was
full, the process ended) is found by the next listing. `Undeleted` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from kvbm_common.runtime.logs import OncePerKind

from kvbm_disk_tier.core.messages import DeletesAnswered, DeletesRefused
from kvbm_disk_tier.objects.core.undeleted import Undeleted
from kvbm_disk_tier.objects.shell.object_store import (
    PAGE_MAX,
    PASSING,
    BucketError,
    BucketRefused,
    ObjectStore,
    backoff,
)

QUEUE_MAX = 100_000
LATELY_MAX = 50_000
"""The newest ones: a store's page that is older than so many deletes is not to be expected. One
that is forgotten here may be listed though it is deleted: the next read finds out."""
ROOM = 10_000
"""A listing that finds much to delete waits while more than so many wait."""
ROOM_WAIT_S = 2.0
"""The seconds that a page waits for room at most: the store may refuse to delete."""

log = OncePerKind(logging.getLogger(__name__))


class Deletes:
    """The queue, and the one task that empties it."""

    def __init__(self, bucket: ObjectStore, counted: Callable[[str, int], None]) -> None:
        """Start with an empty queue; `counted(outcome, objects)` hears how deletes end."""
        self._bucket = bucket
        self._counted = counted
        self._queue: OrderedDict[str, int] = OrderedDict()
        """Names, each with the order of its removal; one of none has the next order."""
        self._in_flight: dict[str, int] = {}
        self._order = 0
        """The order of the last removal."""
        self._wake = asyncio.Event()
        self._landed = asyncio.Event()
        self.lately: OrderedDict[str, None] = OrderedDict()
        """Deleted, or to be, since `forget`: a page of a listing may still name them."""
        self._undeleted = Undeleted(PASSING)
        self._said = DeletesRefused("")
        self._said_order = 0
        self._tell: Callable[[DeletesRefused | DeletesAnswered], None] = lambda _: None

    def __len__(self) -> int:
        """Return the number of names that wait for their delete or are being deleted."""
        return len(self._queue) + len(self._in_flight)

    def concerns(self, name: str) -> bool:
        """Tell whether an object is deleted, or to be: a page of a listing may still name it."""
        return name in self.lately or self._waits(name)

    def _waits(self, name: str) -> bool:
        return name in self._queue or name in self._in_flight

    def add(self, names: Iterable[str], *, order: int = 0) -> None:
        """Delete these, some time; `order` of the removal that they are of, if they are of one."""
        assert not order or order > self._order, f"the removal {order} comes after {self._order}"
        self._order = max(order, self._order)
        for name in names:
            self._queue.setdefault(name, order or self._order + 1)
            self.lately[name] = None
            if len(self.lately) > LATELY_MAX:
                self.lately.popitem(last=False)
        if (surplus := len(self._queue) - QUEUE_MAX) > 0:
            for _ in range(surplus):
                self._queue.popitem(last=False)
            self._counted("dropped", surplus)
            self._undeleted.dropped(surplus)
            self._tell_changes()
        if self._queue:
            self._wake.set()

    def forget(self) -> None:
        """Forget the finished deletes: a listing that begins now does not name those objects."""
        self.lately = OrderedDict.fromkeys([*self._in_flight, *self._queue])
        self._undeleted.begin_listing(self._waits)
        self._tell_changes()

    async def wait_room(self) -> None:
        """Wait, for a while, until the queue is short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                while len(self._queue) > ROOM:
                    await self._landed.wait()
                    self._landed.clear()

    async def wait_writable(self, name: str) -> None:
        """Cancel the delete of a name about to be written, or wait until it has ended."""
        self._queue.pop(name, None)
        while name in self._in_flight:
            await self._landed.wait()
            self._queue.pop(name, None)  # A delete that has failed is in the queue again.
        self.lately.pop(name, None)
        self._undeleted.written(name)
        self._tell_changes()

    async def run(self, tell: Callable[[DeletesRefused | DeletesAnswered], None]) -> None:
        """Delete what is added, until cancelled.

        `tell` hears when the store begins or ends to refuse, what it has not deleted, and up to
        which removal it has answered.
        """
        self._tell = tell
        if self._said != DeletesRefused(""):
            tell(self._said)  # What was added before has no room already.
        pauses = backoff()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                if await self._delete_batch():
                    pauses = backoff()
                else:
                    await asyncio.sleep(next(pauses))

    async def _delete_batch(self) -> bool:
        """Delete the oldest names of the queue; return whether the next may follow at once."""
        count = min(PAGE_MAX, len(self._queue))
        self._in_flight = dict(self._queue.popitem(last=False) for _ in range(count))
        batch = [*self._in_flight]
        self._landed.clear()
        try:
            left = await self._bucket.delete(batch)
        except BucketError as error:
            log.warning(error.code, f"{len(batch)} objects could not be deleted: {error}")
            self._counted("failed", len(batch))
            self._again(batch)
            refused = isinstance(error, BucketRefused)
            self._undeleted.failed(batch, str(error), refused=refused)
            may_go_on = False
        else:
            may_go_on = self._take_answer(batch, left)
        finally:
            self._in_flight = {}
            self._landed.set()
        self._tell_changes()
        return may_go_on

    def _take_answer(self, batch: list[str], left: dict[str, str]) -> bool:
        answer = self._undeleted.answered(batch, left, self._bucket.where)
        for name, why in answer.left.items():
            log.warning(why, f"{name} could not be deleted: {why}")
        self._counted("failed", len(answer.left))
        self._counted("deleted", len(answer.gone))
        self._again(answer.again)
        return answer.may_go_on

    def _again(self, names: Iterable[str]) -> None:
        """Put names back into the queue, behind all others: they are told as waiting."""
        for name in names:
            self._queue.setdefault(name, self._order + 1)

    def _tell_changes(self) -> None:
        """Tell what is refused, what waits, and which removals are answered, if that changed."""
        now = DeletesRefused(self._undeleted.refusal, self._undeleted.waiting)
        if now != self._said:
            self._said = now
            self._tell(now)
        waiting = (*islice(self._in_flight.values(), 1), *islice(self._queue.values(), 1))
        answered = min(waiting) - 1 if waiting else self._order
        assert answered >= self._said_order, f"{answered} after {self._said_order}"
        if answered != self._said_order:
            self._said_order = answered
            self._tell(DeletesAnswered(answered))
