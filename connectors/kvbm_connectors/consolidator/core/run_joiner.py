"""Run joiner: stored events that continue one another become one, while nothing else happens.

An engine computes a prompt in pieces, and publishes an event for each. An event costs more than its
blocks do. So under load, when many come at once, the pieces of a prompt are put together again
before anything is looked up.

    [a b] after nothing · [x y] after p · [c d] after b   ──►   [a b c d] · [x y]

A joined event is only a shorter way: where it cannot be used, its parts are taken one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
from kvbm_common.wire.engine_events import BlockStored, EngineHash

Parts = list[BlockStored]
"""Events that each continue the one before; at least one."""
_Tail = tuple[int | None, EngineHash]
"""A group, and a block that another event may continue."""


class RunJoiner:
    """The stored events of one stream that have been put off."""

    def __init__(self) -> None:
        self._joined: list[Parts] = []
        """In the order of the first parts: a child comes after the event that stores its parent."""
        self._tails: dict[_Tail, Parts] = {}
        self._hashes: dict[int | None, set[EngineHash]] = {}
        """Every block that was put off, by group: none is put off twice, so their order is free."""

    def add(self, event: BlockStored) -> bool:
        """Put an event off. False: the others must be taken first."""
        if not event.block_hashes:
            return True
        group, parent = event.group_idx, event.parent
        hashes = self._hashes.get(group)
        if hashes is None:
            hashes = self._hashes[group] = set()
        count = len(hashes) + len(event.block_hashes)
        hashes.update(event.block_hashes)
        # One look at each instead of two. An event that names a block twice goes alone.
        if len(hashes) < count and self._joined:
            return False
        parts = None if parent is None else self._tails.get((group, parent))
        if parts is not None and _continues(event, parts[0]):
            assert parent is not None, "it has been found"
            del self._tails[group, parent]
            parts.append(event)
        else:
            parts = [event]
            self._joined.append(parts)
        self._tails[group, event.block_hashes[-1]] = parts
        return True

    def take(self) -> list[Parts]:
        """Return all events that were put off, in groups that continue one another, and forget
        them."""
        joined = self._joined
        if joined:
            self._joined = []
            self._tails.clear()
            self._hashes.clear()
        assert not self._tails, f"{len(self._tails)} events are continued after they were taken"
        return joined


def join(parts: Parts) -> BlockStored:
    """Join the parts into one event that says the same."""
    assert parts, "an event has a part"
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[0],
        block_hashes=tuple(chain.from_iterable(part.block_hashes for part in parts)),
        token_ids=_tokens_of(parts),
    )


def _tokens_of(parts: Parts) -> Sequence[int]:
    """Return the token ids of all parts, packed if they all are, as those that came from a
    socket."""
    packed = [part.token_ids for part in parts if isinstance(part.token_ids, memoryview)]
    if len(packed) == len(parts):
        return memoryview(b"".join(packed)).cast("I")
    return tuple(chain.from_iterable(part.token_ids for part in parts))


def _continues(event: BlockStored, first: BlockStored) -> bool:
    """Tell whether these are the same kind of blocks, and the later ones have no further fields.

    Each event has the tokens of its blocks: else one's surplus would pass for another's.
    """
    return (
        len(event.token_ids) == len(event.block_hashes) * event.block_size
        and len(first.token_ids) == len(first.block_hashes) * first.block_size
        and not (event.extra_keys and any(event.extra_keys))
        and event.block_size == first.block_size
        and event.medium == first.medium
        and event.locality == first.locality
        and event.lora_name == first.lora_name
        and event.lora_id == first.lora_id
    )
