"""Fuzzed frames: no crash, no growth, and every one is a batch or counted."""

from __future__ import annotations

import os
import random
import resource
from collections import Counter

import msgspec
import pytest
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX
from kvbm_common.wire.engine_events import END_SEQ, EngineEvent, encode_batch
from kvbm_connectors.consolidator.core.core import ConsolidatorCore
from kvbm_connectors.consolidator.core.messages import (
    AskEpoch,
    BeatReceived,
    ConsolidatorLimits,
    EngineBatchesReceived,
    EpochGranted,
    Input,
    ReplayDone,
    ReplayFailed,
    RequestReplay,
    StreamAttached,
    Tick,
)
from kvbm_connectors.consolidator.shell.frames import FrameReader

from tests.connectors.consolidator.model import (
    INCARNATION,
    Device,
    attach,
    batch_received,
    held,
    key,
)

HUGE = bytes(MESSAGE_BYTES_MAX + 1)
LIMITS = ConsolidatorLimits(pending_batches_max=100, orphan_blocks_max=200, naming=True)
BURST = 50
GROWTH_MIB_MAX = 64
FRAMES = int(os.environ.get("KVBM_TEST_FRAMES", "1000000"))


class Fuzzer:
    """Messages of a seed: the true ones of a small engine, and what a bad day makes of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.device = Device()
        self.seq = 0

    def message(self) -> list[bytes]:
        """One ZMQ message."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.4:
            return self._frames(self._true(), true=True)
        if kind < 0.55:
            return self._frames(msgspec.msgpack.encode(self._anything(0)))
        if kind < 0.65:
            return self._frames(rng.randbytes(rng.randrange(200)))
        if kind < 0.75:
            payload = self._true()
            return self._frames(payload[: rng.randrange(len(payload))])
        if kind < 0.9:
            damaged = bytearray(self._true())
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return self._frames(bytes(damaged))
        if kind < 0.95:
            return [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(6))]
        return self._nasty()

    def _frames(self, payload: bytes, *, true: bool = False) -> list[bytes]:
        """Mostly the next number; sometimes an old, a later or a wild one.

        Damage mostly takes the number of the true batch after it: a damaged batch would else be a
        gap, and the core would do nothing but wait.
        """
        rng = self.rng
        seq = self.seq
        self.seq += true or rng.random() < 0.01
        if rng.random() < 0.01:
            seq = rng.choice([0, max(0, seq - 5), seq + 3, rng.randrange(2**64), END_SEQ])
        return [rng.choice([b"", b"", b"other"]), seq.to_bytes(8, "big"), payload]

    def _true(self) -> bytes:
        rng, device = self.rng, self.device
        prompt = tuple(rng.randrange(2) for _ in range(2 * rng.randint(1, 4)))
        start = max(e for e in range(0, len(prompt), 2) if not e or device.copies[prompt[:e]])
        if rng.random() < 0.02:
            return self._encoded(device.clear())
        if rng.random() < 0.5 or not +device.copies:
            return self._encoded(device.store(prompt, start // 2))
        return self._encoded(device.evict(rng.randrange(100)))

    def _encoded(self, event: EngineEvent) -> bytes:
        number = self.device.publish(event)
        payload = encode_batch(self.device.batches[number])
        self.device.batches.clear()
        return payload

    def _anything(self, depth: int) -> object:
        """Any value, often in the shape of a batch or an event."""
        rng = self.rng
        if depth == 0 and rng.random() < 0.7:
            return [rng.choice([1.5, -1.0, float("nan"), 1e300, 7, None, "ts"]),
                    [self._event() for _ in range(rng.randrange(4))],
                    rng.choice([0, None, -1, "rank"])]  # fmt: skip
        if depth > 4 or rng.random() < 0.5:
            return rng.choice([None, True, 0, -1, 2**64 - 1, -(2**63), 1.5, "text", b"bytes", ""])
        if rng.random() < 0.5:
            return [self._anything(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(["type", "block_hashes", "x"]): self._anything(depth + 1)}

    def _event(self) -> object:
        rng = self.rng
        fields = {
            "type": rng.choice(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Later", 5]),
            "block_hashes": rng.choice([[], [1], [1, 1], [-5, 2**64 - 1], [b"12345678"], "x"]),
            "parent_block_hash": rng.choice([None, 1, -5, b"x", 99]),
            "token_ids": rng.choice([[], [1, 2], [1, -2], [2**40, 0], [[1, 2], [2, 3]], [1] * 7]),
            "block_size": rng.choice([2, 0, -1, 3, 2**40]),
            "medium": rng.choice(["GPU", None, "CPU_PINNED", 3]),
            "group_idx": rng.choice([None, 0, 1, 2**62, -1]),
            "lora_name": rng.choice([None, "poet"]),
            "extra_keys": rng.choice([None, [["salt"]], [None, [1, [2]]], [[{"a": 1}]], 7]),
            "mm_keys": rng.choice([None, [[["d00d", 3]]], [], "x", [[{"hash": "h"}]]]),
        }
        if rng.random() < 0.3:
            fields.pop(rng.choice(sorted(fields)))
        return list(fields.values()) if rng.random() < 0.2 else fields

    def _nasty(self) -> list[bytes]:
        """What breaks naive decoders: size, depth, counts that promise more than there is."""
        rng = self.rng
        return self._frames(
            rng.choice(
                [
                    HUGE,
                    b"\x91" * 5_000 + b"\x00",
                    b"\xdd\xff\xff\xff\xff",
                    b"\xdf\xff\xff\xff\xff",
                    msgspec.msgpack.encode([1.0, [None] * 70_000, 0]),
                    msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]] * 300, 0]),
                    b"",
                ]
            )
        )


