"""Removal: `evict` and `reset` by prefix, namespace or everything, in many short steps.

A tier may hold a million blocks, and engines wait while a step runs. So a step looks at some slots
only, and the operator's request is repeated until nothing is left:

    look at slots ──► climb (of a prefix) ──► leave ──┐
          ▲                                           │ until a look finds nothing any more:
          └───────────────────────────────────────────┘ blocks come to slots that were passed

Which blocks are after a prefix is found without a table of children: each slot points to the slot
of its block's parent, and in each round pointers climb twice as far (pointer jumping, Wyllie 1979).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import SlotTable

REMOVED_MAX = 128
"""Blocks that one step removes: some 20 µs each, with what is announced of them."""
LOOKED_MAX = 2_048
"""Slots that one step looks at: two microseconds each."""
CLIMBS_PER_LOOK = 32
"""Pointers that climb in the time in which one slot is looked at."""
FOLDED_LOOKS = 20
"""The cost of a folded block, in looks at plain slots: it is made of columns first."""
PART = 128
"""Slots between two looks at what the step has spent."""
PASSES_MAX = 8
"""An engine that stores blocks all the time keeps no removal going."""
ROUNDS_MAX = 32
"""Pointers that climb so often have passed 2^32 parents: the rest goes round in circles."""
_DEPTH_MAX = 0xFFFF
"""Deeper blocks leave in any order: a sort of 16-bit numbers takes a tenth of the time."""

_Numbers = npt.NDArray[np.int32]


class Removal:
    """The blocks after a prefix, in a namespace or of a whole tier, some for each step."""

    def __init__(
        self,
        table: SlotTable,
        *,
        prefix: SequenceHash | None = None,
        namespace: bytes | None = None,
        even_pinned: bool = False,
    ) -> None:
        """Begin with what is after `prefix`, or in `namespace`; both None: with everything."""
        assert prefix is None or namespace is None, "a removal has one selection"
        self.table = table
        self.kept = 0
        """Pinned blocks that the current pass has left."""
        self._prefix, self._namespace, self._even_pinned = prefix, namespace, even_pinned
        self._removed: set[SequenceHash] = set()
        """Blocks that were selected after a prefix. Blocks may be there whose parent is gone."""
        self._steps = self._selected = self._spent = 0
        self._walk = self._passes()

    def step(self) -> tuple[list[SequenceHash], bool]:
        """Return blocks to remove now, leaves before their parents, and whether there is more."""
        self._steps += 1
        self._spent = 0
        names: list[SequenceHash] = []
        for name in self._walk:
            if name is None:  # The step has looked at enough.
                return names, True
            names.append(name)
            if len(names) >= REMOVED_MAX:
                return names, True
        assert len(names) < REMOVED_MAX, f"{len(names)} blocks in one step"
        return names, False

    def _passes(self) -> Iterator[SequenceHash | None]:
        for number in range(1, PASSES_MAX + 1):
            self.kept, steps, selected = 0, self._steps, self._selected
            yield from self._below_prefix() if self._prefix is not None else self._everywhere()
            # Blocks may have come to slots that were passed before, unless one step saw them all.
            # One look is not enough in any case: another operator may have joined in its middle.
            is_last = number > 1 and self._selected == selected
            if number == PASSES_MAX or self._steps == steps or is_last:
                return
            yield None

    def _looks(self, first: int, end: int) -> int:
        """Return what it costs to look at some slots."""
        assert first < end, f"slots {first} to {end}"
        return end - first + (FOLDED_LOOKS - 1) * self.table.folded_in(range(first, end))

    def _is_spent(self, looks: int) -> bool:
        """Count what the step has done; tell whether it is enough."""
        assert looks >= 0, f"{looks} looks"
        self._spent += looks
        return self._spent >= LOOKED_MAX

    def _leaves(self, slot: int) -> Iterator[SequenceHash]:
        """Yield the block of a slot, if it may leave."""
        if self.table.pin_count(slot) and not self._even_pinned:
            self.kept += 1
            return
        self._selected += 1
        name = self.table.block(slot).hash
        if self._prefix is not None:
            self._removed.add(name)
        yield name

    def _everywhere(self) -> Iterator[SequenceHash | None]:
        table, count = self.table, self.table.slots_made
        for first in range(0, count, PART):
            end = min(first + PART, count)
            if self._is_spent(self._looks(first, end)):
                yield None
            for slot in range(first, end):
                block = table.committed(slot)
                if block is not None and self._namespace in (None, block.namespace):
                    yield from self._leaves(slot)

    # --- after a prefix ----------------------------------------------------------------------

    def _below_prefix(self) -> Iterator[SequenceHash | None]:
        count = self.table.slots_made
        assert count < 2**31 - 2, f"{count} slots have no numbers of 32 bits"
        # After the slots: the place of what is not below the prefix, and the prefix itself.
        outside, inside = count, count + 1
        parents = np.full(count + 2, outside, np.int32)
        parents[inside] = inside
        generations, seen = np.zeros(count + 2, np.int64), np.zeros(count, np.int64)
        for first in range(0, count, PART):
            end = min(first + PART, count)
            if self._is_spent(self._looks(first, end)):
                yield None
            generation = self.table.generation
            parents[first:end] = found = self._parents_of(first, end, count)
            generations[first:end] = [*map(generation, range(first, end))]
            seen[first:end] = [generation(parent) if parent < count else 0 for parent in found]
        # A parent's slot may have had another block when it was looked at itself.
        parents[:count][generations[parents[:count]] != seen] = outside
        depths = (parents != outside).astype(np.int32)
        depths[inside] = 0
        for spent in _climb(parents, depths, count):
            if self._is_spent(spent):
                yield None
        below = np.flatnonzero(parents[:count] == inside)
        depth = np.minimum(depths[below], _DEPTH_MAX).astype(np.uint16)
        deepest_first = below[np.argsort(_DEPTH_MAX - depth, kind="stable")]
        for first in range(0, len(deepest_first), PART):
            if self._is_spent(PART * FOLDED_LOOKS if self.table.folded_count else PART):
                yield None
            for slot in deepest_first[first : first + PART].tolist():
                is_same = self.table.generation(slot) == generations[slot]
                if is_same and self.table.committed(slot) is not None:
                    yield from self._leaves(slot)

    def _parents_of(self, first: int, end: int, count: int) -> list[int]:
        """Return for each slot the slot of its block's parent, or one of two places after all."""
        table, prefix, removed = self.table, self._prefix, self._removed
        assert prefix is not None, "no prefix was named"
        outside, inside = count, count + 1
        found: list[int] = []
        for slot in range(first, end):
            block = table.committed(slot)
            if block is None:
                found.append(outside)
                continue
            parent = None if block.hash == prefix else table.find(block.parent)
            if parent is not None and parent < count:
                found.append(parent)
            else:
                is_next = prefix in (block.hash, block.parent) or block.parent in removed
                found.append(inside if is_next else outside)
        return found


def _climb(parents: _Numbers, depths: _Numbers, count: int) -> Iterator[int]:
    """Let each pointer climb to one of the two places after the slots, adding up how deep it was.

    Yields what has been spent, in looks.
    """
    stride = PART * CLIMBS_PER_LOOK
    for _ in range(ROUNDS_MAX):
        has_climbed = False
        for first in range(0, count, stride):
            part = slice(first, min(first + stride, count))
            before = parents[part]
            after = parents[before]
            has_climbed |= bool((before != after).any())
            # A pointer and its depth move together: a part sees both of before or both of after.
            depths[part] += depths[before]
            parents[part] = after
            yield -(-(part.stop - part.start) // CLIMBS_PER_LOOK)
        if not has_climbed:
            return
