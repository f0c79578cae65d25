"""Engine events: the KV event stream of vLLM, SGLang and TensorRT-LLM on ZMQ, in and out.

An engine's PUB sends three frames per batch, and its ROUTER sends the same again on request:

    published   topic ‖ seq u64 BE ‖ payload
    replayed    b"" ‖ topic ‖ seq ‖ payload      vLLM ≥ 0.26, SGLang
                b"" ‖ seq ‖ payload              vLLM ≤ 0.25
                seq = ff×8 ends a replay
    asked       b"" ‖ first seq u64 BE           (a REQ socket adds the empty frame itself)
    payload     msgpack [ts, [event, …], data-parallel rank or nil]
    event       {"type": "BlockStored", …}       vLLM ≥ 0.24, SGLang: unknown keys are ignored
                ["BlockStored", …]               vLLM ≤ 0.23: positional

Engine hashes are integers (vLLM's unsigned, SGLang's signed; here always unsigned 64 bit) or raw
bytes. They mean something only beside the engine that said them: identity.py has our own.
Source: vllm/distributed/kv_events.py; frames captured from vLLM 0.32, and frames of every engine's
layout, are in tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, UNREADABLE, WireError

EngineHash = int | bytes
"""An engine's own hash of a block: an unsigned 64-bit integer, or 8 to 64 bytes."""

END_SEQ = 2**64 - 1
"""The sequence number that ends a replay."""
SEQ_BYTES = 8
HASH_MASK = 2**64 - 1
TS_MAX = 1e11
"""The year 5138: a larger time stamp is not in seconds."""
EVENTS_MAX = 65_536
"""Events in one batch: a step of vLLM has some hundreds."""

_WireHash = int | Annotated[bytes, Meta(min_length=8, max_length=64)]
_Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# msgspec decodes the one; a reader may as well have the other, a view of packed ones.
if TYPE_CHECKING:
    TokenIds = Sequence[int]
else:
    TokenIds = tuple[int, ...]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True, gc=False):
    pass


class BlockStored(_Event, frozen=True, kw_only=True, gc=False):
    """The engine caches these blocks now: each one's parent is the one before it.

    `token_ids` are those of all blocks. They are more than `len(block_hashes) * block_size` when
    the engine left blocks out (a sliding window); which ones, it does not say.
    """

    block_hashes: tuple[_WireHash, ...]
    parent: _WireHash | None = msgspec.field(name="parent_block_hash", default=None)
    """The block before the first one; None at the start of a prompt."""
    token_ids: TokenIds
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    """`GPU` or None for device memory; other names are tiers of the engine's own."""
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """Per block, what else the engine hashed: LoRA name, salt, multimodal keys, untagged."""
    group_idx: _Natural | None = None
    """KV cache group of a hybrid model."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """`REMOTE`: not this engine's memory."""
    cache_salt: str | None = None
    """SGLang says the salt here."""
    mm_keys: Any = None
    """TensorRT-LLM says multimodal keys here; decoding moves them to `extra_keys`."""


class BlockRemoved(_Event, frozen=True, kw_only=True, gc=False):
    """The engine has dropped these blocks: one device block each."""

    block_hashes: tuple[_WireHash, ...]
    medium: str | None = None
    group_idx: _Natural | None = None
    locality: str | None = None


class AllBlocksCleared(_Event, frozen=True, kw_only=True, gc=False):
    """This publisher's cache is empty: every medium, every group."""


class OtherEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event that we cannot use. It is counted; the rest of its batch is good."""

    type: str
    reason: str


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared | OtherEvent


class EngineBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events that an engine published in one step."""

    ts: float
    """Wall clock of the engine, seconds."""
    events: tuple[EngineEvent, ...]
    dp_rank: int | None = None


class EngineFrame(NamedTuple):
    """One message of a stream or of a replay, taken apart."""

    topic: bytes
    seq: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        """Tell whether this message ends a replay."""
        return self.seq == END_SEQ


