"""Held blocks: what one KV group of one rank holds, in the engine's names and in ours.

An engine may hold the same content in two device blocks. It then publishes stored twice and removed
twice; here the block is held from the first to the last.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.wire.engine_events import EngineHash
from kvbm_common.wire.raw_events import RawRun

from kvbm_connectors.consolidator.core.block_books import Pairs
from kvbm_connectors.consolidator.core.events import parents_first

RETIRED_MAX = 65_536
"""Names of removed blocks that are kept: a new block may follow one that has just left (sliding
windows do that). An engine's hash stands for the same content during a whole life."""

_Key = TypeVar("_Key", bound=Hashable)

Held = Mapping[SequenceHash, SequenceHash]
"""Blocks that are held, each with its parent."""


class HeldBlocks:
    """The blocks of one group of one rank."""

    def __init__(self, hasher: Hasher, retired_max: int = RETIRED_MAX) -> None:
        assert retired_max >= 0, retired_max
        self.hasher = hasher
        self.namespace_hex = hasher.namespace.digest.hex()
        self._retired_max = retired_max
        self._names: dict[EngineHash, SequenceHash] = {}
        self._parents: dict[SequenceHash, SequenceHash] = {}
        """Exactly the blocks held, with their parents, in the order in which they came."""
        self._copies: dict[SequenceHash, int] = {}
        """Block → the number of times that the engine holds it, if more than one."""
        self._name_copies: dict[EngineHash, int] = {}
        """Engine's hash → the number of times that its block is held under it, if more than one."""
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._retired: OrderedDict[EngineHash, None] = OrderedDict()

    @property
    def held(self) -> Held:
        """Every block held, with its parent: the book itself, which changes with each event."""
        return self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: SequenceHash) -> bool:
        return block in self._parents

    def name_of(self, engine_hash: EngineHash) -> SequenceHash | None:
        """Return our name of a block that the engine has stored before."""
        return self._names.get(engine_hash)

    def store(
        self,
        engine_hashes: tuple[EngineHash, ...],
        chain: list[SequenceHash],
        parent: SequenceHash | None,
    ) -> list[RawRun] | None:
        """Hold these blocks once more; returns those that were not held before.

        None: the engine uses one of its hashes for two contents; then nothing has changed.
        """
        assert len(chain) == len(engine_hashes), (len(chain), len(engine_hashes))
        # A look at a block among a million is a wait for memory, so each book is opened once: what
        # is new there is what is last in it.
        names, count = self._names, len(self._names)
        agreed = list(map(names.setdefault, engine_hashes, chain))
        fresh = len(names) - count
        assert 0 <= fresh <= len(chain), f"{fresh} of {len(chain)} names are new"
        if agreed != chain:
            for _ in range(fresh):
                names.popitem()
            return None
        first_parent = self.hasher.root if parent is None else parent
        parents, held = self._parents, len(self._parents)
        parents.update(zip(chain, [first_parent, *chain[:-1]], strict=True))
        new = len(parents) - held
        assert 0 <= new <= len(chain), f"{new} of {len(chain)} blocks are new"
        if fresh < len(chain):
            if new < len(chain):
                self._count_names(engine_hashes, fresh)
            for engine_hash in self._retired.keys() & engine_hashes:
                del self._retired[engine_hash]
        if new == len(chain):
            return [(first_parent, chain)]
        return self._count_copies(chain, new)

    def _count_names(self, engine_hashes: tuple[EngineHash, ...], fresh: int) -> None:
        """Count one more block under each name that was known and in use. The last `fresh` names of
        the book are new."""
        assert 0 <= fresh <= len(engine_hashes), (fresh, len(engine_hashes))
        known = set(engine_hashes).difference(islice(reversed(self._names), fresh))
        for engine_hash in known - self._retired.keys():
            self._name_copies[engine_hash] = self._name_copies.get(engine_hash, 1) + 1

    def _count_copies(self, chain: list[SequenceHash], new: int) -> list[RawRun]:
        """Count a further copy of each block that was held before; return the `new` others as runs,
        which the held blocks split."""
        assert 0 <= new <= len(chain), (new, len(chain))
        runs: list[RawRun] = []
        fresh = set(islice(reversed(self._parents), new))
        for block in chain:
            parent = self._parents[block]
            if block not in fresh:
                self._copies[block] = self._copies.get(block, 1) + 1
            elif runs and runs[-1][1][-1] == parent:
                runs[-1][1].append(block)
            else:
                runs.append((parent, [block]))
        return runs

    def remove(self, engine_hash: EngineHash) -> tuple[SequenceHash | None, bool]:
        """Let go of one copy: our name of it if that was the last one, and whether it was held."""
        block = self._names.get(engine_hash)
        if block is None or engine_hash in self._retired:
            return None, False
        if _one_less(self._name_copies, engine_hash) == 0:
            self._retire(engine_hash)
        if _one_less(self._copies, block):
            return None, True
        del self._parents[block]
        assert block not in self._copies, f"{block.hex()} is gone, and has copies"
        return block, True

    def clear(self) -> None:
        """Hold nothing; the names stay good."""
        self._parents.clear()
        self._copies.clear()
        self._name_copies.clear()
        # Taken from the end: to forget all others one by one takes longer than it took to store.
        last = list(islice(reversed(self._names.items()), self._retired_max))
        self._names = dict(reversed(last))
        self._retired = OrderedDict.fromkeys(self._names)
        assert len(self._retired) <= self._retired_max, len(self._retired)

    def forget(self) -> None:
        """Hold nothing, and know no names: the engine's hashes stand for other content now."""
        self.clear()
        assert not self._parents, f"{len(self._parents)} blocks are held under names of old content"
        self._names.clear()
        self._retired.clear()

    def block_runs(self) -> list[RawRun]:
        """Return everything held, each block as a run of its own, parents first."""
        parents, passed = self._parents, set[SequenceHash]()
        for block, parent in parents.items():
            if parent not in passed and parent in parents:
                ordered = parents_first(parents, parents.get)
                return [(parents[one], [one]) for one in ordered]
            passed.add(block)
        return [(parent, [block]) for block, parent in parents.items()]

    def names(self) -> list[SequenceHash]:
        """Return our names of everything held, in the order in which it was stored."""
        return list(self._parents)

    def held_of(self, names: Sequence[SequenceHash]) -> Pairs:
        """Return those of some blocks that are held, each with its parent."""
        found = zip(names, map(self._parents.get, names), strict=True)
        return [(name, parent) for name, parent in found if parent is not None]

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        counts = [*self._copies.values(), *self._name_copies.values()]
        assert all(count > 1 for count in counts), "one copy is no entry"
        assert self._retired.keys() <= self._names.keys(), "only names retire"
        assert self._name_copies.keys().isdisjoint(self._retired), "copies are under live names"
        held: Counter[SequenceHash] = Counter()
        for engine_hash in self._names.keys() - self._retired.keys():
            held[self._names[engine_hash]] += self._name_copies.get(engine_hash, 1)
        copies = {block: self._copies.get(block, 1) for block in self._parents}
        assert held == copies, "what is held is held under live names"
        assert self._copies.keys() <= copies.keys(), "copies are of held blocks"
        assert len(self._retired) <= self._retired_max, "it is bounded"

    def _retire(self, engine_hash: EngineHash) -> None:
        self._retired.pop(engine_hash, None)
        self._retired[engine_hash] = None
        if len(self._retired) > self._retired_max:
            oldest, _ = self._retired.popitem(last=False)
            del self._names[oldest]
        assert len(self._retired) <= self._retired_max, len(self._retired)


def _one_less(copies: dict[_Key, int], key: _Key) -> int:
    """Take one off a count; only counts above one are kept. Returns what is left."""
    left = copies.pop(key, 1) - 1
    assert left >= 0, f"{key!r} had {left + 1} copies"
    if left > 1:
        copies[key] = left
    return left
