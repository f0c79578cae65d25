"""The bucket of the object tiers: what hosts share, and what outlives all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvbm_common.tier.blocks import Block
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.ranges import Ranges

from tests.sim.memory import ROT
from tests.sim.world import World

NAMES = Names("sim")
BLOCKS_MAX = 4_096
"""Names that are read once: a listing comes back to the same ones again and again."""
Bytes = tuple[bytes, ...]
"""What an object holds: a block, by rank."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is there."""

    content: Bytes
    at_ms: float


@lru_cache(maxsize=BLOCKS_MAX)
def block_of(name: str) -> Block | None:
    """Return the block that an object of this name holds."""
    return NAMES.block_of(name)


@lru_cache(maxsize=BLOCKS_MAX)
def name_of(block: Block) -> str:
    """Return the name of the object that holds this block."""
    return NAMES.name_of(block)


@lru_cache(maxsize=4 * BLOCKS_MAX)
def range_of(name: str, digits: int) -> int:
    """Return the range of a listing that an object's name is in; -1: it names no block."""
    block = block_of(name)
    return -1 if block is None else Ranges(digits).of(block.hash)


class Bucket:
    """Objects by name. Its listings lag behind, as those of some stores do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.objects: dict[str, Stored] = {}
        self._gone: dict[str, Stored] = {}
        """Deleted lately: a listing that lags still names them."""
        self.is_up = True

    def put(self, name: str, content: Bytes) -> None:
        """Store an object, in one piece."""
        self.objects[name] = Stored(content, self._world.now)
        self._gone.pop(name, None)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, whether they are there or not."""
        for name in names:
            found = self.objects.pop(name, None)
            if found is not None:
                self._gone[name] = Stored(found.content, self._world.now)

    def listed(
        self, behind: str, count: int, wanted: Callable[[str], bool]
    ) -> list[tuple[str, int]]:
        """Return the first wanted names behind one, and their ages, in the order of the names, as
        they were a while ago."""
        now = self._world.now
        seen_ms = now if self._world.calm else now - self._world.plan.listing_lag_ms
        there = {name: one for name, one in self.objects.items() if one.at_ms <= seen_ms}
        still = {name: one for name, one in self._gone.items() if one.at_ms > seen_ms}
        self._gone = still
        self._world.marks["object listed late"] += len(still)
        seen = there | still
        names = sorted(name for name in seen if name > behind and wanted(name))[:count]
        return [(name, int(now - seen[name].at_ms)) for name in names]

    def vanish(self) -> None:
        """Lose some objects: an operator, or a rule of the store, deletes them."""
        for name in sorted(self.objects):
            if self._world.rng.random() < 0.3:
                del self.objects[name]
                self._world.marks["object vanished"] += 1

    def rot(self) -> None:
        """Lose what some objects held."""
        for name, one in sorted(self.objects.items()):
            if self._world.rng.random() < 0.3:
                rank = self._world.rng.randrange(len(one.content))
                cells = list(one.content)
                cells[rank] = ROT + cells[rank]
                self.objects[name] = Stored(tuple(cells), one.at_ms)

    def outage(self, duration_ms: float) -> None:
        """Refuse everything for a while."""
        if self.is_up:
            self.is_up = False
            self._world.later(duration_ms, self._back)

    def _back(self) -> None:
        self.is_up = True
