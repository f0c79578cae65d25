"""Engine events: both layouts, both replay framings, bad input, and a real vLLM's whole capture."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import Hasher, SequenceHash, pack_tokens, request_extras
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, WireError
from kvbm_common.wire.compact_batches import compact
from kvbm_common.wire.engine_events import (
    END_SEQ,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineHash,
    OtherEvent,
    decode_batch,
    encode_batch,
    published_frames,
    replay_end_frames,
    replay_request,
    replayed_frames,
    split_published,
    split_replay_request,
    split_replayed,
)

from tests.capture import DEVICE_BLOCKS, NAMESPACE, load_messages, load_requests


def packed(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    """A payload of hand-made events."""
    return msgspec.msgpack.encode([ts, list(events), rank])


STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "poet",
    "extra_keys": [["poet", "salt"], None],
    "group_idx": 3,
    "a_key_of_next_year": {"x": 1},
}
STORED_ARRAY = [
    "BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU", "poet", [["poet", "salt"], None], 3,
]  # fmt: skip
STORED = BlockStored(
    block_hashes=(1, 2),
    token_ids=(5, 6, 7, 8),
    block_size=2,
    medium="GPU",
    lora_name="poet",
    extra_keys=(("poet", "salt"), None),
    group_idx=3,
)

# ---- layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [STORED_MAP, STORED_ARRAY], ids=["map", "array"])
def test_a_store_decodes_from_both_layouts(layout: Any) -> None:
    assert decode_batch(packed(layout)) == EngineBatch(1.5, (STORED,), 0)


def test_removed_and_cleared_decode_from_arrays_and_maps() -> None:
    expected = (BlockRemoved(block_hashes=(9,), medium="GPU"), AllBlocksCleared())
    arrays = packed(["BlockRemoved", [9], "GPU"], ["AllBlocksCleared"])
    maps = packed(
        {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}, {"type": "AllBlocksCleared"}
    )
    assert decode_batch(arrays).events == expected
    assert decode_batch(maps).events == expected


def test_a_batch_may_be_a_map_and_may_lack_the_rank() -> None:
    as_map = msgspec.msgpack.encode({"ts": 1.5, "events": [STORED_MAP]})
    short = msgspec.msgpack.encode([1.5, [STORED_MAP]])
    assert decode_batch(as_map) == decode_batch(short) == EngineBatch(1.5, (STORED,), None)


def test_signed_and_unsigned_hashes_are_the_same() -> None:
    signed = STORED_MAP | {"block_hashes": [-1, 7], "parent_block_hash": -(2**63)}
    event = decode_batch(packed(signed)).events[0]
    assert isinstance(event, BlockStored)
    assert event.block_hashes == (2**64 - 1, 7)
    assert event.parent == 2**63


def test_hashes_may_be_bytes() -> None:
    raw: list[EngineHash] = [b"a" * 32, b"b" * 32]
    event = decode_batch(packed(STORED_MAP | {"block_hashes": raw})).events[0]
    assert isinstance(event, BlockStored)
    assert event.block_hashes == tuple(raw)
    mixed = decode_batch(packed({"type": "BlockRemoved", "block_hashes": [b"a" * 32, -1]}))
    assert mixed.events == (BlockRemoved(block_hashes=(b"a" * 32, 2**64 - 1)),)


@pytest.mark.parametrize("keys", [[5, None], ["ab", None], [{"a": 1}, None], 5, [None]])
def test_multimodal_keys_of_another_shape_leave_the_event_unnamed(keys: object) -> None:
    """Two blocks, each with a list of keys or none: anything else would give them wrong names."""
    [event] = decode_batch(packed(STORED_MAP | {"mm_keys": keys})).events
    assert event == OtherEvent(type="BlockStored", reason="mm_keys")


@pytest.mark.parametrize("group", [2**63, 2**64 - 1])
def test_a_group_that_no_event_can_name_is_malformed(group: int) -> None:
    for event in (STORED_MAP | {"group_idx": group}, ["BlockRemoved", [9], None, group]):
        with pytest.raises(WireError, match="group_idx") as caught:
            decode_batch(packed(event))
        assert caught.value.kind == "malformed"


def test_an_unknown_type_leaves_the_rest_of_the_batch_good() -> None:
    pairs = STORED_MAP | {"token_ids": [[5, 6], [6, 7], [7, 8], [8, 9]]}
    batch = decode_batch(packed({"type": "BlockMoved", "x": 1}, STORED_ARRAY, pairs, ["New", 3]))
    assert batch.events == (
        OtherEvent(type="BlockMoved", reason="unknown_type"),
        STORED,
        OtherEvent(type="BlockStored", reason="token_pairs"),
        OtherEvent(type="New", reason="unknown_type"),
    )


def test_what_we_encode_is_what_vllm_decodes_and_what_we_decode() -> None:
    """The map layout has every field without a default in vLLM, and no other empty one."""
    batch = EngineBatch(2.0, (BlockStored(block_hashes=(1,), token_ids=(1, 2), block_size=2),
                              BlockRemoved(block_hashes=(1,)), AllBlocksCleared()), 1)  # fmt: skip
    raw = msgspec.msgpack.decode(encode_batch(batch))
    assert set(raw[1][0]) == {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    }  # fmt: skip
    assert set(raw[1][1]) == {"type", "block_hashes", "medium"}
    assert raw[1][2] == {"type": "AllBlocksCleared"}
    assert decode_batch(encode_batch(batch)) == batch


def test_a_compact_batch_says_the_same_in_one_piece_of_memory_an_event() -> None:
    """Equal ids and equal bytes on the wire; what are no ids are left alone."""
    payload = packed(STORED_MAP, STORED_MAP | {"token_ids": [5, -1, 7, 8]}, ["BlockRemoved", [9]])
    good, bad, other = compact(decode_batch(payload)).events
    assert isinstance(good, BlockStored)
    assert isinstance(bad, BlockStored)
    assert isinstance(good.token_ids, memoryview)
    assert (len(good.token_ids), tuple(good.token_ids)) == (4, (5, 6, 7, 8))
    assert pack_tokens(good.token_ids) == pack_tokens((5, 6, 7, 8))
    assert (bad.token_ids, other) == ((5, -1, 7, 8), BlockRemoved(block_hashes=(9,)))
    batch = EngineBatch(1.5, (good, bad, other), 0)
    assert decode_batch(encode_batch(batch)) == decode_batch(payload)


# ---- frames ----------------------------------------------------------------------------------


def test_frames_of_a_stream_and_of_both_replays() -> None:
    assert split_published(published_frames(b"kv", 7, b"x")) == (b"kv", 7, b"x")
    assert split_replayed(replayed_frames(b"kv", 7, b"x")) == (b"kv", 7, b"x")
    assert split_replayed([b"", (7).to_bytes(8, "big"), b"x"]) == (b"", 7, b"x")
    for end in (replay_end_frames(), [b"", b"\xff" * 8, b""]):
        assert split_replayed(end).is_end
    assert replay_request(3) == [b"", b"\0" * 7 + b"\3"]
    assert split_replay_request(replay_request(END_SEQ - 1)) == END_SEQ - 1


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"t", b"x" * 8], [b"t", b"1234567", b""], [b"t", b"1" * 8, b"", b""]]
)
def test_bad_frames_are_typed(frames: list[bytes]) -> None:
    with pytest.raises(WireError) as caught:
        split_published(frames)
    assert caught.value.kind == "malformed"
    with pytest.raises(WireError):
        split_replayed([b"not empty", *frames])


def test_oversized_frames_are_typed() -> None:
    with pytest.raises(WireError) as caught:
        split_published([b"", b"\0" * 8, bytes(MESSAGE_BYTES_MAX + 1)])
    assert caught.value.kind == "oversized"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        packed(STORED_MAP)[:-3],
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.0]),
        packed(STORED_MAP, ts="now"),
        packed(STORED_MAP, ts=float("nan")),
        packed(STORED_MAP, ts=-1.0),
        packed(STORED_MAP, rank="zero"),
        packed(5),
        packed([]),
        packed({"no": "type"}),
        packed({"type": "BlockStored"}),
        packed(STORED_MAP | {"block_size": 0}),
        packed(STORED_MAP | {"block_hashes": ["text"]}),
        packed(STORED_MAP | {"block_hashes": [b"short"]}),
        packed(STORED_MAP | {"token_ids": [1.5]}),
        packed(["BlockRemoved", 5]),
        b"\x91" * 100_000,
    ],
)
def test_bad_payloads_are_typed(payload: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(payload)
    assert caught.value.kind == "malformed"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_damaged_payloads_decode_or_are_typed(seed: int, damages: int) -> None:
    """Goal: no bytes make the decoder fail otherwise. Method: real payloads with wrong bytes."""
    rng = random.Random(seed)
    payload = bytearray(rng.choice(load_messages())[1][2])
    for _ in range(damages):
        payload[rng.randrange(len(payload))] = rng.randrange(256)
    with contextlib.suppress(WireError):
        decode_batch(bytes(payload[: rng.randrange(1, len(payload) + 1)]))


# ---- the capture -----------------------------------------------------------------------------


def test_the_capture_decodes_fully() -> None:
    frames = [split_published(frames) for _, frames in load_messages()]
    batches = [decode_batch(frame.payload) for frame in frames]
    events = [event for batch in batches for event in batch.events]
    assert [frame.seq for frame in frames] == list(range(450))
    assert {frame.topic for frame in frames} == {b"kv@pod1@tiny"}
    assert sum(isinstance(event, BlockStored) for event in events) == 398
    assert sum(isinstance(event, BlockRemoved) for event in events) == 669
    assert sum(isinstance(event, AllBlocksCleared) for event in events) == 1
    assert [decode_batch(encode_batch(batch)) for batch in batches] == batches


def test_every_stored_block_of_the_capture_is_a_block_of_a_request() -> None:
    """Goal: tokens, parents and salts of all events agree with the ground truth.

    1. Each request's chain says which block (tokens, salt, parent) each of our hashes stands for.
    2. Each stored event is named by its own tokens, its parent's name and its extra keys.
    3. Its names are a window of one request's chain; one engine hash never has two names.
    4. In the end every full block of every request was stored, and nothing else.
    """
    hasher = Hasher(NAMESPACE)
    chains = [
        hasher.chain(request.computed, extras=request_extras(salt=request.cache_salt))
        for request in load_requests()
    ]
    place = {block: (n, i) for n, chain in enumerate(chains) for i, block in enumerate(chain)}
    names: dict[EngineHash, SequenceHash] = {}
    for _, frames in load_messages():
        for event in decode_batch(frames[2]).events:
            if not isinstance(event, BlockStored):
                continue
            assert event.extra_keys is not None
            salts = [keys[0] if keys else None for keys in event.extra_keys]
            assert event.parent is None or salts[0] is None, "salts are on first blocks only"
            assert not any(salts[1:])
            parent = None if event.parent is None else names[event.parent]
            extras = request_extras(salt=salts[0])
            window = hasher.chain(event.token_ids, parent=parent, extras=extras)
            n, last = place[window[-1]]
            first = last + 1 - len(window)
            assert chains[n][first : last + 1] == window
            assert parent is None if first == 0 else parent == chains[n][first - 1]
            for engine_hash, name in zip(event.block_hashes, window, strict=True):
                assert names.setdefault(engine_hash, name) == name
    assert set(names.values()) == set(place)
    assert len(names) == len(place) == 710


def test_the_capture_never_holds_more_than_the_device() -> None:
    """Removals are of live blocks, parents are live when they get a child, 64 blocks suffice."""
    live: set[EngineHash] = set()
    for _, frames in load_messages():
        for event in decode_batch(frames[2]).events:
            match event:
                case BlockStored():
                    assert event.parent is None or event.parent in live
                    assert live.isdisjoint(event.block_hashes)
                    live.update(event.block_hashes)
                case BlockRemoved():
                    assert live.issuperset(event.block_hashes)
                    live.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    live.clear()
        assert len(live) <= DEVICE_BLOCKS
