"""Names: the tokens behind our hashes, as engines say them, for routers that hash for themselves.

Tiers announce blocks by our hash alone. A block that no engine of this host has computed since we
started has no tokens here, and routers that need them cannot be told of it until one does.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.engine_events import BlockStored

RETIRED_MAX = 65_536
"""Names of blocks that nobody has any more, kept because a tier's word of one may come late."""


class Name(NamedTuple):
    """What an engine said of a block when it stored it."""

    tokens: bytes
    """Token ids as native u32."""
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None


class NamedBlocks(NamedTuple):
    """A run of blocks and what an engine said of them."""

    hashes: list[SequenceHash]
    names: list[Name]


def names_of(event: BlockStored) -> list[Name]:
    """What an event says of each of its blocks."""
    size, keys = event.block_size * 4, event.extra_keys or ()
    tokens = array("I", event.token_ids).tobytes()
    return [
        Name(
            tokens[index * size : (index + 1) * size],
            event.lora_name,
            keys[index] if index < len(keys) else None,
        )
        for index in range(len(event.block_hashes))
    ]


class Names:
    """All names of one host."""

    def __init__(self, retired_max: int = RETIRED_MAX) -> None:
        self._retired_max = retired_max
        self._names: dict[SequenceHash, Name] = {}
        self._retired: dict[SequenceHash, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def get(self, block: SequenceHash) -> Name | None:
        """A block's name, if it has one."""
        return self._names.get(block)

    def learn(self, named: NamedBlocks) -> list[SequenceHash]:
        """An engine stores these blocks; returns those that had no name."""
        new = [block for block in named.hashes if block not in self._names]
        self._names.update(zip(named.hashes, named.names, strict=True))
        for block in self._retired.keys() & named.hashes if self._retired else ():
            del self._retired[block]
        return new

    def retire(self, block: SequenceHash) -> None:
        """Nobody has this block any more."""
        if block in self._names:
            self._retired[block] = None
            if len(self._retired) > self._retired_max:
                oldest = next(iter(self._retired))
                del self._retired[oldest]
                del self._names[oldest]

    def keep(self, block: SequenceHash) -> None:
        """Somebody has it again."""
        self._retired.pop(block, None)

    def check(self) -> None:
        """What has retired has a name, and is bounded."""
        assert self._retired.keys() <= self._names.keys()
        assert len(self._retired) <= self._retired_max
