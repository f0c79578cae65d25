"""Device memory whose bytes follow from what they stand for, and what attention reads of it.

A token's KV stands for its whole prefix: it is a number made of all tokens up to it. A block of
attention has one for each of its tokens, a block of states one. Who reads a block for another
prefix, another group or another boundary finds another number. What attention looks at follows from
vLLM's spec alone, not from the rules of the product.

Blocks are dictionaries here (`Cells`), or real bytes (`pages.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Cell = dict[int, tuple[int, int]]
"""Place in the block → group and prefix."""
STATE = -1
"""The place of a state."""


class WrongBytes(AssertionError):
    """A block has not what it stands for."""


def prefixes_of(tokens: Sequence[int], known: list[int]) -> list[int]:
    """Return, for each token, a number of all tokens up to it; the first ones are `known`."""
    for token in tokens[len(known) :]:
        known.append(hash((known[-1] if known else 0, token)))
    return known


@dataclass
class Part:
    """A request's part of a step."""

    name: str
    start: int
    end: int
    tables: Sequence[Sequence[int]]
    prefixes: Sequence[int]
    """Of all tokens up to `end`."""


@dataclass
class Group:
    """One KV group, as the model's layers use it."""

    number: int
    spec: Any
    state_at: dict[str, int] = field(default_factory=dict)
    """Request → the place in its table where the running state is."""

    @property
    def first(self) -> Any:
        inner = getattr(self.spec, "kv_cache_specs", None)
        return next(iter(inner.values())) if inner else self.spec

    @property
    def kind(self) -> str:
        return type(self.first).__name__

    @property
    def is_state(self) -> bool:
        return self.kind == "MambaSpec"

    @property
    def is_scratch(self) -> bool:
        return not self.spec.prefix_cacheable

    def looks_back_to(self, token: int) -> int:
        """The first token that attention of `token` looks at."""
        if "SlidingWindow" in self.kind:
            return max(0, token - int(self.first.sliding_window) + 1)
        if "Chunked" in self.kind:
            return int(token // self.first.attention_chunk_size * self.first.attention_chunk_size)
        return 0

    def expected(self, end_block: int, prefixes: Sequence[int]) -> Cell:
        """What a full block holds, the last one of so many."""
        size = self.spec.block_size
        if self.is_state:
            return {STATE: (self.number, prefixes[end_block * size - 1])}
        first = (end_block - 1) * size
        return {at: (self.number, prefixes[first + at]) for at in range(size)}


class Blocks(Protocol):
    """What the blocks of a device hold."""

    def clear(self, block: int) -> None: ...
    def copy(self, source: int, target: int) -> None: ...
    def write(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> None: ...
    def first_wrong(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> int | None:
        """Return the index of the first place that has something else."""

    def found(self, group: Group, block: int, place: int) -> object:
        """Return what is there, for people."""


class Cells:
    """Blocks as dictionaries."""

    def __init__(self, blocks: int) -> None:
        self.content: list[Cell] = [{} for _ in range(blocks)]

    def clear(self, block: int) -> None:
        self.content[block] = {}

    def copy(self, source: int, target: int) -> None:
        self.content[target] = dict(self.content[source])

    def write(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> None:
        for block, place, prefix in zip(blocks, places, prefixes, strict=True):
            if (place == STATE) != (STATE in self.content[block]):
                self.content[block] = {}
            self.content[block][place] = (group.number, prefix)

    def first_wrong(
        self, group: Group, blocks: Sequence[int], places: Sequence[int], prefixes: Sequence[int]
    ) -> int | None:
        for at, (block, place, prefix) in enumerate(zip(blocks, places, prefixes, strict=True)):
            if self.content[block].get(place) != (group.number, prefix):
                return at
        return None

    def found(self, group: Group, block: int, place: int) -> object:
        return self.content[block].get(place)


class Memory:
    """The memory of one device, and what its model does there."""

    def __init__(
        self, blocks: Blocks, groups: Sequence[Group], drafting: Sequence[int] = ()
    ) -> None:
        self._blocks = blocks
        self.groups = groups
        self._drafting = drafting
        """Groups of a draft model: its pass goes on when its step has been reported."""
        self._stream: deque[Sequence[Part] | int] = deque()
        """What the device has yet to do: a draft model's passes, and marks."""
        self.passed: list[int] = []
        """Marks that the device has come to."""

    def zero(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks.clear(block)

    def copy(self, source: int, target: int) -> None:
        self._blocks.copy(source, target)

    def lay(self, mark: int) -> None:
        self._stream.append(mark)

    def catch_up(self, most: int = 1_000_000) -> None:
        """Do what was put into the stream, in its order."""
        for _ in range(min(most, len(self._stream))):
            next_one = self._stream.popleft()
            if isinstance(next_one, int):
                self.passed.append(next_one)
                continue
            for number in self._drafting:
                self._attend(self.groups[number], next_one)

    def compute(self, parts: Sequence[Part], checkpoints: Any) -> None:
        """Run one step: every layer writes the KV of all tokens, and then looks at it."""
        self.catch_up()
        if self._drafting:
            self._stream.append(parts)
        for group in self.groups:
            if group.is_scratch or group.number in self._drafting:
                continue
            if group.is_state:
                self._move_states(group, parts)
                self._run_states(group, parts, checkpoints)
                continue
            self._attend(group, parts)

    # --- attention --------------------------------------------------------------------------

    def _attend(self, group: Group, parts: Sequence[Part]) -> None:
        for part in parts:
            self._write(group, part)
        for part in parts:
            self._look(group, part)

    def _write(self, group: Group, part: Part) -> None:
        size, table = group.spec.block_size, part.tables[group.number]
        tokens = range(part.start, part.end)
        blocks = [table[token // size] for token in tokens]
        if 0 in blocks:
            token = tokens[blocks.index(0)]
            raise WrongBytes(f"{part.name} writes token {token} into no block, {group.kind}")
        places = [token % size for token in tokens]
        self._blocks.write(group, blocks, places, part.prefixes[part.start : part.end])

    def _look(self, group: Group, part: Part) -> None:
        size, table = group.spec.block_size, part.tables[group.number]
        tokens = range(group.looks_back_to(part.start), part.end)
        blocks = [table[token // size] for token in tokens]
        places = [token % size for token in tokens]
        right = part.prefixes[tokens.start : part.end]
        at = self._blocks.first_wrong(group, blocks, places, right)
        if at is not None:
            raise WrongBytes(
                f"{part.name}, tokens {part.start}-{part.end}, group {group.number} "
                f"({group.kind}): token {tokens[at]} in block {blocks[at]} is "
                f"{self._blocks.found(group, blocks[at], places[at])}"
            )

    # --- recurrent states ---------------------------------------------------------------------

    def _move_states(self, group: Group, parts: Sequence[Part]) -> None:
        """As vLLM's preprocess_mamba: take the running state to where this step leaves it."""
        size = group.spec.block_size
        for part in parts:
            table = part.tables[group.number]
            before = group.state_at.get(part.name, (part.start - 1) // size)
            after = -(-part.end // size) - 1
            group.state_at[part.name] = after
            if group.first.mamba_cache_mode == "align" and before not in (-1, after):
                self.copy(table[before], table[after])

    def _run_states(self, group: Group, parts: Sequence[Part], checkpoints: Any) -> None:
        size = group.spec.block_size
        for part in parts:
            table = part.tables[group.number]
            column = group.state_at[part.name]
            source = column
            if group.first.mamba_cache_mode != "align" and part.start:
                source = (part.start - 1) // size
            if part.start:
                block, right = table[source], [part.prefixes[part.start - 1]]
                if self._blocks.first_wrong(group, [block], [STATE], right) is not None:
                    raise WrongBytes(
                        f"{part.name} runs on from token {part.start}, group {group.number}: the "
                        f"state in block {block} is {self._blocks.found(group, block, STATE)}"
                    )
            self._leave_state(group, part, column, part.end)
            if group.first.mamba_cache_mode != "align":
                for end in range(part.start // size + 1, part.end // size + 1):
                    self._leave_state(group, part, end - 1, end * size)
            for at, end in checkpoints(group.first, part):
                self._leave_state(group, part, at, end)

    def _leave_state(self, group: Group, part: Part, place: int, end: int) -> None:
        block = part.tables[group.number][place]
        if block == 0:
            raise WrongBytes(f"{part.name} leaves the state of {end} tokens in no block")
        self._blocks.write(group, [block], [STATE], [part.prefixes[end - 1]])
