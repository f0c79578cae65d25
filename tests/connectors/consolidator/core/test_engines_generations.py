"""The consolidator's core, without IO: what a connector says its blocks are named by, and when."""

from __future__ import annotations

import msgspec
from kvbm_common.identity import SequenceHash, lora_extra, request_extras
from kvbm_common.wire.engine_events import AllBlocksCleared, BlockStored
from kvbm_common.wire.local import Attached
from kvbm_common.wire.local_fields import Adapter
from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits, StreamAttached

from tests.connectors.consolidator.model import (
    BLOCKS,
    HASHER,
    PROMPT,
    Device,
    Harness,
    attach,
    kinds,
    removed,
    stored,
)

NEW = "00000000000000f1"
NEWER = "00000000000000f2"
POET = Adapter(id=7, name="poet", content="aa")


def say(
    harness: Harness, *, generation: str = "", adapters: tuple[Adapter, ...] | None = None
) -> None:
    """The connector says it again."""
    said = msgspec.structs.replace(
        attach(), generation=generation, adapters=None if adapters is None else list(adapters)
    )
    harness.send(StreamAttached(said, b"peer0"))


def names(generation: str = "", lora: str = "") -> set[SequenceHash]:
    """Of the prompt's blocks."""
    return set(HASHER.chain(PROMPT, extras=request_extras(lora=lora, generation=generation)))


def poem(tokens: tuple[int, ...] = PROMPT, start: int = 0) -> BlockStored:
    """The prompt's blocks, computed with the adapter."""
    event = stored(tokens, start=start)
    keys = tuple(("poet",) for _ in event.block_hashes)
    return msgspec.structs.replace(event, lora_name="poet", lora_id=7, extra_keys=keys)


def adapted() -> Harness:
    """An engine that says what its adapters are, and has none yet."""
    harness = Harness(ConsolidatorLimits(orphan_age_ms=1_000))
    harness.send(StreamAttached(msgspec.structs.replace(attach(), adapters=[]), b"peer0"))
    harness.grant()
    harness.answer(Device())
    return harness


def test_a_generation_begins_with_the_clear_behind_it(harness: Harness) -> None:
    """What was published before the clear has the old names, whatever comes first."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW)
    assert harness.live[0] == set(BLOCKS)
    harness.batch(1, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)
    assert "cleared" in kinds(harness)[2:]
    harness.batch(2, removed(*stored(PROMPT).block_hashes))
    assert not harness.live[0]


def test_a_generation_said_again_goes_on_with_the_stream(harness: Harness) -> None:
    """The engine lives on: its epoch stays, and it hears that we know."""
    harness.batch(0, stored(PROMPT))
    say(harness, generation=NEW)
    assert harness.epoch == 1
    assert harness.live[0] == set(BLOCKS)
    answer = harness.replies[-1][1]
    assert isinstance(answer, Attached)
    assert answer.generation == NEW


def test_two_resets_before_a_clear_leave_the_last_one(harness: Harness) -> None:
    """A reset that the engine refused is tried again."""
    say(harness, generation=NEW)
    say(harness, generation=NEWER)
    harness.batch(0, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEWER)


def test_a_clear_without_a_reset_keeps_the_generation(harness: Harness) -> None:
    """The engine has emptied its own cache alone."""
    say(harness, generation=NEW)
    harness.batch(0, AllBlocksCleared(), stored(PROMPT))
    harness.batch(1, AllBlocksCleared(), stored(PROMPT))
    assert harness.live[0] == names(NEW)


def test_a_stream_that_is_first_attached_after_a_reset(harness: Harness) -> None:
    """A consolidator that starts late names everything by the present generation."""
    late = Harness()
    late.send(StreamAttached(msgspec.structs.replace(attach(), generation=NEW), b"p"))
    late.grant()
    late.answer(Device())
    late.batch(0, stored(PROMPT))
    assert late.live[0] == names(NEW)


def test_an_adapter_is_named_by_its_content() -> None:
    """As the connector names it."""
    harness = adapted()
    say(harness, adapters=(POET,))
    harness.batch(0, poem())
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))


def test_blocks_wait_until_their_adapter_is_known() -> None:
    """Events may overtake the connector's word; what follows them waits with them."""
    harness = adapted()
    harness.batch(0, poem(PROMPT[:4]))
    harness.batch(1, poem(PROMPT, start=2))
    assert not harness.live.get(0)
    say(harness, adapters=(POET,))
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))


def test_blocks_that_wait_and_are_removed_do_not_come() -> None:
    """What the engine has dropped meanwhile is not held."""
    harness = adapted()
    event = poem()
    harness.batch(0, event)
    harness.batch(1, removed(event.block_hashes[-1]))
    say(harness, adapters=(POET,))
    assert len(harness.live[0]) == 2


def test_blocks_of_an_adapter_that_nobody_explains_are_left_out() -> None:
    """Better no name than a wrong one; they are counted."""
    harness = adapted()
    harness.batch(0, poem())
    for _ in range(4):
        harness.tick(1_000)
        harness.answer(Device(), first=1)
    assert harness.core.statistics().drops["orphan"] == 3
    assert not harness.core.statistics().orphan_blocks
    say(harness, adapters=(POET,))
    assert not harness.live.get(0)


def test_another_number_is_another_adapter() -> None:
    """The same name may stand for two adapters at once: numbers tell them apart."""
    harness = adapted()
    say(harness, adapters=(msgspec.structs.replace(POET, id=8, content="bb"), POET))
    harness.batch(0, poem())
    assert harness.live[0] == names(lora=lora_extra("poet", "aa"))
