"""The registry: who lives. Entries of the dead expire; watchers hear of everything in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.sim.world import Node, World

Watch = Callable[[str, int, bool], None]
"""Called with source, epoch and whether it is there."""


class Watcher(NamedTuple):
    """Who is told, in which of its lives, and how."""

    node: Node
    life: int
    take: Watch


class Registry:
    """As NATS KV with a time to live."""

    TTL_MS = 2_000.0

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: dict[str, int] = {}
        self._watchers: list[Watcher] = []
        self._epoch = 1_000

    def register(self, source: str, node: Node, lost: Callable[[int], None] | None = None) -> int:
        """A new life of a source, kept alive by `node`: its epoch.

        `lost` is called when a heartbeat finds that another life has taken the entry over.
        """
        world = self.world
        self._epoch += world.rng.randint(1, 3)
        epoch, life = self._epoch, node.life
        self.entries[source] = epoch
        self._tell(source, epoch, there=True)

        def beat() -> None:
            alive = node.up and node.life == life
            found = self.entries.get(source, 0)
            if found > epoch and alive and lost is not None:
                lost(epoch)
            elif found == epoch and world.bus_up and not alive:
                self.leave(source, epoch)
            elif found == epoch:
                world.later(self.TTL_MS, beat)

        world.later(self.TTL_MS, beat)
        return epoch

    def leave(self, source: str, epoch: int) -> None:
        """An entry is gone."""
        if self.entries.get(source) == epoch:
            del self.entries[source]
            self._tell(source, epoch, there=False)

    def watch(self, node: Node, take: Watch) -> None:
        """Tell a node's life of everybody who is there, then of every change."""
        watcher = Watcher(node, node.life, take)
        self._watchers = [w for w in self._watchers if w.node.up and w.life == w.node.life]
        self._watchers.append(watcher)
        for source, epoch in self.entries.items():
            self._tell_one(watcher, source, epoch, there=True)

    def _tell(self, source: str, epoch: int, *, there: bool) -> None:
        for watcher in self._watchers:
            self._tell_one(watcher, source, epoch, there=there)

    def _tell_one(self, watcher: Watcher, source: str, epoch: int, *, there: bool) -> None:
        node = watcher.node
        if node.up and node.life == watcher.life:
            delay_ms = self.world.queue("registry", node.name)
            node.later(delay_ms, partial(watcher.take, source, epoch, there))
