"""The lister: a real core learns of every object, whatever the store does with its pages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_disk_tier.core.effects import AppendJournal, Effect
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Operation, Replay
from kvbm_disk_tier.core.messages import StoreOpened, Tick
from kvbm_disk_tier.objects.core.answers import FolderList, Listed, Page
from kvbm_disk_tier.objects.core.core import ObjectTierCore
from kvbm_disk_tier.objects.core.messages import ListedBlock
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.ranges import Ranges
from kvbm_disk_tier.objects.shell import lister as lister_module
from kvbm_disk_tier.objects.shell import object_store
from kvbm_disk_tier.objects.shell.lister import Lister, ListerDoors
from kvbm_disk_tier.objects.shell.object_store import BucketError

NAMES = Names("kv")
SPACES = (bytes([1] * 32), bytes([2] * 32))
PAGE = 7


def blocks(count: int, seed: int = 1) -> list[Block]:
    """Blocks of two namespaces, with hashes that are drawn."""
    drawn = random.Random(seed)
    return [
        Block(SequenceHash(drawn.randbytes(16)), SequenceHash(bytes(16)), SPACES[n % 2], n, 64)
        for n in range(count)
    ]


class Store:
    """Objects in a dictionary, and requests that fail as they are told to."""

    where = "a dictionary"
    check_s: float | None = None

    def __init__(self, objects: Sequence[Block]) -> None:
        self.objects = {NAMES.name_of(block): block for block in objects}
        self.fails: Callable[[], bool] = lambda: False
        self.requests = 0
        self.unread = ""
        """Why folders of namespaces were left out."""

    def _ask(self) -> None:
        self.requests += 1
        if self.fails():
            raise BucketError("not now")

    async def folders(self, prefix: str) -> FolderList:
        self._ask()
        below = {name.removeprefix(prefix).split("/")[0] for name in self.objects}
        found = [*sorted(f"{prefix}{name}/" for name in below), f"{prefix}foreign/"]
        return FolderList(found, self.unread)

    async def page(self, prefix: str, after: str) -> Page:
        self._ask()
        await asyncio.sleep(0)
        left = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
        page = [Listed(name, 64, 1_000) for name in left[:PAGE]]
        return Page(page, len(left) > PAGE, page[-1].name if page else "")

    async def size(self, name: str) -> int | None:
        return 64 if name in self.objects else None

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        for name in names:
            self.objects.pop(name, None)
        return {}

    async def probe(self, prefix: str, *, write: bool) -> None:
        self._ask()


class Tier:
    """A real core behind its loop, and its lister."""

    def __init__(self, store: Store, slots: int) -> None:
        self.store = store
        self.core = ObjectTierCore(
            host="h", instance="0", epoch=1, frequency_filter=FrequencyFilter(enabled=False)
        )
        self.core.start()
        self.core.step(Tick(), 0)
        self.core.step(StoreOpened(Layout.unsized(slots), Replay({}, 1, 0, 0)), 0)
        self.loop: CoreLoop[Any, Effect] = CoreLoop(self.core, self._carry_out, inbox_size=3)
        self.failed = 0
        doors = ListerDoors(
            take=self._take, begun=lambda: None, worked=lambda: None, failed=self._count,
            wait_deletes=self._no_wait,
        )  # fmt: skip
        self.lister = Lister(store, NAMES, slots, doors)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, AppendJournal):
            for record in effect.records:
                assert record.operation is Operation.REMOVED
                self.store.objects.pop(NAMES.name_of(record.block), None)

    def _take(self, entry: Listed) -> ListedBlock | None:
        block = NAMES.block_of(entry.name)
        return None if block is None else ListedBlock(block, entry.age_ms)

    def _count(self, _error: BucketError) -> None:
        self.failed += 1

    async def _no_wait(self) -> None:
        pass

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the core's loop."""
        task = asyncio.create_task(self.loop.run(()))
        try:
            yield
            await self.loop.wait_idle(deadline_s=5.0)
            self.core.check()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def here(self) -> set[Block]:
        """What the table has."""
        return set(self.core.inventory.table.blocks())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ranges, short pauses."""
    monkeypatch.setattr("kvbm_disk_tier.objects.core.ranges.RANGE_OBJECTS_MAX", 20)
    monkeypatch.setattr(lister_module, "SLOTS_AT_ONCE", 50)
    monkeypatch.setattr(lister_module, "PAUSE_MAX_S", 0.0)
    monkeypatch.setattr(lister_module, "BLOCKS_AT_ONCE", 3)
    monkeypatch.setattr(object_store, "PAUSE_S", 0.0)


@pytest.mark.parametrize("slots", [1, 20, 300, 5_000])
async def test_an_empty_store_is_listed_whatever_its_capacity(slots: int) -> None:
    """Large ones are listed by namespaces, of which there are none."""
    tier = Tier(Store([]), slots)
    async with tier.running():
        for _ in range(2):
            await tier.lister.list_all(tier.loop)
    assert tier.core.counts["listings"] == 2


@pytest.mark.parametrize("fails", [0.0, 0.3])
async def test_every_object_is_listed_in_ranges_and_what_goes_is_gone(fails: float) -> None:
    """Each page may fail: it is asked for again, and not those before it."""
    drawn = random.Random(1)
    store = Store(blocks(300))
    tier = Tier(store, 320)
    async with tier.running():
        store.fails = lambda: drawn.random() < fails
        await tier.lister.list_all(tier.loop)
        assert tier.here == set(store.objects.values())
        pages = sum(-(-len(group) // PAGE) or 1 for group in _groups(store))
        assert store.requests - tier.failed <= pages + 1
        for name in sorted(store.objects)[::10]:
            del store.objects[name]
        await tier.lister.list_all(tier.loop)
    assert tier.here == set(store.objects.values())
    assert (tier.failed > 0) == (fails > 0)


def _groups(store: Store) -> list[list[str]]:
    """The names by namespace and first digit: what a range of sixteen has of each."""
    roots = [f"kv/v2/{space.hex()}/{digit:x}" for space in SPACES for digit in range(16)]
    return [[name for name in store.objects if name.startswith(root)] for root in roots]


async def test_surplus_is_deleted_while_it_is_listed() -> None:
    """Ten times what there is room for: one listing is enough, and little is left beyond it."""
    store = Store(blocks(1_000))
    tier = Tier(store, 100)
    async with tier.running():
        await tier.lister.list_all(tier.loop)
    assert len(tier.here) <= 100 <= len(store.objects)
    ranges = Ranges.for_listing(100, None)
    assert ranges.count == 16
    assert len(store.objects) <= ranges.count * ranges.share(100)


async def test_a_namespace_that_others_have_removed_is_gone() -> None:
    """With the folder, so the listing in ranges does not name it; unless a folder is unread."""
    store = Store(blocks(300))
    tier = Tier(store, 320)
    async with tier.running():
        await tier.lister.list_all(tier.loop)
        retired = SPACES[0].hex()
        store.objects = {name: one for name, one in store.objects.items() if retired not in name}
        store.unread = "Input/output error"
        for _ in range(3):
            await tier.lister.list_all(tier.loop)
        await tier.loop.wait_idle(deadline_s=5.0)
        assert len(tier.here) == 300, "it may be there, and was not seen"
        store.unread = ""
        for _ in range(2):
            await tier.lister.list_all(tier.loop)
    assert tier.here == set(store.objects.values())
    assert tier.core.counts["evictions.gone"] == 150
