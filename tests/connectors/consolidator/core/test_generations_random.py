"""Random resets, with announcements that come early, late or to another life of the consolidator.

An engine names a block by the generation of the last reset before the clear in front of it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash, request_extras
from kvbm_common.wire.engine_events import EngineEvent
from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits, StreamAttached
from msgspec.structs import replace

from tests.connectors.consolidator.model import (
    HASHER,
    Device,
    Harness,
    attach,
    batch_received,
    held,
    key,
)

Action = tuple[str, int, int]
NAMES = (
    "store", "store", "store", "publish", "publish", "evict", "clear", "reset", "noticed reset",
    "refused reset", "say", "lag", "lag", "lose", "answer", "fail", "tick", "restart",
)  # fmt: skip
ACTIONS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.integers(1, 3)), max_size=50
)
LIMITS = ConsolidatorLimits(replay_attempts_max=100, lost_after_ms=10**9)


class Engine:
    """An engine with resets, its connector, and the consolidator that follows both."""

    def __init__(self, limits: ConsolidatorLimits = LIMITS) -> None:
        self.limits, self.harness = limits, Harness(limits)
        self.device = Device()
        self.queue: list[EngineEvent] = []
        """Events that the engine has not published."""
        self.under_way: list[int] = []
        """Batches that were published and not heard yet."""
        self.generation = self.cleared_in = 0
        """The last reset's, and that of the last clear."""
        self.ever: set[SequenceHash] = set()
        """Names that blocks had, or might have had in an earlier generation."""
        self.attach = attach()
        self.harness.send(StreamAttached(self.attach, b"peer0"))
        self.harness.grant()

    def store(self, a: int, b: int) -> None:
        known = sorted(+self.device.copies)
        base = known[a % len(known)] if known and a % 2 else ()
        mark = self.cleared_in * 100 if a % 3 else 50
        tokens = base + tuple(x for i in range(b) for x in (mark + a, i))
        if tokens[: len(base) + 2] not in self.device.copies:
            self.queue.append(self.device.store(tokens, len(base) // 2))
            for generation in range(self.cleared_in + 1):
                self.ever |= set(names(tokens, generation))

    def publish(self, *, heard: bool = True, late: bool = False) -> None:
        """Publish a batch, which is heard at once, or after other words, or never."""
        if self.queue:
            seq = self.device.publish(*self.queue)
            self.queue.clear()
            self.under_way += [seq] if heard else []
        for seq in [] if late else self.under_way:
            self.harness.send(batch_received(key(), seq, self.device.batches[seq]))
            self.check()
        self.under_way = self.under_way if late else []

    def clear(self) -> None:
        self.queue.append(self.device.clear())
        if self.cleared_in != self.generation:
            self.cleared_in = self.generation
            self.device.clock += 0.25
            self.announce()

    def reset(self, *, cleared: bool = True, noticed: bool = False) -> None:
        self.device.clock += 0.25
        self.generation += 1
        if not cleared:
            return
        self.clear()
        if noticed:  # Only when vLLM schedules again: the clear was published meanwhile.
            self.publish()
            self.device.clock += 0.25
        self.announce()

    def announce(self) -> None:
        """The connector has another generation to say, with the time of now."""
        self.attach = replace(
            attach(), generation=f"{self.generation:016x}",
            generation_us=round(self.device.clock * 1e6),
        )  # fmt: skip

    def say(self) -> None:
        self.harness.send(StreamAttached(self.attach, b"peer0"))
        self.check()

    def act(self, name: str, a: int, b: int) -> None:
        match name:
            case "store":
                self.store(a, b)
            case "publish" | "lose" | "lag":
                self.publish(heard=name != "lose", late=name == "lag")
            case "evict" if +self.device.copies:
                self.queue.append(self.device.evict(a))
            case "clear" if a == 0:
                self.clear()
            case "reset" | "noticed reset" | "refused reset" if a < 3:
                self.reset(cleared=name != "refused reset", noticed=name == "noticed reset")
            case "say":
                self.say()
            case "answer" | "fail":
                self.harness.answer(self.device, fail=name == "fail")
                self.check()
            case "tick":
                self.harness.tick(b * 300)
            case "restart" if a < 2:
                self.harness = Harness(self.limits)
                self.harness.send(StreamAttached(self.attach, b"peer0"))
                self.harness.grant()

    def check(self) -> None:
        """Nothing is named by a generation that began after it."""
        assert self.harness.live.get(0, set()) <= self.ever

    def settle(self, first: int = 0) -> None:
        self.publish()
        self.say()
        for _ in range(8):
            self.harness.tick(20_000)
            while self.harness.answer(self.device, first=first):
                self.check()

    def truth(self) -> set[SequenceHash]:
        held = sorted(+self.device.copies)
        return {names(prefix, self.cleared_in)[-1] for prefix in held}


def names(tokens: tuple[int, ...], generation: int) -> list[SequenceHash]:
    """Of a prompt's blocks."""
    text = f"{generation:016x}" if generation else ""
    return HASHER.chain(tokens, extras=request_extras(generation=text))


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_late_announcements_leave_no_wrong_and_no_missing_name(actions: list[Action]) -> None:
    """Goal: whenever a generation becomes known, the index is right in the end, and at no time
    is a block named by a generation that began after it.

    A life that has begun after a reset does not know what blocks of before are called.
    """
    engine = Engine()
    for action in actions:
        engine.act(*action)
    engine.settle()
    live = engine.harness.live.get(0, set())
    assert live == held(engine.harness.core)
    if engine.cleared_in == engine.generation:
        assert live == engine.truth()
    engine.reset()
    engine.store(2, 3)
    engine.settle()
    assert engine.harness.live.get(0, set()) == engine.truth()


@pytest.mark.parametrize("buffer", [1, 4])
@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_a_short_buffer_leaves_blocks_out(buffer: int, actions: list[Action]) -> None:
    """As above, with an engine that keeps few batches: nothing wrong is left."""
    engine = Engine(ConsolidatorLimits(replay_attempts_max=2, lost_after_ms=10**9))
    for action in actions:
        engine.act(*action)
    engine.settle(max(0, len(engine.device.batches) - buffer))
    if engine.cleared_in == engine.generation:
        assert engine.harness.live.get(0, set()) <= engine.truth()
