"""The consolidator's core, without IO: what blocks are called, and those without a parent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvbm_common.identity import ExtraTag, Hasher, request_extras
from kvbm_common.wire.engine_events import (
    BlockRemoved,
    BlockStored,
    OtherEvent,
)
from kvbm_common.wire.events import Stored
from kvbm_connectors.consolidator.core.hash_extras import extras_of
from kvbm_connectors.consolidator.core.messages import (
    ConsolidatorLimits,
    StreamAttached,
)

from tests.connectors.consolidator.model import (
    BLOCKS,
    NAMESPACE,
    PROMPT,
    Device,
    Harness,
    attach,
    batch_received,
    chain,
    engine_hash,
    key,
    kinds,
    removed,
    stored,
)


def test_a_salted_prompt_has_other_names(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), stored(PROMPT, salt="tenant"))
    assert harness.live[0] == set(BLOCKS) | set(chain(PROMPT, salt="tenant"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"extra_keys": (("s",), None)}, {0: [(ExtraTag.SALT, b"s")]}),
        ({"extra_keys": (("s",), None), "parent": 5}, {0: [(ExtraTag.MULTIMODAL, b"s")]}),
        ({"extra_keys": (("l",), ("l",)), "lora_name": "l"}, {0: [(ExtraTag.LORA, b"l")]}),
        (
            {"extra_keys": (("l", "l"), ("l",)), "lora_name": "l"},
            {0: [(ExtraTag.SALT, b"l"), (ExtraTag.LORA, b"l")]},
        ),
        (
            {"extra_keys": ((("img", 3), "s"), ("img2",))},
            {
                0: [(ExtraTag.MULTIMODAL, b"img:3"), (ExtraTag.SALT, b"s")],
                1: [(ExtraTag.MULTIMODAL, b"img2")],
            },
        ),
        ({"extra_keys": (None, (7,))}, {1: [(ExtraTag.OTHER, b"\x07")]}),
        (
            {"extra_keys": ((["lora", "l", "/l"], ["mm", "img", 3], ["cache_salt", "s"]),
                            (("lora", "l", "/l"), ("prompt_embeds", b"d"))), "lora_name": "l"},
            {
                0: [(ExtraTag.MULTIMODAL, b"img:3"), (ExtraTag.SALT, b"s"), (ExtraTag.LORA, b"l")],
                1: [(ExtraTag.OTHER, b"\xc4\x01d")],
            },
        ),
        ({"extra_keys": (("cache_salt", ["mm", 3, "img"]),)},
         {0: [(ExtraTag.SALT, b"cache_salt"), (ExtraTag.OTHER, b"\x93\xa2mm\x03\xa3img")]}),
        ({"cache_salt": "s"}, {0: [(ExtraTag.SALT, b"s")]}),
        ({"cache_salt": "s", "extra_keys": (("i",), None)},
         {0: [(ExtraTag.MULTIMODAL, b"i"), (ExtraTag.SALT, b"s")]}),
        ({"lora_id": 4}, {0: [(ExtraTag.LORA, b"#4")]}),
        ({"lora_name": "l", "parent": 5, "extra_keys": (("l",), ("l",))}, {}),
    ],
)  # fmt: skip
def test_extras_are_tagged(fields: dict[str, Any], expected: dict[int, Any]) -> None:
    event = BlockStored(block_hashes=(1, 2), token_ids=(1, 2, 3, 4), block_size=2)
    assert extras_of(msgspec.structs.replace(event, **fields)) == expected


def test_lora_and_salt_agree_with_the_request_s_own_name(harness: Harness) -> None:
    event = msgspec.structs.replace(
        stored(PROMPT), lora_name="poet", extra_keys=(("poet", "tenant"), ("poet",), ("poet",))
    )
    harness.batch(0, event)
    named = Hasher(NAMESPACE).chain(PROMPT, extras=request_extras(lora="poet", salt="tenant"))
    assert harness.live[0] == set(named)


def test_groups_have_namespaces_of_their_own(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), msgspec.structs.replace(stored(PROMPT), group_idx=1))
    first, second = harness.events[1:]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.group, second.group) == (0, 1)
    assert first.namespace == NAMESPACE.digest.hex()
    assert second.namespace == msgspec.structs.replace(NAMESPACE, group=1).digest.hex()
    assert {run.hashes[0] for run in first.runs}.isdisjoint(second.runs[0].hashes)


def test_a_group_has_blocks_of_the_size_that_was_said() -> None:
    """Goal: a group's names are those of its own namespace, whose blocks have more tokens."""
    wide = msgspec.structs.replace(NAMESPACE, group=1, block_tokens=4)
    harness = Harness()
    said = msgspec.structs.replace(attach(), group_namespaces=[wide])
    harness.send(StreamAttached(said, b"peer0"))
    harness.grant()
    harness.answer(Device())
    harness.batch(0, stored(PROMPT), msgspec.structs.replace(stored(PROMPT, size=4), group_idx=1))
    first, second = [event for event in harness.events if isinstance(event, Stored)]
    assert first.runs[0].hashes == [block.hex() for block in BLOCKS]
    assert second.namespace == wide.digest.hex()
    assert second.runs[0].hashes == [block.hex() for block in Hasher(wide).chain(PROMPT)]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(PROMPT, size=3), "block_size"),
        (msgspec.structs.replace(stored(PROMPT), medium="CPU"), "other_medium"),
        (msgspec.structs.replace(stored(PROMPT), locality="REMOTE"), "other_medium"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(1, 2, 3)), "short_tokens"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(*PROMPT, 7, 8)), "masked_blocks"),
        (msgspec.structs.replace(stored(PROMPT), token_ids=(1, 2, 3, 4, 5, -6)), "bad_tokens"),
        (msgspec.structs.replace(stored(PROMPT), block_hashes=(1, 1, 2)), "name_conflict"),
        (removed(12345), "removed_unknown"),
        (OtherEvent(type="New", reason="unknown_type"), "unknown_type"),
    ],
)
def test_what_cannot_be_named_is_dropped_and_counted(
    harness: Harness, event: BlockStored | BlockRemoved, reason: str
) -> None:
    harness.batch(0, event)
    harness.batch(1, stored((7, 8)))
    assert harness.core.statistics().drops[reason] > 0
    assert harness.live[0] == set(chain((7, 8)))


