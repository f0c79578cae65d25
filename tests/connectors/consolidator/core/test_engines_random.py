"""The consolidator's core, without IO: a real engine's frames, and random ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import Hasher, SequenceHash, request_extras
from kvbm_common.wire.compact_batches import compact
from kvbm_common.wire.engine_events import (
    decode_batch,
    split_published,
)
from kvbm_connectors.consolidator.core.messages import (
    ConsolidatorLimits,
    EngineBatchesReceived,
    StreamAttached,
)

from tests import capture
from tests.connectors.consolidator.model import (
    Device,
    Harness,
    attach,
    batch_received,
    held,
    key,
)


def test_the_capture_agrees_with_its_ground_truth() -> None:
    """Goal: from a real vLLM's frames to our events, everything is explained.

    1. The core follows the capture; at no time does it hold more than 64 blocks.
    2. What was ever announced is exactly the full blocks of the 240 requests, salts and all.
    3. What vLLM says it found in its cache for a request was announced live around that time.
    """
    harness = Harness()
    engine = msgspec.structs.replace(attach(), namespace=capture.NAMESPACE)
    harness.send(StreamAttached(engine, b"peer0"))
    harness.grant()
    harness.answer(Device())
    ever: set[SequenceHash] = set()
    history: list[tuple[int, set[SequenceHash]]] = [(0, set())]
    for received_ns, frames in capture.load_messages():
        frame = split_published(frames)
        harness.send(batch_received(key(), frame.seq, compact(decode_batch(frame.payload))))
        assert len(harness.live[0]) <= capture.DEVICE_BLOCKS
        ever |= harness.live[0]
        history.append((received_ns, set(harness.live[0])))
    hasher = Hasher(capture.NAMESPACE)
    truth: set[SequenceHash] = set()
    slack_ns = 1_000_000_000  # The capture's recorder lags the engine by up to this.
    for request in capture.load_requests():
        blocks = hasher.chain(request.computed, extras=request_extras(salt=request.cache_salt))
        truth.update(blocks)
        cached = set(blocks[: request.cached_blocks])
        assert any(
            cached <= live
            for (from_ns, live), (to_ns, _) in pairwise([*history, (2**63, set())])
            if from_ns <= request.end_ns + slack_ns and to_ns >= request.start_ns
        ), f"request {request.n}"
    assert ever == truth
    assert harness.core.statistics().drops["orphan"] == 0


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "store", "evict", "evict", "copy", "clear", "lose", "repeat",
             "answer", "fail", "tick"]
        ),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=60,
)  # fmt: skip


def act(device: Device, harness: Harness, action: Action, lost: set[int]) -> None:
    """One thing happens in the engine, on the way, or to time."""
    name, a, b = action
    held = sorted(+device.copies)
    match name:
        case "store":
            base = held[a % len(held)] if held and a % 3 else ()
            tokens = base + tuple(x for i in range(b) for x in (a, i))
            if tokens[: len(base) + 2] not in device.copies:
                deliver(device, harness, device.publish(device.store(tokens, len(base) // 2)))
        case "copy" if held:
            prefix = held[a % len(held)]
            deliver(device, harness, device.publish(device.store(prefix, len(prefix) // 2 - 1)))
        case "evict" if held:
            events = [device.evict(a) for _ in range(min(b, sum(device.copies.values())))]
            deliver(device, harness, device.publish(*events))
        case "clear" if a == 0:
            deliver(device, harness, device.publish(device.clear()))
        case "lose":
            lost.update(range(len(device.batches), len(device.batches) + b))
        case "repeat" if device.batches:
            deliver(device, harness, a % len(device.batches))
        case "answer":
            harness.answer(device)
        case "fail":
            harness.answer(device, fail=True)
        case "tick":
            harness.tick(b * 300)


def deliver(device: Device, harness: Harness, seq: int) -> None:
    """A live batch arrives."""
    harness.send(batch_received(key(), seq, device.batches[seq]))


class LossyHarness(Harness):
    """Loses live batches whose number is in `lost`."""

    lost: set[int]

    def send(self, event: Any) -> Any:
        """As Harness, unless the batch is lost."""
        if (
            isinstance(event, EngineBatchesReceived)
            and not event.replay
            and event.batches[0][0] in self.lost
        ):
            return []
        return super().send(event)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_the_published_set_is_the_engine_s_true_set(actions: list[Action]) -> None:
    """Goal: duplicates, gaps, replays and silence never make a wrong or a missing entry.

    1. Random stores, copies, evictions and clears; random losses and repetitions on the way.
       The harness checks with every event that stored and removed alternate.
    2. In the end the engine falls silent, the probe asks, the replay is answered.
    3. What a reader of the events believes is what the engine holds, and so is the snapshot.
    """
    device, harness = (
        Device(),
        LossyHarness(ConsolidatorLimits(replay_attempts_max=100, lost_after_ms=10**9)),
    )
    harness.lost = set()
    harness.attach()
    for action in actions:
        act(device, harness, action, harness.lost)
    for _ in range(5):
        harness.tick(10_000)
        while harness.answer(device):
            pass
    assert harness.live.get(0, set()) == device.truth()
    assert held(harness.core) == device.truth()


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.integers(1, 10))
def test_nothing_untrue_is_published_when_the_buffer_is_short(
    actions: list[Action], buffer: int
) -> None:
    """As above, but the engine's buffer holds only the last batches, and replays fail for good.

    Then blocks may be missing from what we say, and never is there one that the engine lacks.
    """
    device, harness = (
        Device(),
        LossyHarness(ConsolidatorLimits(replay_attempts_max=2, lost_after_ms=10**9)),
    )
    harness.lost = set()
    harness.attach()
    for action in actions:
        if action[0] == "answer":
            harness.answer(device, first=max(0, len(device.batches) - buffer))
        else:
            act(device, harness, action, harness.lost)
    for _ in range(8):
        harness.tick(10_000)
        while harness.answer(device, first=max(0, len(device.batches) - buffer)):
            pass
    assert harness.live.get(0, set()) <= device.truth()
