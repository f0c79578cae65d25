"""Every kind of KV group on the product's tiers: `test_device.py` with real bytes.

vLLM's scheduler and KV cache managers, KV tensors as vLLM lays them out, both sides of the
connector, a host tier with room for few blocks, and a disk tier. No model runs.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.config.settings import Settings

from tests.line_process import LineProcess
from tests.vllm.device.live_talk import (
    DISK_ALONE,
    DISTURBANCES,
    QUICK,
    LiveCommand,
    LiveReply,
)
from tests.vllm.harness import (
    ENVIRON,
    REPLY_DEADLINE_S,
    START_DEADLINE_S,
    VLLM_PYTHON,
    LiveStack,
    live_stack,
    vllm_minor,
    wait_for,
)
from tests.vllm.test_device import KINDS
from tests.waiting import stop_child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        VLLM_PYTHON.exists() and vllm_minor() != 32, reason="the device follows vLLM 0.32 alone"
    ),
]

SLOT_BYTES = 4096
SLOTS = 200
SERVICES = ("consolidator", "index", "host-tier", "disk-tier")
TIERS = {
    "cpu_cache_gb": SLOTS * SLOT_BYTES / 1e9,
    "disk_cache_gb": 20_000 * SLOT_BYTES / 1e9,
    "disable_disk_offload_filter": True,
    # Else it finds wrong bytes before a load does.
    "scrub_cpu_percent": 0,
}
PROGRAMS = 2
SEEDS = range(8)
"""Programs that a defect may take to be seen."""
RESTS = 5
"""How often the disk tier is seen to rest before it has written what it will."""
FLIPPED_BYTE = 5
"""Of a slot: it is in the first page of a block of any kind."""


class LiveProcess(LineProcess[LiveCommand, LiveReply]):
    """Runs programs; what they ask for is done to the stack here."""

    def __init__(self, model: str, stack: LiveStack, log: Path) -> None:
        super().__init__(
            [VLLM_PYTHON, "-m", "tests.vllm.device.live_process", model,
             str(stack.settings.runtime_dir)],
            reply=LiveReply, log=log, environ=ENVIRON | {"VLLM_LOGGING_LEVEL": "ERROR"},
            reply_deadline_s=REPLY_DEADLINE_S,
        )  # fmt: skip
        self._stack = stack
        self._stopped: list[int] = []
        assert self.line(START_DEADLINE_S) == b"ready\n", self.tail()

    def run(self, kind: str, seed: int, *disturbances: str, plant: str = "") -> LiveReply:
        """Run a program to its end."""
        reply = self.say(
            LiveCommand(kind=kind, seed=seed, plant=plant, disturbances=list(disturbances))
        )
        while reply.act:
            self._act(reply.act, seed)
            epoch = 0 if self._stopped else self._stack.epoch("host-tier")
            reply = self.say(LiveCommand(epoch=epoch))
        self._continue()  # Of a program that has failed meanwhile.
        return reply

    def _continue(self) -> None:
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _act(self, what: str, seed: int) -> None:
        match what.split():
            case ["write"]:
                self._wait_written()
            case ["forget", tier]:
                self._stack.forget(tier)
            case ["flip"]:
                flip_arena(self._stack.settings, random.Random(seed))
            case ["restart", service]:
                self._stack.kill(service)
                self._stack.start(service)
            case ["stop", service]:
                self._stopped.append(self._stack.stack.pids[service])
                stop_child(self._stopped[-1])
            case ["continue", _]:
                self._continue()
            case _:
                assert what == "look", what

    def _wait_written(self) -> None:
        """Wait until all of the host tier's blocks are on disk, or the disk tier has nothing to do:
        what it had no time for is not written, nor what hangs on it."""
        rests = 0

        def is_written() -> bool:
            nonlocal rests
            if self._stack.held("host-tier") <= self._stack.held("disk-tier"):
                return True
            busy = self._stack.figures("disk-tier")["writes_pending"]
            rests = 0 if busy else rests + 1
            return rests > RESTS

        wait_for(is_written, "the disk tier has blocks to write")


def flip_arena(settings: Settings, rng: random.Random) -> None:
    """Flip a bit in half of the slots that are in use."""
    (path,) = settings.shm_dir.glob(f"kvbm-{settings.host}-*-arena")
    with path.open("r+b") as arena:
        for offset in range(0, path.stat().st_size, SLOT_BYTES):
            arena.seek(offset + FLIPPED_BYTE)
            (old,) = arena.read(1)
            if old and rng.random() < 0.5:
                arena.seek(offset + FLIPPED_BYTE)
                arena.write(bytes([old ^ 1 << rng.randrange(8)]))


def at_rest(stack: LiveStack) -> bool:
    """Whether no tier leases a block, or waits for the bytes of one."""
    kinds = ("host-tier", "disk-tier")
    found = [stack.ask(functools.partial(stack.view.stats, kind)) for kind in kinds]
    return not any(one.leases or one.slots.get("staged") for one in found)


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack(TIERS, SERVICES) as running:
        yield running


@pytest.fixture(scope="module")
def process(stack: LiveStack, model: str, log_dir: Path) -> Iterator[LiveProcess]:
    running = LiveProcess(model, stack, log_dir / "device.log")
    yield running
    running.stop()


def drawn(kind: str) -> list[str]:
    """What is done to the stack in each program of a kind. A restart takes a second, or several."""
    draw = random.Random(f"{kind}/0")
    return [draw.choice(QUICK), draw.choice(DISTURBANCES)]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_right_from_every_tier(stack: LiveStack, process: LiveProcess, kind: str) -> None:
    """Goal: what is loaded from host or disk is what its names stand for, in every layer.

    1. Programs with preemptions, aborts, resets and evictions; the next engine finds what the one
       before has stored.
    2. In each the host tier is emptied: what is asked again comes from disk. What else is done is
       drawn: bits of the arena are flipped, a service pauses or begins anew.
    3. At the end nothing is held.
    """
    counts: Counter[str] = Counter()
    for seed, disturbance in enumerate(drawn(kind)):
        reply = process.run(kind, seed, DISK_ALONE, disturbance)
        assert not reply.error, f"seed {seed}, {disturbance}: {reply.error}"
        counts += Counter(reply.counts)
    wait_for(lambda: at_rest(stack), "the tiers hold something")
    assert min(counts["blocks from host"], counts["blocks from disk"]) > 0, counts
    assert bool(counts["corrupt blocks"]) >= bool(counts["flip"]), counts


def test_every_disturbance_is_drawn() -> None:
    """Goal: no way of losing blocks is left out by chance."""
    assert {one for kind in KINDS for one in drawn(kind)} == set(DISTURBANCES)


@pytest.mark.parametrize(
    ("plant", "kind", "disturbance"),
    [
        ("wrong-groups", "deepseek v4", ""),
        ("believed-sums", "deepseek v3.2", "flip"),
        ("unverified", "gptoss", "flip"),
        ("refused-bytes", "gptoss", "flip"),
        ("unreported-loads", "gemma3", "flip"),
        ("states-alone", "gdn", ""),
        ("later-states", "gdn", ""),
        ("short-windows", "gemma3", ""),
        ("unheld-windows", "gemma3", "pause host-tier"),
        ("one-size", "gemma4", ""),
        ("early-offers", "plain", ""),
        ("early-drafts", "drafting layers", ""),
    ],
)
def test_a_defect_is_seen(process: LiveProcess, plant: str, kind: str, disturbance: str) -> None:
    """Goal: wrong bytes are noticed, whichever part of the product lets them through."""
    acts = [DISK_ALONE, disturbance] if disturbance else [DISK_ALONE]
    replies = (process.run(kind, seed, *acts, plant=plant) for seed in SEEDS)
    error = next((reply.error for reply in replies if reply.error), "")
    assert "WrongBytes" in error, error or "nothing is seen"
