"""Orphans: stored blocks that cannot be named yet, because their parent is unknown.

At the start of a prompt they wait for the content of their LoRA adapter instead. The number of
waiting blocks is bounded, and no orphan is taken for a root.

A parent that we missed comes with a replay; one that the engine announces late comes by itself. An
orphan that has waited too long is *condemned*: one replay is asked for. If its parent does not come
with the replay either, the orphan is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_common.wire.engine_events import BlockStored, EngineHash

ParentKey = tuple[int, EngineHash | str]
"""A group, and the parent's engine hash or the adapter's name (hash_extras.py)."""


@dataclass(slots=True, eq=False)
class Orphan:
    """One event that waits, and those of its blocks that the engine has removed meanwhile."""

    group: int
    event: BlockStored
    since_ms: int
    removed: list[EngineHash] = field(default_factory=list)
    condemned: bool = False

    def left(self) -> Iterator[EngineHash]:
        """Yield its blocks without those that were removed."""
        removed = Counter(self.removed)
        for engine_hash in self.event.block_hashes:
            if removed[engine_hash]:
                removed[engine_hash] -= 1
            else:
                yield engine_hash


class Orphans:
    """The orphans of one stream."""

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max >= 0, blocks_max
        self._blocks_max = blocks_max
        self._waiting: dict[ParentKey, list[Orphan]] = {}
        self._holders: dict[tuple[int, EngineHash], list[Orphan]] = {}
        """Group and block → the orphans that store it, one for each time."""
        self.block_count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, group: int, event: BlockStored, now_ms: int, *, adapter: str = "") -> bool:
        """Let an event wait for its parent, or for its adapter. False: there is no room."""
        awaited = adapter or event.parent
        assert awaited is not None, "a root has no parent to wait for"
        assert event.block_hashes, f"an event without blocks waits for {awaited!r}"
        if self.block_count + len(event.block_hashes) > self._blocks_max:
            return False
        orphan = Orphan(group, event, now_ms)
        self._waiting.setdefault((group, awaited), []).append(orphan)
        for engine_hash in event.block_hashes:
            self._holders.setdefault((group, engine_hash), []).append(orphan)
        self.block_count += len(event.block_hashes)
        assert self.block_count <= self._blocks_max, f"{self.block_count} blocks wait"
        return True

    def adopt(
        self, group: int, engine_hashes: tuple[EngineHash, ...] | tuple[str, ...]
    ) -> list[Orphan]:
        """Return the orphans that waited for one of these blocks or adapters, and forget them."""
        adopted: list[Orphan] = []
        for engine_hash in engine_hashes if self._waiting else ():
            adopted += self._waiting.pop((group, engine_hash), ())
        for orphan in adopted:
            self._forget(orphan)
        self.block_count -= sum(len(orphan.event.block_hashes) for orphan in adopted)
        assert self.block_count >= 0, f"{self.block_count} blocks wait after {len(adopted)} events"
        return adopted

    def remove(self, group: int, engine_hash: EngineHash) -> bool:
        """Note that the engine has removed a block. False: the block is no orphan."""
        holders = self._holders.get((group, engine_hash))
        if holders is None:
            return False
        orphan = holders.pop()
        if not holders:
            del self._holders[group, engine_hash]
        orphan.removed.append(engine_hash)
        assert len(orphan.removed) <= len(orphan.event.block_hashes), orphan
        return True

    def _forget(self, orphan: Orphan) -> None:
        """Remove an orphan's blocks from the table of blocks."""
        for engine_hash in orphan.left():
            key = orphan.group, engine_hash
            self._holders[key].remove(orphan)
            if not self._holders[key]:
                del self._holders[key]

    def condemn(self, before_ms: int) -> bool:
        """Condemn the orphans that wait since `before_ms`; returns whether there is a new one."""
        marked = False
        for orphans in self._waiting.values():
            for orphan in orphans:
                if orphan.since_ms <= before_ms and not orphan.condemned:
                    orphan.condemned = marked = True
        return marked

    def drop_condemned(self) -> int:
        """Drop the condemned orphans; returns how many blocks they had."""
        before = self.block_count
        for key, orphans in list(self._waiting.items()):
            left = [orphan for orphan in orphans if not orphan.condemned]
            for orphan in orphans:
                if orphan.condemned:
                    self._forget(orphan)
                    self.block_count -= len(orphan.event.block_hashes)
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]
        assert 0 <= self.block_count <= before, f"{self.block_count} of {before} blocks wait"
        return before - self.block_count

    def clear(self) -> int:
        """Forget all orphans; returns how many blocks they had."""
        dropped, self.block_count = self.block_count, 0
        self._waiting.clear()
        self._holders.clear()
        return dropped

    def check(self) -> None:
        """Assert that the count of blocks is right and within its limit."""
        waiting = [orphan for orphans in self._waiting.values() for orphan in orphans]
        assert self.block_count == sum(len(o.event.block_hashes) for o in waiting)
        assert self.block_count <= self._blocks_max
        assert all(self._waiting.values()), "no empty entries"
        held = Counter((one.group, name) for one in waiting for name in one.left())
        assert held == {key: len(holders) for key, holders in self._holders.items()}
