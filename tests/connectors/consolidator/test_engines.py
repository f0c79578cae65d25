"""Every engine's frames, from tests/golden/engine_frames, through the whole core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.identity import ExtraTag, SequenceHash
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    decode_batch,
    split_published,
    split_replayed,
)
from kvbm_connectors.consolidator.core.messages import ReplayDone
from kvbm_connectors.trtllm.events import TrtllmEvents

from tests.connectors.consolidator.model import HASHER, Harness, batch_received, chain, key

DIRECTORY = Path(__file__).parents[2] / "golden" / "engine_frames"
STREAMS = sorted(path for path in DIRECTORY.glob("*.json") if path.stem != "trtllm_pulled")


def load(path: Path) -> dict[str, Any]:
    """One golden file."""
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["source"], "a golden file says where it comes from"
    return document


def blocks_of(prompts: list[list[int]]) -> set[SequenceHash]:
    """All blocks of some prompts."""
    return {block for prompt in prompts for block in chain(tuple(prompt))}


def frames_of(document: dict[str, Any], kind: str) -> list[list[bytes]]:
    """Frames as a socket gives them."""
    return [[bytes.fromhex(frame) for frame in message] for message in document[kind]]


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_an_engine_s_stream_is_understood(path: Path) -> None:
    """Live: what is held after the first batch, and at the end; multimodal content apart."""
    document = load(path)
    harness = Harness()
    harness.attach()
    for number, message in enumerate(frames_of(document, "published")):
        frame = split_published(message)
        assert frame.topic == document["topic"].encode()
        batch = decode_batch(frame.payload)
        harness.send(batch_received(key(), frame.seq, batch))
        if number == 0:
            wanted = blocks_of(document["held_after_first"]) | multimodal(document)
            assert harness.live[0] == wanted
    assert harness.live[0] == blocks_of(document["holds"])
    assert harness.merged.blocks() == blocks_of(document["holds"])


def multimodal(document: dict[str, Any]) -> set[SequenceHash]:
    """Blocks of tokens 5, 6 after 1 to 4 that hold some content."""
    parent = chain((1, 2, 3, 4))[-1]
    return {
        HASHER.chain((5, 6), parent=parent,
                     extras={0: [(ExtraTag.MULTIMODAL, text.encode()) for text in texts]})[0]
        for texts in document.get("multimodal", ())
    }  # fmt: skip


@pytest.mark.parametrize(
    "path", [path for path in STREAMS if load(path)["replayed"]], ids=lambda path: path.stem
)
def test_an_engine_s_replay_is_understood(path: Path) -> None:
    """The same from a replay, in the engine's framing, to a consolidator that comes late."""
    document = load(path)
    harness = Harness()
    harness.attach(epoch=False)
    harness.grant()
    asked = harness.replays.pop()
    for message in frames_of(document, "replayed"):
        frame = split_replayed(message)
        if frame.is_end:
            harness.send(ReplayDone(asked.key, asked.replay))
        else:
            batch = decode_batch(frame.payload)
            harness.send(batch_received(asked.key, frame.seq, batch, asked.replay))
    assert harness.live[0] == blocks_of(document["holds"])


def test_lower_tiers_and_unusable_events_are_counted() -> None:
    """SGLang's own tiers are not ours to announce, and pairs of tokens have no name."""
    harness = Harness()
    harness.attach()
    for message in frames_of(load(DIRECTORY / "sglang_0.5.json"), "published"):
        frame = split_published(message)
        harness.send(batch_received(key(), frame.seq, decode_batch(frame.payload)))
    drops = harness.core.statistics().drops
    assert (drops["other_medium"], drops["token_pairs"]) == (4, 1)


# ---- TensorRT-LLM's pulled events ------------------------------------------------------------


def test_pulled_events_become_vllm_s() -> None:
    """1. Stored, with what cannot be named left out. 2. A move to host memory and a removal. 3. A
    hole in the numbers clears; what was known before it counts no more."""
    first, second = load(DIRECTORY / "trtllm_pulled.json")["pulls"]
    events = TrtllmEvents(block_tokens=2)
    taken = events.translate(first)
    assert [event.block_hashes for event in taken if isinstance(event, BlockStored)] == [
        (11,), (12,), (14,), (21,), (12,),
    ]  # fmt: skip
    assert taken[-3:] == [
        BlockRemoved(block_hashes=(12,), medium="GPU"),
        BlockStored(block_hashes=(12,), parent=11, token_ids=(3, 4), block_size=2, medium="CPU"),
        BlockRemoved(block_hashes=(14,), medium="GPU"),
    ]
    assert dict(events.drops) == {
        "partial": 1, "token_extra": 1, "window": 1, "removed_unknown": 2,
    }  # fmt: skip
    again = events.translate(second)
    assert [type(event) for event in again] == [
        BlockRemoved, BlockStored, AllBlocksCleared, BlockStored,
    ]  # fmt: skip
    assert (events.drops["gap"], events.drops["updated_unknown"]) == (1, 1)


def test_pulled_events_reach_the_consolidator() -> None:
    """Named by tokens, salt and multimodal keys, as if the engine had said them on vLLM's wire."""
    first, _ = load(DIRECTORY / "trtllm_pulled.json")["pulls"]
    harness = Harness()
    harness.attach()
    events = TrtllmEvents(block_tokens=2).translate(first)
    harness.send(batch_received(key(), 0, EngineBatch(100.0, tuple(events), 0)))
    assert harness.live[0] == {chain((1, 2))[0], chain((1, 2), salt="tenant")[0]}