class _MapBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The layout of today, decoded at once; everything else takes the slow way."""

    ts: float
    events: Annotated[tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...], Meta(max_length=EVENTS_MAX)]  # fmt: skip # noqa: E501
    dp_rank: int | None = None


class _RawBatch(msgspec.Struct, frozen=True):
    ts: float
    events: Annotated[list[Any], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


_TYPES: dict[str, Any] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_POSITIONS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Order of the fields in the array layout; what comes after them is ignored."""

_WITH_HASHES = (BlockStored, BlockRemoved)

_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_any_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


# ---- frames ----------------------------------------------------------------------------------


def split_published(frames: Sequence[bytes]) -> EngineFrame:
    """Split a message of an engine's PUB; raises WireError."""
    if len(frames) != 3:
        raise _malformed(f"{len(frames)} frames instead of topic, seq and payload")
    return EngineFrame(frames[0], _seq_of(frames[1]), checked_size(frames[2]))


def split_replayed(frames: Sequence[bytes]) -> EngineFrame:
    """Split a message of an engine's replay ROUTER, as a DEALER sees it; raises WireError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise _malformed(f"{len(frames)} frames are no replay")
    topic = frames[1] if len(frames) == 4 else b""
    return EngineFrame(topic, _seq_of(frames[-2]), checked_size(frames[-1]))


def published_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames that a PUB sends."""
    return [topic, seq.to_bytes(SEQ_BYTES, "big"), payload]


def replay_request(from_seq: int) -> list[bytes]:
    """Return what a DEALER sends to have everything from `from_seq` again."""
    return [b"", from_seq.to_bytes(SEQ_BYTES, "big")]


def split_replay_request(frames: Sequence[bytes]) -> int:
    """Return the first sequence number that is asked for; raises WireError."""
    if len(frames) != 2 or frames[0]:
        raise _malformed(f"{len(frames)} frames are no replay request")
    return _seq_of(frames[1])


def replayed_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return one message of a replay, after the asker's identity, as vLLM ≥ 0.26 frames it."""
    return [b"", topic, seq.to_bytes(SEQ_BYTES, "big"), payload]


def replay_end_frames() -> list[bytes]:
    """Return the frames of the end of a replay."""
    return replayed_frames(b"", END_SEQ, b"")


# ---- payloads --------------------------------------------------------------------------------


