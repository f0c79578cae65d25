"""The bucket of the object tiers: what hosts share, and what outlives all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbm_disk_tier.objects.core.names import Names

from tests.sim.memory import ROT
from tests.sim.world import World

NAMES = Names("sim")
Bytes = tuple[bytes, ...]
"""What an object holds: a block, by rank."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is there."""

    content: Bytes
    at_ms: float


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

    def listed(self) -> list[tuple[str, int]]:
        """Return names and ages, in the order of the names, as they were a while ago."""
        now = self._world.now
        seen_ms = now if self._world.calm else now - self._world.plan.listing_lag_ms
        there = {name: one for name, one in self.objects.items() if one.at_ms <= seen_ms}
        still = {name: one for name, one in self._gone.items() if one.at_ms > seen_ms}
        self._gone = still
        self._world.marks["object listed late"] += len(still)
        return [(name, int(now - one.at_ms)) for name, one in sorted((there | still).items())]

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
