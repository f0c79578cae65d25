"""The consolidator's core, without IO: the order of batches, gaps, replays and restarts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvbm_common.wire.engine_events import (
    EngineBatch,
)
from kvbm_common.wire.events import Cleared
from kvbm_connectors.consolidator.core.messages import (
    BeatReceived,
    ConsolidatorLimits,
    ReplayDone,
    RequestReplay,
)

from tests.connectors.consolidator.model import (
    BLOCKS,
    INCARNATION,
    PROMPT,
    Device,
    Harness,
    batch_received,
    chain,
    key,
    kinds,
    stored,
)


def test_a_late_comer_replays_from_the_beginning() -> None:
    device = Device()
    device.publish(device.store(PROMPT, 0))
    device.publish(device.evict(0))
    harness = Harness()
    harness.attach(epoch=False)
    harness.grant()
    harness.answer(device)
    assert harness.live[0] == device.truth() == set(BLOCKS[:2])


def test_a_gap_is_replayed_and_later_batches_wait(harness: Harness) -> None:
    """1. Batch 1 is lost. 2. Batch 2 waits and a replay from 1 is asked for. 3. All is applied."""
    device = Device()
    for tokens in (PROMPT[:2], PROMPT[:4], PROMPT):
        device.publish(device.store(tokens, len(tokens) // 2 - 1))
    harness.send(batch_received(key(), 0, device.batches[0]))
    harness.send(batch_received(key(), 2, device.batches[2]))
    assert harness.replays == [RequestReplay(key(), "ipc://replay0", 1, 2)]
    assert harness.live[0] == set(BLOCKS[:1])
    harness.answer(device)
    assert harness.live[0] == set(BLOCKS)
    assert harness.core.statistics().pending_batches == 0


def test_duplicates_are_dropped_and_counted(harness: Harness) -> None:
    for _ in range(3):
        harness.batch(0, stored(PROMPT), ts=5.0)
    assert kinds(harness) == ["cleared", "stored"]
    assert harness.core.statistics().drops["duplicate"] == 2


def test_a_replay_that_begins_too_late_clears_and_rebuilds(harness: Harness) -> None:
    device = Device()
    device.publish(device.store(PROMPT, 0))
    device.publish(device.clear())
    device.publish(device.store((7, 8), 0))
    device.publish(device.store((9, 9), 0))
    harness.send(batch_received(key(), 0, device.batches[0]))
    harness.send(batch_received(key(), 3, device.batches[3]))
    harness.answer(device, first=2)
    assert kinds(harness) == ["cleared", "stored", "cleared", "stored", "stored"]
    assert harness.events[2] == Cleared(
        host="h", source="sim-0", tier="device", epoch=1, seq=3, ts_ms=101_500, reason="gap"
    )
    assert harness.live[0] == device.truth()


def test_a_hole_in_a_replay_is_asked_for_again(harness: Harness) -> None:
    device = Device()
    for token in range(5):
        device.publish(device.store((token, token), 0))
    harness.send(batch_received(key(), 4, device.batches[4]))
    asked = harness.replays.pop()
    for seq in (0, 1, 3):
        harness.send(batch_received(asked.key, seq, device.batches[seq], asked.replay))
    harness.send(ReplayDone(asked.key, asked.replay))
    assert [replay.from_seq for replay in harness.replays] == [2]
    harness.answer(device)
    assert harness.live[0] == device.truth()


def test_an_empty_replay_from_before_a_gap_does_not_prove_the_loss() -> None:
    """1. A replay is asked for; the engine, which has nothing yet, ends it at once.
    2. Batch 0 is lost on the way, batch 1 arrives, and only then the end of the replay.
    3. The engine still has batch 0: it is asked for again, and nothing is lost."""
    device, harness = Device(), Harness()
    harness.attach(epoch=False)
    harness.grant()
    asked = harness.replays.pop()
    device.publish(device.store(PROMPT[:2], 0))
    device.publish(device.store(PROMPT, 1))
    harness.send(batch_received(key(), 1, device.batches[1]))
    harness.send(ReplayDone(asked.key, asked.replay))
    assert [replay.from_seq for replay in harness.replays] == [0]
    harness.answer(device)
    assert harness.live[0] == device.truth() == set(BLOCKS)


def test_a_silent_replay_is_tried_thrice_then_done_without(harness: Harness) -> None:
    device = Device()
    harness.batch(0, stored(PROMPT))
    harness.batch(5, stored((7, 8)))
    for _ in range(3):
        assert harness.live[0] == set(BLOCKS)
        assert harness.answer(device, fail=True)
        harness.tick(2_000)
        harness.send(BeatReceived("sim-0", INCARNATION, b"peer0"))
    assert harness.core.statistics().drops["replay_failed"] == 3
    assert harness.live[0] == set(chain((7, 8)))
    harness.batch(6, stored((9, 9)))
    assert harness.live[0] == set(chain((7, 8)) + chain((9, 9)))


def test_without_a_replay_endpoint_a_gap_clears() -> None:
    harness = Harness()
    harness.attach(replay=False)
    harness.batch(3, stored(PROMPT))
    harness.batch(5, stored((7, 8)))
    assert kinds(harness) == ["cleared", "stored", "cleared", "stored"]
    assert harness.live[0] == set(chain((7, 8)))
    assert harness.core.statistics().replays == 0


def test_a_silent_stream_is_probed_less_and_less_often() -> None:
    """Goal: the loss of the last batch before a pause is found out."""
    harness = Harness(ConsolidatorLimits(lost_after_ms=10**9))
    harness.attach()
    device = Device()
    device.publish(device.store(PROMPT, 0))
    harness.tick(1_000)
    assert harness.replays[0].from_seq == 0
    harness.answer(device)
    assert harness.live[0] == device.truth()
    probed_ms = []
    for _ in range(100):
        harness.tick(1_000)
        if harness.answer(device):
            probed_ms.append(harness.now_ms)
    pauses = [after - before for before, after in pairwise(probed_ms)]
    assert pauses == [4_000, 8_000, 16_000, 16_000, 16_000, 16_000, 16_000]


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_publisher_gets_a_new_epoch(replay: bool) -> None:
    """The incarnation is the same, but sequence numbers begin again with later time stamps."""
    harness = Harness()
    harness.attach(replay=replay)
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.batch(1, stored((9, 9)), ts=11.0)
    device = Device()
    device.publish(device.store((7, 8), 0))
    harness.send(batch_received(key(), 0, device.batches[0]))
    harness.grant()
    harness.answer(device)
    assert [(event.epoch, event.seq) for event in harness.events][-2:] == [(2, 1), (2, 2)]
    assert harness.live[0] == device.truth()
    assert harness.core.statistics().drops["restarted"] == 1


def test_a_restart_is_seen_though_the_clock_jumped_back(harness: Harness) -> None:
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.batch(0, stored(PROMPT), ts=9.0)
    assert harness.core.statistics().drops["restarted"] == 1


def test_answers_to_questions_of_another_life_are_stale(harness: Harness) -> None:
    """A replay asked for before a restart ends after it: it must not end the new one."""
    harness.batch(0, stored(PROMPT), ts=10.0)
    harness.tick(1_000)
    old = harness.replays.pop()
    harness.send(ReplayDone(old.key, old.replay))
    harness.batch(0, stored(PROMPT), ts=20.0)
    new = harness.replays[0]
    harness.send(ReplayDone(old.key, old.replay))
    harness.send(batch_received(key(), 0, EngineBatch(20.0, ()), old.replay))
    assert harness.core.statistics().drops["stale_replay"] == 1
    assert harness.core.statistics().drops["stale_batch"] == 1
    assert new.replay != old.replay


def test_waiting_batches_are_bounded() -> None:
    harness = Harness(ConsolidatorLimits(pending_batches_max=2))
    harness.attach()
    device = Device()
    for token in range(6):
        device.publish(device.store((token, token), 0))
    for seq in (1, 2, 3, 4):
        harness.send(batch_received(key(), seq, device.batches[seq]))
    assert harness.core.statistics().pending_batches == 2
    assert harness.core.statistics().drops["pending_full"] == 2
    harness.answer(device)
    assert harness.live[0] == device.truth()


def is_settled(harness: Harness) -> bool:
    """Whether no engine waits for anything."""
    return harness.core.is_settled


def test_an_engine_is_settled_unless_it_waits_for_events(harness: Harness) -> None:
    """1. The first replay is on its way. 2. It has ended. 3. A batch waits after a gap."""
    device = Device()
    for tokens in (PROMPT[:2], PROMPT[:4], PROMPT):
        device.publish(device.store(tokens, len(tokens) // 2 - 1))
    late = Harness()
    late.attach(epoch=False)
    assert not is_settled(late), "it has no epoch"
    late.grant()
    assert not is_settled(late), "its past is asked for"
    late.answer(device)
    assert is_settled(late)
    assert is_settled(harness)
    harness.send(batch_received(key(), 1, device.batches[1]))
    assert not is_settled(harness)
