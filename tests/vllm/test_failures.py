"""Failure: every request ends with the right answer, and caching resumes without a restart."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Answer, Ask, Command
from tests.vllm.harness import (
    EngineProcess,
    LiveStack,
    alike,
    prompt,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPARE_S = 6.0
"""What a busy test machine may add to the configured deadlines."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """A stack that nobody has started yet."""
    live = LiveStack(
        {
            "cpu_cache_gb": 0.05,
            "disk_cache_gb": 0.05,
            "disable_disk_offload_filter": True,
            "onboard_deadline_ms": 1000,
            "lease_ms": 2000,
            "offer_deadline_ms": 2000,
        }
    )
    yield live
    live.close()


@pytest.fixture(scope="module")
def engine(stack: LiveStack, model: str, log_dir: Path) -> Iterator[EngineProcess]:
    """An engine that starts before the stack."""
    settings = stack.settings
    process = EngineProcess(
        model,
        settings,
        log=log_dir / "failures.log",
        extra={
            "onboard_deadline_ms": settings.onboard_deadline_ms,
            "lease_ms": settings.lease_ms,
            "offer_deadline_ms": settings.offer_deadline_ms,
            "onboard_mover": "nixl",
            "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": 2,
        },
    ).wait_started()
    yield process
    process.stop()


def run_in_time(
    engine: EngineProcess, *asks: Ask, deadline_s: float, settle: bool = True
) -> list[Answer]:
    """Run, and assert that it took no longer than its deadline allows."""
    started_s = time.monotonic()
    answers = engine.run(*asks, settle=settle)
    assert time.monotonic() - started_s < deadline_s + SPARE_S
    return answers


def check_that_it_caches(stack: LiveStack, engine: EngineProcess, seed: int) -> None:
    """A new prompt must reach the host tier, and come back."""
    wait_for(lambda: stack.epoch("host-tier"), "the host tier does not answer")
    engine.wait_attached(stack)
    tokens = prompt(seed, 300)
    cold = engine.run(Ask(name=f"new {seed}", tokens=tokens))
    engine.reset()
    loaded = engine.run(Ask(name=f"new again {seed}", tokens=tokens))
    assert loaded[0].cached == 288
    assert alike(loaded, cold)


def test_without_any_service_the_engine_serves(engine: EngineProcess) -> None:
    """Goal: an engine whose stack was never started is vLLM as it is, at no cost in time."""
    tokens = prompt(1, 300)
    cold = engine.run(Ask(name="alone", tokens=tokens))
    engine.reset()
    again = run_in_time(engine, Ask(name="alone again", tokens=tokens), deadline_s=0)
    assert alike(again, cold)
    assert engine.count("lookups_passed_through") >= 2
    assert engine.count("offers_passed_through") >= 9
    wait_for(lambda: engine.count("init_timeouts") == 1, "missing ranks are not counted")
    line = "1 ranks and the host tier at .* have not met within 2 s"
    wait_for(lambda: re.search(line, engine.log_text()), "missing ranks are not in the log")


def test_caching_begins_when_the_stack_comes(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: no restart; also what the device has had all the time reaches the host tier."""
    tokens = prompt(1, 300)
    computed = engine.run(Ask(name="computed", tokens=tokens))
    stack.open()
    engine.wait_attached(stack)
    local = engine.run(Ask(name="local", tokens=tokens))
    assert local[0].cached == 288
    assert alike(local, computed)
    engine.reset()
    loaded = engine.run(Ask(name="loaded", tokens=tokens))
    assert loaded[0].cached == 288
    assert alike(loaded, local)
    check_that_it_caches(stack, engine, 2)


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_the_host_tier_is_killed_at_any_moment(
    stack: LiveStack, engine: EngineProcess, delay_s: float
) -> None:
    """Goal: leases, lookups and loads may end at any moment.

    1. Six prompts are cached, the device is emptied, and all six are asked for at once.
    2. A moment later the host tier gets SIGKILL.
    3. All answers are right, within the deadlines. It starts again; caching resumes.
    """
    seed = 10 + int(delay_s * 1000) * 10
    asks = [Ask(name=f"k {seed} {n}", tokens=prompt(seed + n, 250)) for n in range(6)]
    cold = [engine.run(ask)[0] for ask in asks]
    engine.reset()
    killer = threading.Timer(delay_s, stack.kill, ["host-tier"])
    killer.start()
    deadline_s = (stack.settings.onboard_deadline_ms + stack.settings.lease_ms) / 1000
    again = run_in_time(
        engine,
        *(Ask(name=f"{ask.name} again", tokens=ask.tokens) for ask in asks),
        deadline_s=deadline_s,
        settle=False,
    )
    killer.join()
    assert [a.tokens for a in again] == [a.tokens for a in cold]
    stack.start("host-tier")
    check_that_it_caches(stack, engine, seed + 6)


@pytest.fixture
def held_loads(engine: EngineProcess, tmp_path: Path) -> Path:
    """As long as this file is there, loads do not begin."""
    path = tmp_path / "hold"
    engine.say(Command(what="hold loads", path=str(path)))
    return path


