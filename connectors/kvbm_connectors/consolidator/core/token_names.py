"""Names: the tokens behind our hashes, as engines say them, for routers that hash for themselves.

Tiers announce blocks by our hash alone. A block that no engine of this host has computed since we
started has no tokens here, and routers that need them cannot be told of it until one does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from kvbm_common.identity import SequenceHash, pack_tokens
from kvbm_common.wire.engine_events import BlockStored

RETIRED_MAX = 65_536
"""Names of blocks without a holder, kept because a tier's event of one may come late."""

PIECES_MIN = 32
"""Pieces that numpy cuts in less time than Python."""


class Kind(NamedTuple):
    """The kind of a block: what an engine said of it besides its tokens."""

    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    cache_salt: str | None = None
    """The salt that an engine says in a field of its own; all blocks of its prompt have it."""


PLAIN = Kind()


class NamedBlocks(NamedTuple):
    """A run of blocks and what an engine said of them."""

    hashes: list[SequenceHash]
    tokens: list[bytes]
    """The token ids of each block, as LE u32."""
    kinds: list[Kind] | None = None
    """The kinds of the blocks; None: all are plain."""
    parent: SequenceHash | None = None
    """The block before the first one, whose salt these have, too."""


def named(
    hashes: list[SequenceHash],
    event: BlockStored,
    unsaid: str = "",
    parent: SequenceHash | None = None,
) -> NamedBlocks:
    """Return what an event says of its blocks, which we know under these hashes.

    SGLang's salt and what is `unsaid` become extra keys of a prompt's first block, as vLLM has
    them. Joined they are also the salt of all its blocks, as in SGLang's own events: readers of
    either example tell tenants apart.
    """
    assert event.block_size > 0, f"blocks of {event.block_size} tokens"
    size, keys = event.block_size * 4, event.extra_keys or ()
    first = tuple(key for key in (event.cache_salt, unsaid) if key)
    if first and event.parent is None:
        keys = ((*(keys[0] or () if keys else ()), *first), *keys[1:])
    packed = pack_tokens(event.token_ids)
    assert len(packed) == size * len(hashes), f"{len(hashes)} blocks, {len(packed)} bytes"
    tokens = _pieces(packed, size)
    salt = "|".join(first) or None
    if event.lora_name is None and salt is None and not any(keys):
        return NamedBlocks(hashes, tokens, parent=parent)
    kinds = [
        Kind(event.lora_name, keys[index] if index < len(keys) else None, salt)
        for index in range(len(hashes))
    ]
    return NamedBlocks(hashes, tokens, kinds, parent)


def _pieces(packed: bytes, size: int) -> list[bytes]:
    """Cut bytes into pieces of one size; many of them in half the time of slices."""
    if len(packed) < PIECES_MIN * size:
        return [packed[at : at + size] for at in range(0, len(packed), size)]
    pieces: list[bytes] = np.frombuffer(packed, f"V{size}").tolist()
    return pieces


class TokenNames:
    """All names of one host."""

    def __init__(self, retired_max: int = RETIRED_MAX) -> None:
        assert retired_max >= 0, retired_max
        self._retired_max = retired_max
        self._tokens: dict[SequenceHash, bytes] = {}
        self._kinds: dict[SequenceHash, Kind] = {}
        """The kinds of the blocks that are not plain."""
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._retired: OrderedDict[SequenceHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, block: SequenceHash) -> bool:
        return block in self._tokens

    def tokens(self, blocks: Iterable[SequenceHash]) -> bytes:
        """Return the token ids of blocks that have names, as u32."""
        return b"".join(map(self._tokens.__getitem__, blocks))

    def kind(self, block: SequenceHash) -> Kind:
        """Return what else was said of a block: its adapter, its extra keys and its salt."""
        return self._kinds.get(block, PLAIN)

    def extra_keys(self, blocks: list[SequenceHash]) -> tuple[tuple[Any, ...] | None, ...] | None:
        """Return the extra keys of each block; None where no block has any."""
        if self._kinds.keys().isdisjoint(blocks):
            return None
        keys = tuple(self.kind(block).extra_keys for block in blocks)
        return keys if any(keys) else None

    def are_plain(self, blocks: list[SequenceHash]) -> bool:
        """Return whether all blocks have names, and nothing else was said of any."""
        named = all(map(self._tokens.__contains__, blocks))
        return named and not (self._kinds and self._kinds.keys() & blocks)

    def learn(self, blocks: NamedBlocks) -> list[SequenceHash]:
        """Learn what an engine stores in these blocks; returns those that had no name."""
        hashes = blocks.hashes
        new = hashes
        if not self._tokens.keys().isdisjoint(hashes):
            new = [block for block in hashes if block not in self._tokens]
            for block in self._kinds.keys() & hashes:
                del self._kinds[block]
        self._tokens.update(zip(hashes, blocks.tokens, strict=True))
        kinds = self._kinds_of(blocks)
        if kinds is not None:
            said = zip(hashes, kinds, strict=True)
            self._kinds.update((block, kind) for block, kind in said if kind != PLAIN)
        self.keep(hashes)
        return new

    def _kinds_of(self, blocks: NamedBlocks) -> list[Kind] | None:
        """Return the kinds of blocks; None: all are plain. Their salt is that of their parent, for
        a later event says no key that its prompt's first one has shown."""
        salt = None if blocks.parent is None else self.kind(blocks.parent).cache_salt
        if salt is None:
            return blocks.kinds
        kinds = blocks.kinds or [PLAIN] * len(blocks.hashes)
        return [kind._replace(cache_salt=salt) for kind in kinds]

    def retire(self, block: SequenceHash) -> None:
        """Note that this block has no holder any more."""
        if block in self._tokens:
            self._retired[block] = None

    def forget(self) -> None:
        """Forget the oldest names without a holder, above the bound.

        Called at the end of a step: what a clear takes from a reader is often said again at once.
        """
        while len(self._retired) > self._retired_max:
            oldest, _ = self._retired.popitem(last=False)
            del self._tokens[oldest]
            self._kinds.pop(oldest, None)
        assert len(self._kinds) <= len(self._tokens), "what else was said is of named blocks"

    def keep(self, blocks: Iterable[SequenceHash]) -> None:
        """Note that these blocks have a holder again."""
        for block in self._retired.keys() & blocks if self._retired else ():
            del self._retired[block]

    def check(self) -> None:
        """Assert that what has retired, or is not plain, has a name, and that the retired are
        bounded."""
        assert self._retired.keys() <= self._tokens.keys()
        assert self._kinds.keys() <= self._tokens.keys()
        assert len(self._retired) <= self._retired_max
