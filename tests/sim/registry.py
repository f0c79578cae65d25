"""The registry: who lives. Entries of the dead expire; watchers hear of everything in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from tests.sim.world import Node, World


class Change(Enum):
    """What has become of an entry."""

    JOINED = "joined"
    CHANGED = "changed"
    DELETED = "deleted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class News:
    """A change of the entry of one life of a process."""

    name: str
    epoch: int
    change: Change
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Return whether the entry is there now."""
        return self.change in (Change.JOINED, Change.CHANGED)


Watch = Callable[[News], None]
WRITE_MS = 3.0


class Watcher(NamedTuple):
    """A life of a process that hears of every change."""

    node: Node
    life: int
    take: Watch


class Registry:
    """As NATS KV with a time to live. Names are those of processes, `<host>/<source>`."""

    TTL_MS = 2_000.0

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: dict[str, News] = {}
        self._wanted: dict[str, Mapping[str, Any]] = {}
        """What the owners of entries have said last, heard or not."""
        self._watchers: list[Watcher] = []
        self._epoch = 1_000

    def epoch(self, name: str) -> int:
        """Return the epoch of an entry; 0 without one."""
        entry = self.entries.get(name)
        return 0 if entry is None else entry.epoch

    def register(self, name: str, node: Node, lost: Callable[[int], None] | None = None) -> int:
        """Begin a life of a source, kept alive by `node`; return its epoch.

        `lost` is called when a heartbeat finds that another life has taken the entry over.
        """
        world = self.world
        self._epoch += world.rng.randint(1, 3)
        epoch, life = self._epoch, node.life
        self._wanted[name] = {}
        # A life that comes before the entry of the one before has expired only changes it.
        self._enter(News(name, epoch, Change.CHANGED if name in self.entries else Change.JOINED))

        def beat() -> None:
            is_alive = node.up and node.life == life
            found = self.epoch(name)
            if found > epoch and is_alive and lost is not None:
                lost(epoch)
            elif found == epoch and world.bus_up and not is_alive:
                self.leave(name, epoch, change=Change.EXPIRED)
            elif found == epoch:
                if is_alive:
                    self._renew(name, epoch)
                world.later(self.TTL_MS, beat)

        world.later(self.TTL_MS, beat)
        return epoch

    def update(self, node: Node, epoch: int, info: Mapping[str, Any]) -> None:
        """Have the entry of a process say something else from now on. Whichever write comes last,
        it has what was said last; without NATS a later heartbeat writes it."""
        if self.epoch(node.name) == epoch:
            self._wanted[node.name] = info
            node.later(self.world.delay(WRITE_MS), partial(self._renew, node.name, epoch))

    def _renew(self, name: str, epoch: int) -> None:
        """Write an entry again, as its owner wants it."""
        is_ours = self.world.bus_up and self.epoch(name) == epoch
        if is_ours and self.entries[name].info != self._wanted[name]:
            self._enter(News(name, epoch, Change.CHANGED, self._wanted[name]))

    def leave(self, name: str, epoch: int, *, change: Change = Change.DELETED) -> None:
        """Take an entry away."""
        if name in self.entries and self.epoch(name) == epoch:
            entry = self.entries.pop(name)
            self._tell(News(name, epoch, change, entry.info))

    def watch(self, node: Node, take: Watch) -> None:
        """Tell a node's life of every entry, in any order, then of every change."""
        watcher = Watcher(node, node.life, take)
        self._watchers = [w for w in self._watchers if w.node.up and w.life == w.node.life]
        self._watchers.append(watcher)
        entries = list(self.entries.values())
        self.world.rng.shuffle(entries)
        for entry in entries:
            self._tell_one(watcher, News(entry.name, entry.epoch, Change.JOINED, entry.info))

    def _enter(self, news: News) -> None:
        self.entries[news.name] = news
        self._tell(news)

    def _tell(self, news: News) -> None:
        for watcher in self._watchers:
            self._tell_one(watcher, news)

    def _tell_one(self, watcher: Watcher, news: News) -> None:
        node = watcher.node
        if node.up and node.life == watcher.life:
            delay_ms = self.world.queue("registry", node.name)
            node.later(delay_ms, partial(watcher.take, news))
