"""Events that continue one another are stored as one, and nothing else comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.wire.compact_batches import compact
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockStored,
    EngineBatch,
    EngineEvent,
    decode_batch,
    encode_batch,
)
from kvbm_common.wire.events import Stored
from kvbm_connectors.consolidator.core.messages import EngineBatchesReceived
from kvbm_connectors.consolidator.core.run_joiner import RunJoiner, join

from tests.connectors.consolidator.model import (
    BLOCKS,
    PROMPT,
    Harness,
    engine_hash,
    held,
    key,
    removed,
    stored,
)

FIRST, SECOND, THIRD = stored(PROMPT[:2]), stored(PROMPT[:4], start=1), stored(PROMPT, start=2)
CHANGE = msgspec.structs.replace


def together(harness: Harness, *events: EngineEvent) -> None:
    """One batch per event, all of them at once, as they come from a socket."""
    payloads = [encode_batch(EngineBatch(100.0 + i, (event,))) for i, event in enumerate(events)]
    batches = tuple(enumerate(compact(decode_batch(payload)) for payload in payloads))
    harness.send(EngineBatchesReceived(key(), batches))


def joined(*events: BlockStored) -> list[list[BlockStored]]:
    """The parts of each event that these become."""
    joiner = RunJoiner()
    assert all(map(joiner.add, events))
    return joiner.take()


def test_pieces_of_two_prompts_are_put_together() -> None:
    other = stored((7, 8))
    assert joined(FIRST, other, SECOND, THIRD) == [[FIRST, SECOND, THIRD], [other]]
    assert join([FIRST, SECOND, THIRD]) == CHANGE(stored(PROMPT), extra_keys=FIRST.extra_keys)


def test_an_event_that_says_a_block_twice_goes_alone() -> None:
    twice = CHANGE(FIRST, block_hashes=FIRST.block_hashes[:1] * 2)
    joiner = RunJoiner()
    assert joiner.add(SECOND)
    assert not joiner.add(twice)
    assert joiner.take() == [[SECOND]]
    assert joiner.add(twice)
    assert not joiner.add(twice)
    assert joiner.take() == [[twice]]


def test_a_branch_is_an_event_of_its_own_behind_its_parent() -> None:
    branch = stored((*PROMPT[:2], 9, 9), start=1)
    assert joined(FIRST, SECOND, branch) == [[FIRST, SECOND], [branch]]


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"lora_name": "poet"},
        {"lora_id": 4},
        {"locality": "REMOTE"},
        {"block_size": 1},
        {"extra_keys": (("image", 3),)},
        {"token_ids": PROMPT},
        {"token_ids": ()},
    ],
)
def test_another_kind_of_event_is_not_joined(change: dict[str, Any]) -> None:
    assert len(joined(FIRST, CHANGE(SECOND, **change))) == 2
    if "extra_keys" not in change:
        assert len(joined(CHANGE(FIRST, **change), SECOND)) == 2


def test_a_second_copy_waits_until_the_first_is_taken() -> None:
    joiner = RunJoiner()
    assert joiner.add(FIRST)
    assert not joiner.add(FIRST)
    assert joiner.take() == [[FIRST]]
    assert joiner.add(FIRST)


def test_what_is_joined_is_announced_as_one_run(harness: Harness) -> None:
    together(harness, FIRST, SECOND, THIRD)
    event = harness.events[-1]
    assert isinstance(event, Stored)
    assert [run.hashes for run in event.runs] == [[block.hex() for block in BLOCKS]]


def test_one_bad_part_spoils_no_other(harness: Harness) -> None:
    """1. The third event uses a hash of the first for other tokens. 2. Only it is dropped."""
    liar = CHANGE(THIRD, block_hashes=FIRST.block_hashes, token_ids=(9, 9))
    together(harness, FIRST, SECOND, liar)
    assert harness.live[0] == set(BLOCKS[:2])
    assert harness.core.statistics().drops["name_conflict"] == 1


def test_of_two_contents_under_one_hash_the_first_is_believed(harness: Harness) -> None:
    """Though the second could be joined to what came before the first."""
    liar = CHANGE(stored((9, 9)), block_hashes=SECOND.block_hashes)
    together(harness, FIRST, liar, SECOND)
    one = Harness()
    one.attach()
    for seq, event in enumerate((FIRST, liar, SECOND)):
        one.batch(seq, event)
    assert harness.live == one.live


def test_the_parts_of_an_orphan_wait_each_for_itself(harness: Harness) -> None:
    together(harness, SECOND, THIRD)
    assert harness.core.statistics().orphan_blocks == 2
    harness.send(EngineBatchesReceived(key(), ((2, EngineBatch(102.0, (FIRST,))),)))
    assert harness.live[0] == set(BLOCKS)


PREFIXES = [(1, 1), (1, 1, 2, 2), (1, 1, 2, 2, 3, 3), (1, 1, 4, 4), (5, 5), (5, 5, 6, 6)]
PIECES = [
    stored(prefix, start=start) for prefix in PREFIXES for start in range(len(prefix) // 2)
]  # fmt: skip
EVENTS = st.one_of(
    st.sampled_from(PIECES),
    st.sampled_from(PIECES),
    st.sampled_from([removed(engine_hash(prefix)) for prefix in PREFIXES]),
    st.just(AllBlocksCleared()),
    st.sampled_from(PIECES).map(lambda event: CHANGE(event, token_ids=event.token_ids[:-1])),
    st.sampled_from(PIECES).map(lambda event: CHANGE(event, token_ids=(*event.token_ids, 1))),
    st.sampled_from(PIECES).map(
        lambda event: CHANGE(event, token_ids=(-1,) * len(event.token_ids))
    ),
    st.sampled_from(PIECES).map(
        lambda event: CHANGE(event, token_ids=tuple(token + 1 for token in event.token_ids))
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=20))
def test_together_or_one_by_one_is_the_same(events: list[EngineEvent]) -> None:
    """Goal: joining changes nothing that anybody can see, whatever an engine says.

    1. Random pieces of prompts, copies, removals, clears, and events that are wrong.
    2. One core takes them one by one, another at once.
    3. Both hold the same, have told the same, and have dropped the same.
    """
    one, other = Harness(), Harness()
    for harness in (one, other):
        harness.attach()
    for seq, event in enumerate(events):
        one.batch(seq, event)
    if events:
        together(other, *events)
    assert one.live.get(0, set()) == other.live.get(0, set())
    assert held(one.core) == held(other.core)
    assert one.core.statistics().drops == other.core.statistics().drops
    assert one.core.statistics().orphan_blocks == other.core.statistics().orphan_blocks
