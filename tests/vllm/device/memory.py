"""Device memory whose bytes follow from what they stand for, and what attention reads of it.

A token's KV stands for its whole prefix: it is a number made of all tokens up to it. A block of
attention has one for each of its tokens, a block of states one. Who reads a block for another
prefix, another group or another boundary finds another number. What attention looks at follows from
vLLM's spec alone, not from the rules of the product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


class Memory:
    """The blocks of one device."""

    def __init__(self, blocks: int, groups: Sequence[Group], drafting: Sequence[int] = ()) -> None:
        self.cells: list[Cell] = [{} for _ in range(blocks)]
        self.groups = groups
        self._drafting = drafting
        """Groups of a draft model: its pass goes on when its step has been reported."""
        self._stream: deque[Sequence[Part] | int] = deque()
        """What the device has yet to do: a draft model's passes, and marks."""
        self.passed: list[int] = []
        """Marks that the device has come to."""

    def zero(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.cells[block] = {}

    def copy(self, source: int, target: int) -> None:
        self.cells[target] = dict(self.cells[source])

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
        for token in range(part.start, part.end):
            block = table[token // size]
            if block == 0:
                raise WrongBytes(f"{part.name} writes token {token} into no block, {group.kind}")
            cell = self.cells[block]
            if any(at == STATE for at in cell):
                self.cells[block] = cell = {}
            cell[token % size] = (group.number, part.prefixes[token])

    def _look(self, group: Group, part: Part) -> None:
        size, table = group.spec.block_size, part.tables[group.number]
        for token in range(group.looks_back_to(part.start), part.end):
            found = self.cells[table[token // size]].get(token % size)
            if found != (group.number, part.prefixes[token]):
                raise WrongBytes(
                    f"{part.name}, tokens {part.start}-{part.end}, group {group.number} "
                    f"({group.kind}): token {token} in block {table[token // size]} is {found}"
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
                found = self.cells[table[source]].get(STATE)
                if found != (group.number, part.prefixes[part.start - 1]):
                    raise WrongBytes(
                        f"{part.name} runs on from token {part.start}, group {group.number}: the "
                        f"state in block {table[source]} is {found}"
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
        self.cells[block] = {STATE: (group.number, part.prefixes[end - 1])}
