"""Compact batches: engine batches whose token ids are views of u32, one piece of memory an event.

Where hundreds of batches wait to be applied together, an object for every id would cost more than
all that is done with them. A reader of msgpack that makes no such objects saves half of decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbm_common.identity import IdentityError, pack_tokens
from kvbm_common.wire.codec import UNREADABLE
from kvbm_common.wire.engine_events import (
    EVENTS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    batch_of,
    checked_size,
    decode_batch,
    normalised,
)

PAYLOAD_BYTES_MIN = 320
"""Bytes of a payload from which on a reader of token ids saves more than its call costs: those of
some four blocks."""
ReadTokens = Callable[[bytes], bytes | None]
"""Returns the token ids of an array of msgpack as u32; None: they are to be read the usual way."""


class _UnreadStored(BlockStored, frozen=True, kw_only=True, tag="BlockStored", gc=False):
    """Stored blocks whose token ids are an array of msgpack, until they are read."""

    token_ids: msgspec.Raw


class _UnreadBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The layout of today, without the token ids."""

    ts: float
    events: Annotated[
        tuple[_UnreadStored | BlockRemoved | AllBlocksCleared, ...], Meta(max_length=EVENTS_MAX)
    ]
    dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_UnreadBatch)


def compact(batch: EngineBatch) -> EngineBatch:
    """Turn the token ids of a batch into views of u32; return it.

    To be called before other code has the batch. What are no ids stay as they are: who names the
    blocks says so.
    """
    for event in batch.events:
        if isinstance(event, BlockStored):
            try:
                packed = memoryview(pack_tokens(event.token_ids))
            except IdentityError:
                continue
            msgspec.structs.force_setattr(event, "token_ids", packed.cast("I"))
    return batch


def decode_compact(payload: bytes, read_tokens: ReadTokens | None) -> EngineBatch:
    """Decode a payload as `compact(decode_batch(payload))` does; raises WireError."""
    is_short = len(payload) < PAYLOAD_BYTES_MIN
    batch = None if is_short or read_tokens is None else _read(payload, read_tokens)
    if batch is None:
        return compact(decode_batch(payload))
    return batch_of(batch.ts, map(normalised, batch.events), batch.dp_rank)


def _read(payload: bytes, read_tokens: ReadTokens) -> _UnreadBatch | None:
    """Decode a batch and its token ids; None: it has another layout, or what are no ids."""
    try:
        batch = _decoder.decode(checked_size(payload))
    except UNREADABLE:
        return None
    for event in batch.events:
        if isinstance(event, _UnreadStored):
            packed = read_tokens(bytes(event.token_ids))
            if packed is None:
                return None
            msgspec.structs.force_setattr(event, "token_ids", memoryview(packed).cast("I"))
    return batch