def encode_batch(batch: EngineBatch) -> bytes:
    """Encode a payload in the map layout; fields without a default in vLLM stay, even as nil."""
    return _encoder.encode((batch.ts, [_as_map(event) for event in batch.events], batch.dp_rank))


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode a payload in any layout; raises WireError.

    An event of an unknown type becomes an `OtherEvent`; a known one that is malformed spoils the
    batch, because it may be a removal, and to miss one is to lie.
    """
    checked_size(payload)
    try:
        batch = _map_decoder.decode(payload)
    except msgspec.ValidationError:
        return _decode_slowly(payload)
    except UNREADABLE as error:
        raise _malformed(str(error)) from error
    return batch_of(batch.ts, map(normalised, batch.events), batch.dp_rank)


def _decode_slowly(payload: bytes) -> EngineBatch:
    try:
        raw = _any_decoder.decode(payload)
        if isinstance(raw, list):
            raw = dict(zip(("ts", "events", "data_parallel_rank"), raw, strict=False))
        batch = msgspec.convert(raw, _RawBatch)
        events = [normalised(_event_of(event)) for event in batch.events]
    except UNREADABLE as error:
        raise _malformed(str(error)) from error
    return batch_of(batch.ts, events, batch.data_parallel_rank)


def batch_of(ts: float, events: Iterable[EngineEvent], dp_rank: int | None) -> EngineBatch:
    """Return a batch; raises WireError unless its time stamp is one."""
    if not 0 <= ts <= TS_MAX:  # NaN is neither.
        raise _malformed(f"a time stamp of {ts} s")
    return EngineBatch(ts, tuple(events), dp_rank)


def _event_of(raw: Any) -> EngineEvent:
    """Decode one event in either layout; raises msgspec.ValidationError."""
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        name = raw[0]
        fields = dict(zip(_POSITIONS.get(name, ()), raw[1:], strict=False))
    elif isinstance(raw, dict) and isinstance(raw.get("type"), str):
        name, fields = raw["type"], raw
    else:
        raise msgspec.ValidationError(
            "an event is a map with a type or an array that begins with it"
        )
    if name not in _TYPES:
        return OtherEvent(type=name[:64], reason="unknown_type")
    tokens = fields.get("token_ids")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        # SGLang's speculative decoding caches pairs of tokens, which no prompt can name.
        return OtherEvent(type=name, reason="token_pairs")
    event: EngineEvent = msgspec.convert(fields | {"type": name}, _TYPES[name])
    return event


def normalised(event: EngineEvent) -> EngineEvent:
    """Return the event with unsigned hashes, and with its `mm_keys` as extra keys.

    Where `mm_keys` has an unknown shape, return an `OtherEvent` instead.
    """
    if not isinstance(event, _WITH_HASHES):
        return event
    if isinstance(event, BlockStored) and event.mm_keys:
        keys = _multimodal(event)
        if keys is None:
            # Content that we cannot tell from other content must not get a name.
            return OtherEvent(type="BlockStored", reason="mm_keys")
        event = msgspec.structs.replace(event, extra_keys=keys, mm_keys=None)
    changes: dict[str, Any] = {}
    if _any_negative(event.block_hashes):
        changes["block_hashes"] = tuple(map(unsigned, event.block_hashes))
    if isinstance(event, BlockStored) and isinstance(event.parent, int) and event.parent < 0:
        changes["parent"] = unsigned(event.parent)
    return msgspec.structs.replace(event, **changes) if changes else event


def _multimodal(event: BlockStored) -> tuple[tuple[Any, ...] | None, ...] | None:
    """Return `mm_keys` as extra keys: per block, pairs of content hash and offset.

    None: some other shape. A pair is an array or a map of `hash` and `start_offset`.
    """
    count = len(event.block_hashes)
    if not isinstance(event.mm_keys, list) or len(event.mm_keys) != count:
        return None
    extras: list[tuple[Any, ...] | None] = []
    for index, keys in enumerate(event.mm_keys):
        pairs: list[tuple[str, int]] = []
        if keys and not isinstance(keys, list):
            return None
        for key in keys or ():
            match key:
                case [str(content), int(offset)]:
                    pairs.append((content, offset))
                case {"hash": str(content), "start_offset": int(offset)}:
                    pairs.append((content, offset))
                case _:
                    return None
        before = (event.extra_keys or ())[index : index + 1]
        extras.append((*(before[0] or () if before else ()), *pairs) or None)
    return tuple(extras)


def _any_negative(hashes: tuple[EngineHash, ...]) -> bool:
    try:
        lowest = min(hashes, default=0)
    except TypeError:  # Integers and bytes in one event.
        return True
    return isinstance(lowest, int) and lowest < 0


def unsigned(value: EngineHash) -> EngineHash:
    """Return an engine hash with a signed integer taken as its unsigned twin."""
    return value & HASH_MASK if isinstance(value, int) else value


def _as_map(event: EngineEvent) -> dict[str, Any]:
    assert not isinstance(event, OtherEvent), event
    always = {"block_hashes", "parent", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    fields: dict[str, Any] = {"type": event.__struct_config__.tag}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, memoryview):
            value = value.tolist()
        if value is not None or name in always:
            fields["parent_block_hash" if name == "parent" else name] = value
    return fields


def _seq_of(frame: bytes) -> int:
    if len(frame) != SEQ_BYTES:
        raise _malformed(f"a sequence number has {SEQ_BYTES} bytes, got {len(frame)}")
    return int.from_bytes(frame, "big")


def checked_size(payload: bytes) -> bytes:
    """Return a payload; raises WireError if it is too large."""
    if len(payload) > MESSAGE_BYTES_MAX:
        text = f"{len(payload)} bytes, more than the {MESSAGE_BYTES_MAX} allowed"
        raise WireError(text, kind="oversized")
    return payload


def _malformed(text: str) -> WireError:
    return WireError(text, kind="malformed")