def test_the_host_tier_is_killed_during_a_load(
    stack: LiveStack, engine: EngineProcess, held_loads: Path
) -> None:
    """Goal: a load from a tier that is gone fails, and its blocks are computed.

    1. A prompt is leased; before its bytes are read over NIXL, the host tier gets SIGKILL.
    2. The load fails; the answer is right, in time; a counter and a line in the log say so.
    3. It starts again; caching resumes.
    """
    tokens = prompt(500, 300)
    cold = engine.run(Ask(name="leased", tokens=tokens))
    engine.reset()
    failed = engine.count("worker.loads_failed.peer_lost")
    held_loads.touch()
    engine.begin(Command(what="run", asks=[Ask(name="robbed", tokens=tokens)]))
    wait_for(held_loads.with_suffix(".reached").exists, "nothing is loaded")
    stack.kill("host-tier")
    started_s = time.monotonic()
    held_loads.unlink()
    robbed = engine.wait_reply().answers
    lease_s = (stack.settings.lease_ms + stack.settings.onboard_deadline_ms) / 1000
    assert time.monotonic() - started_s < lease_s + SPARE_S
    assert alike(robbed, cold)
    assert engine.count("worker.loads_failed.peer_lost") == failed + 1
    assert re.search(r"peer_lost: load of .* failed", engine.log_text())  # One in a minute.
    stack.start("host-tier")
    check_that_it_caches(stack, engine, 501)


def test_a_lease_ends_before_its_load(
    stack: LiveStack, engine: EngineProcess, held_loads: Path
) -> None:
    """Goal: what is read after its lease is not used, however good it looks.

    1. A prompt is leased; its load is held back until the host tier has ended the lease.
    2. The load is refused; the answer is right; a counter and a line in the log say so.
    3. The same blocks are not offered to the engine again.
    """
    tokens = prompt(510, 300)
    cold = engine.run(Ask(name="lent", tokens=tokens))
    engine.reset()
    expired = stack.figures("host-tier")["leases_expired"]
    held_loads.touch()
    engine.begin(Command(what="run", asks=[Ask(name="late", tokens=tokens)]))
    wait_for(held_loads.with_suffix(".reached").exists, "nothing is loaded")
    wait_for(
        lambda: stack.figures("host-tier")["leases_expired"] > expired, "the lease does not end"
    )
    held_loads.unlink()
    late = engine.wait_reply().answers
    assert alike(late, cold)
    assert engine.count("worker.loads_failed.lease_ended") == 1
    assert re.search(r"lease_ended: load of late\S* failed", engine.log_text())
    engine.reset()
    avoided = engine.count("avoided_blocks")
    assert alike(engine.run(Ask(name="wary", tokens=tokens)), cold)
    assert engine.count("avoided_blocks") > avoided
    check_that_it_caches(stack, engine, 511)


def test_nats_stops_and_comes_back(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: without the bus offers are lost and nothing else; with it they go on."""
    tokens = prompt(1000, 300)
    cold = engine.run(Ask(name="before", tokens=tokens))
    engine.reset()
    stack.kill("nats")
    loaded = run_in_time(engine, Ask(name="during", tokens=tokens), deadline_s=1.0)
    assert alike(loaded, cold)
    deadline_s = stack.settings.offer_deadline_ms / 1000
    run_in_time(engine, Ask(name="new", tokens=prompt(1001, 300)), deadline_s=deadline_s)
    stack.start("nats")

    def caches_again() -> bool:
        tokens = prompt(int(time.monotonic() * 1e6), 100)
        before = engine.count("offload_blocks")
        engine.run(Ask(name=f"n {tokens[0]} {time.monotonic()}", tokens=tokens))
        return engine.count("offload_blocks") > before

    wait_for(caches_again, "offers do not arrive", deadline_s=30)
    check_that_it_caches(stack, engine, 1002)


def test_a_corrupt_disk_block_is_recomputed(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: the disk tier verifies what it reads; a bad block is a miss.

    1. A prompt is pushed out of the host tier; the disk tier's file is overwritten.
    2. The answer is right, though nothing could be loaded.
    """
    tokens = prompt(2000, 600)
    engine.reset()
    cold = engine.run(Ask(name="to disk", tokens=tokens))
    mine = engine.blocks()
    wait_for(
        lambda: mine <= stack.held("disk-tier"),
        "not on disk",
        details=lambda: f"{len(mine - stack.held('disk-tier'))} {stack.figures('disk-tier')}",
    )
    for seed in range(2001, 2060):
        engine.run(Ask(name=f"push {seed}", tokens=prompt(seed, 600)))
        if not mine & stack.held("host-tier"):
            break
    for path in stack.settings.disk_cache_dir.rglob("*"):
        if path.is_file() and path.stat().st_size > 1_000_000:
            with path.open("r+b") as file:
                file.write(b"\x5a" * path.stat().st_size)
    engine.reset()
    again = engine.run(Ask(name="from bad disk", tokens=tokens))
    assert alike(again, cold)
    assert again[0].cached < 576
