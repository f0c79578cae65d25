"""The lister: reads the names of a store, page by page, and hands them to the core.

Several ranges are listed at the same time. A page that fails is asked for again, from the same
name, until it comes: each page has a deadline, the listing has none.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop

from kvbm_disk_tier.core.effects import Effect
from kvbm_disk_tier.objects.core.answers import FolderList, Listed
from kvbm_disk_tier.objects.core.messages import (
    GoneLost,
    ListedBlock,
    ListingBegun,
    ListingEnded,
    ListingStalled,
    ObjectsListed,
    RangeListed,
    SlotsCompared,
)
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.ranges import WHOLE, Place, Progress, Ranges
from kvbm_disk_tier.objects.shell.object_store import (
    BucketError,
    BucketRefused,
    ObjectStore,
    backoff,
)
from kvbm_disk_tier.shell.inbox import hand_in

RANGES_AT_ONCE = 4
"""Ranges that are listed at a time: at 100 ms a page, four are 40,000 names a second."""
BLOCKS_AT_ONCE = 250
"""Blocks of a page that the core takes in one step, in some 2 ms."""
SLOTS_AT_ONCE = 4_096
"""Slots of the table that the core looks at in one step: about 2 ms."""
PAUSE_MAX_S = 30.0
"""The longest pause between two tries of a page: many hosts must not overload a store further."""

log = logging.getLogger(__name__)
Loop = CoreLoop[Any, Effect]
"""The loop of a core whose inputs include those of `objects.core.messages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListerDoors:
    """The functions that a lister calls."""

    take: Callable[[Listed], ListedBlock | None]
    """Returns the block that an object holds; None: it holds none of ours."""
    begun: Callable[[], None]
    """Called when a listing begins."""
    worked: Callable[[], None]
    """Called after each page."""
    failed: Callable[[BucketError], None]
    """Called after each page that failed."""
    wait_deletes: Callable[[], Awaitable[None]]
    """Waits, with a deadline, until the queue of deletions has room for those of a page."""


class Lister:
    """Listings of one store, one after the other."""

    def __init__(
        self, store: ObjectStore, names: Names, slot_count: int, doors: ListerDoors
    ) -> None:
        self._store, self._names, self._slot_count, self._doors = store, names, slot_count, doors
        self._found: int | None = None
        """The number of objects in the last listing; None: there was none."""
        self._log = OncePerKind(log)

    async def list_all(self, loop: Loop) -> None:
        """List all objects once, and have the core drop the blocks that are gone."""
        self._doors.begun()
        ranges = Ranges.for_listing(self._slot_count, self._found)
        folders: Sequence[str] = ()
        namespaces: frozenset[bytes] | None = None
        if ranges.digits:
            folders, namespaces = await self._folders(loop)
        if not folders:
            ranges, folders, namespaces = WHOLE, self._names.roots, None
        progress = Progress(ranges, folders)
        await self._tell(loop, ListingBegun(ranges, namespaces))
        async with asyncio.TaskGroup() as tasks:
            for number in range(min(RANGES_AT_ONCE, ranges.count)):
                tasks.create_task(self._list_ranges(loop, progress), name=f"lister {number}")
        progress.check()
        assert progress.is_over, "a range was left out"
        self._found = progress.objects
        await self._compare(loop)
        log.info("listed %d objects in %d pages; %d pages were asked for again",
                 progress.objects, progress.pages, progress.failures)  # fmt: skip

    async def _folders(self, loop: Loop) -> tuple[list[str], frozenset[bytes] | None]:
        """Return the folders of all namespaces; and the namespaces, if some may have been left
        out."""
        found: list[str] = []
        is_whole = True
        for root in self._names.roots:
            ask = functools.partial(self._store.folders, root)
            listed: FolderList = await self._asked(loop, root, ask)
            found += listed.prefixes
            if listed.unread:
                is_whole = False
                self._log.warning("unread", f"folders of {root} were left out: {listed.unread}")
        known = {folder: self._names.namespace_of(folder) for folder in found}
        ours = {folder: namespace for folder, namespace in known.items() if namespace is not None}
        return sorted(ours), None if is_whole else frozenset(ours.values())

    async def _list_ranges(self, loop: Loop, progress: Progress) -> None:
        while (place := progress.begin()) is not None:
            while not await self._list_page(loop, progress, place):
                await self._doors.wait_deletes()
            await self._tell(loop, RangeListed(place.number, place.is_whole))

    async def _list_page(self, loop: Loop, progress: Progress, place: Place) -> bool:
        """Take the next page of a range; True: it was the last one."""
        page = await self._asked(
            loop,
            place.prefix,
            lambda: self._store.page(place.prefix, place.after),
            lambda: progress.failed(place),
        )
        if page.unread:
            place.is_whole = False
            self._log.warning("unread", f"names of {place.prefix} were left out: {page.unread}")
        for objects in self._blocks(page.objects):
            await self._tell(loop, ObjectsListed(objects, place.number))
        return progress.page(
            place, page.last_name or place.after, more=page.more, objects=len(page.objects)
        )

    def _blocks(self, objects: Sequence[Listed]) -> Iterable[tuple[ListedBlock, ...]]:
        """Yield the blocks of a page, so many for one step."""
        found = tuple(one for entry in objects if (one := self._doors.take(entry)) is not None)
        for first in range(0, len(found), BLOCKS_AT_ONCE):
            yield found[first : first + BLOCKS_AT_ONCE]

    async def _asked(
        self,
        loop: Loop,
        prefix: str,
        ask: Callable[[], Any],
        failed: Callable[[], None] = lambda: None,
    ) -> Any:
        """Ask the store until it answers, with growing pauses."""
        pauses = backoff(max_s=PAUSE_MAX_S)
        while True:
            try:
                answer = await ask()
            except BucketError as error:
                self._log.warning("listing", f"no names of {prefix} could be listed: {error}")
                failed()
                loop.complete(ListingStalled())
                self._doors.failed(error)
                refused = isinstance(error, BucketRefused)
                await asyncio.sleep(PAUSE_MAX_S if refused else next(pauses))
            else:
                self._doors.worked()
                return answer

    async def _compare(self, loop: Loop) -> None:
        """Have the core compare its slots with the listing, and drop blocks that are gone."""
        parts = [(first, SLOTS_AT_ONCE) for first in range(0, self._slot_count, SLOTS_AT_ONCE)]
        for first, count in parts:
            await self._tell(loop, SlotsCompared(first, count))
        await self._tell(loop, ListingEnded())
        for first, count in parts:
            await self._tell(loop, GoneLost(first, count))

    async def _tell(self, loop: Loop, event: object) -> None:
        """Hand the core an input of a listing, and wait for room: none may be left out."""
        await hand_in(loop, event, self._log, "the listing")