class Consolidator:
    """Everything behind the socket: reader and core, and an engine that answers replays badly."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.drops: Counter[str] = Counter()
        self.taken = 0
        self.core = ConsolidatorCore("h", LIMITS)
        self.reader = FrameReader("sim-0", b"", self._drop)
        self.now_ms = 0
        self.replays: list[RequestReplay] = []
        self.epoch = 0
        self.step(StreamAttached(attach(), b"peer"))

    def step(self, event: Input) -> None:
        """One input; the effects that ask for something are remembered."""
        effects = self.core.step(event, self.now_ms)
        self.replays += [effect for effect in effects if isinstance(effect, RequestReplay)]
        for effect in effects:
            if isinstance(effect, AskEpoch):
                self.epoch += 1
                self.step(EpochGranted("sim-0", effect.ask, self.epoch))

    def take(self, messages: list[list[bytes]]) -> None:
        """A burst of messages on the PUB, then time passes, and a replay ends somehow."""
        batches = self.reader.published(messages)
        self.taken += len(batches)
        if batches:
            self.step(EngineBatchesReceived(key(), batches))
        self.now_ms += 20
        self.step(BeatReceived("sim-0", INCARNATION, b"peer"))
        self.step(Tick())
        while self.replays:
            asked = self.replays.pop()
            if self.rng.random() < 0.5:
                self.step(ReplayFailed(asked.key, asked.replay))
            else:
                self.step(ReplayDone(asked.key, asked.replay))

    def _drop(self, kind: str, _text: str) -> None:
        self.drops[kind] += 1


def fuzz(frames: int, seed: int) -> Consolidator:
    """Send so many; returns what is left."""
    fuzzer, consolidator = Fuzzer(seed), Consolidator(seed)
    before = 0
    for burst in range(frames // BURST):
        consolidator.take([fuzzer.message() for _ in range(BURST)])
        if burst % 100 == 99:
            consolidator.core.check()
        if burst == frames // BURST // 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    consolidator.core.check()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < GROWTH_MIB_MAX, f"{grown_mib:.0f} MiB more than after a quarter"
    return consolidator


def check_counted(consolidator: Consolidator, frames: int) -> None:
    """Every frame is a batch or counted, by a reason that has a name; waiting rooms are bounded."""
    assert consolidator.taken + consolidator.drops.total() == frames
    assert consolidator.drops.keys() == {"malformed", "oversized"}
    statistics = consolidator.core.statistics()
    assert statistics.engines.batches == consolidator.taken
    assert statistics.engines.pending_batches <= LIMITS.pending_batches_max
    assert statistics.engines.orphan_blocks <= LIMITS.orphan_blocks_max


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_frames_are_counted_and_harm_nothing(seed: int) -> None:
    check_counted(fuzz(5_000, seed), 5_000)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_million_fuzzed_frames() -> None:
    """Goal: no crash, no growth, every one counted. A quarter in, the memory is what it stays."""
    consolidator = fuzz(FRAMES, 7)
    check_counted(consolidator, FRAMES)
    print(consolidator.taken, dict(consolidator.drops), consolidator.core.statistics())


def test_after_the_storm_the_next_life_is_right() -> None:
    """1. A storm. 2. The engine restarts: both streams hold exactly what it says."""
    fuzzer, consolidator = Fuzzer(1), Consolidator(1)
    for _ in range(40):
        consolidator.take([fuzzer.message() for _ in range(BURST)])
    life, device = "00000000000000bb", Device()
    consolidator.step(StreamAttached(attach(incarnation=life), b"peer"))
    asked = consolidator.replays.pop()
    consolidator.step(ReplayDone(asked.key, asked.replay))
    for event in (device.store((1, 2, 3, 4), 0), device.evict(0), device.store((5, 6), 0)):
        seq = device.publish(event)
        consolidator.step(batch_received(key(incarnation=life), seq, device.batches[seq]))
    blocks = held(consolidator.core.engines)
    assert blocks == device.truth()
    assert consolidator.core.merged.live("sim-0").keys() == blocks
    consolidator.core.check()