def test_one_engine_hash_for_two_contents_is_not_believed(harness: Harness) -> None:
    other = msgspec.structs.replace(stored((7, 8)), block_hashes=(engine_hash(PROMPT[:2]),))
    harness.batch(0, stored(PROMPT), other)
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().drops["name_conflict"] == 1


def test_an_orphan_waits_for_its_parent(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=2))
    harness.batch(1, stored(PROMPT[:4], start=1))
    assert harness.core.statistics().orphan_blocks == 2
    assert kinds(harness) == ["cleared"]
    harness.batch(2, stored(PROMPT[:2]))
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().orphan_blocks == 0


def test_an_orphan_that_was_removed_meanwhile_does_not_stay(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=1))
    harness.batch(1, removed(engine_hash(PROMPT)))
    harness.batch(2, stored(PROMPT[:2]))
    assert harness.live[0] == set(BLOCKS[:2])


def test_an_old_orphan_asks_for_a_replay_and_is_then_dropped(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT, start=1))
    harness.tick(500)
    assert harness.replays == []
    harness.tick(2_000)
    assert [replay.from_seq for replay in harness.replays] == [1]
    harness.answer(Device())
    assert harness.core.statistics().orphan_blocks == 0
    assert harness.core.statistics().drops["orphan"] == 2
    assert kinds(harness) == ["cleared"]


def test_an_old_orphan_finds_its_parent_in_the_replay(harness: Harness) -> None:
    device = Device()
    device.publish(stored(PROMPT, start=1))
    device.publish(stored(PROMPT[:2]))
    harness.send(batch_received(key(), 0, device.batches[0]))
    harness.tick(2_000)
    harness.answer(device)
    assert harness.live[0] == set(BLOCKS)


def test_orphans_are_bounded() -> None:
    harness = Harness(ConsolidatorLimits(orphan_blocks_max=2))
    harness.attach()
    harness.batch(0, stored(PROMPT, start=1), stored((*PROMPT, 7, 8), start=3))
    assert harness.core.statistics().orphan_blocks == 2
    assert harness.core.statistics().drops["orphans_full"] == 1


def test_a_removed_parent_is_still_a_parent(harness: Harness) -> None:
    """A sliding window may drop a block and then store the one after it."""
    harness.batch(0, stored(PROMPT[:4]), removed(engine_hash(PROMPT[:4])))
    harness.batch(1, stored(PROMPT, start=2))
    assert harness.live[0] == {BLOCKS[0], BLOCKS[2]}
