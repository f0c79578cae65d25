"""The consolidator's core, without IO: copies are counted, changes announced together."""

from __future__ import annotations

from itertools import pairwise

from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    EngineBatch,
)
from kvbm_common.wire.events import Cleared, Stored
from kvbm_common.wire.raw_events import RawRemoved
from kvbm_connectors.consolidator.core.messages import (
    Describe,
    EngineBatchesReceived,
    Publish,
    StreamAttached,
    Subscribe,
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


def test_two_copies_are_one_block_until_both_are_gone(harness: Harness) -> None:
    last = engine_hash(PROMPT)
    harness.batch(0, stored(PROMPT))
    harness.batch(1, stored(PROMPT, start=2))
    harness.batch(2, removed(last))
    assert kinds(harness) == ["cleared", "stored"]
    harness.batch(3, removed(last))
    assert kinds(harness) == ["cleared", "stored", "removed"]
    assert harness.live[0] == set(BLOCKS[:2])


def test_a_batch_becomes_one_removal_and_one_store(harness: Harness) -> None:
    harness.batch(0, stored((7, 7)), stored((8, 8)))
    harness.batch(
        1,
        removed(engine_hash((7, 7))),
        stored(PROMPT[:4]),
        removed(engine_hash((8, 8))),
        stored(PROMPT, start=2),
    )
    assert kinds(harness) == ["cleared", "stored", "removed", "stored"]
    event = harness.events[-1]
    assert isinstance(event, Stored)
    assert [run.hashes for run in event.runs] == [[block.hex() for block in BLOCKS]]
    assert event.runs[0].parent == NAMESPACE.root.hex()


def test_batches_that_come_together_are_announced_together(harness: Harness) -> None:
    device = Device()
    for event in (device.store(PROMPT, 0), device.evict(0), device.store((7, 8), 0)):
        device.publish(event)
    together = tuple(enumerate(device.batches))
    harness.send(EngineBatchesReceived(key(), together))
    assert kinds(harness) == ["cleared", "stored", "removed", "stored"]
    assert harness.live[0] == device.truth()
    harness.send(EngineBatchesReceived(key(), together))
    assert harness.core.statistics().drops["duplicate"] == 3


def test_a_restart_among_batches_that_come_together(harness: Harness) -> None:
    """What came before it is of the old life, what comes after it waits for the replay."""
    old, device = Device(clock=1.0), Device(clock=50.0)
    old.publish(old.store(PROMPT, 0))
    old.publish(old.store((9, 9), 0))
    device.publish(device.store((7, 8), 0))
    device.publish(device.store((5, 5), 0))
    batches = (*enumerate(old.batches), *enumerate(device.batches))
    harness.send(EngineBatchesReceived(key(), batches))
    harness.grant()
    harness.answer(device)
    assert kinds(harness)[:3] == ["cleared", "cleared", "cleared"]
    assert harness.live[0] == device.truth()


def test_a_block_that_comes_and_goes_keeps_its_order(harness: Harness) -> None:
    short = stored((7, 7))
    gone = removed(engine_hash((7, 7)))
    harness.batch(0, short, gone, short, gone, short)
    assert kinds(harness) == ["cleared", "stored", "removed", "stored", "removed", "stored"]
    assert harness.live[0] == set(chain((7, 7)))


def test_a_clear_in_a_batch_swallows_what_came_before_it(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), AllBlocksCleared(), stored((7, 7)))
    assert kinds(harness) == ["cleared", "cleared", "stored"]
    assert harness.live[0] == set(chain((7, 7)))


def test_long_events_are_cut() -> None:
    tokens = tuple(range(10_000))
    harness = Harness()
    harness.attach()
    harness.batch(0, stored(tokens))
    sizes = [
        sum(len(run.hashes) for run in event.runs)
        for event in harness.events
        if isinstance(event, Stored)
    ]
    assert sizes == [2048, 2048, 904]
    runs = [run for event in harness.events if isinstance(event, Stored) for run in event.runs]
    assert all(before.hashes[-1] == after.parent for before, after in pairwise(runs))
    harness.batch(1, removed(*stored(tokens).block_hashes))
    assert harness.live[0] == set()


def test_ranks_are_apart_and_are_cleared_apart(harness: Harness) -> None:
    harness.send(StreamAttached(attach(rank=1), b"peer1"))
    assert [type(effect) for effect in harness.other][-2:] == [Subscribe, Describe]
    harness.answer(Device())
    for rank in (0, 1):
        harness.batch(0, stored(PROMPT), rank=rank)
    harness.batch(1, AllBlocksCleared(), rank=1)
    event = harness.events[-1]
    assert isinstance(event, Cleared)
    assert (event.rank, event.rank_only) == (1, True)
    assert harness.live == {0: set(BLOCKS), 1: set()}


def test_removed_events_say_why(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT))
    effects = harness.send(
        batch_received(key(), 1, EngineBatch(3.0, (removed(engine_hash(PROMPT)),)))
    )
    assert isinstance(effects[0], Publish)
    event = effects[0].event
    assert isinstance(event, RawRemoved)
    assert (event.reason, event.ts_ms, event.hashes) == ("evicted", 3_000, [BLOCKS[2]])
