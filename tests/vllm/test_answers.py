"""The same answer, wherever the blocks come from: device, host, disk, before and after a restart.

In float32, greedy. Prefills are chunked (256 tokens). What was loaded must answer bit for bit as
what was on the device; a cold run, whose chunks end elsewhere, within rounding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import (
    BLOCK_TOKENS,
    ONE_THREAD,
    EngineProcess,
    LiveStack,
    alike,
    corrupt_arena,
    live_stack,
    prompt,
    same,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BLOCK_BYTES = 98_304
"""Of the model that make_model.py makes."""
LENGTHS = (31, 32, 33, 64, 65, 255, 257, 700, 1500)


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    # Without the scrubber, which would find wrong bytes before a load does.
    with live_stack({"cpu_cache_gb": 0.2, "scrub_cpu_percent": 0}) as running:
        yield running


@pytest.fixture(scope="module")
def engine(stack: LiveStack, model: str, log_dir: Path) -> Iterator[EngineProcess]:
    log = log_dir / "answers.log"
    process = EngineProcess(model, stack.settings, log=log, environ=ONE_THREAD).wait_started()
    process.wait_attached(stack)
    yield process
    process.stop()


def usable_tokens(length: int) -> int:
    """The tokens of a prompt that may come from a cache: whole blocks, one token is computed."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_device_and_host_answer_like_a_cold_run(engine: EngineProcess) -> None:
    """Goal: a load changes nothing but the time.

    1. For prompts around every edge of blocks and chunks: a cold run, a hit on the device, and
       after the device was emptied a load from the host tier.
    2. All blocks that can come from a cache did. The last two answers are equal bit for bit; the
       cold run computes long prompts in other chunks, which alone moves logprobs by 1e-6.
    """
    for seed, length in enumerate(LENGTHS):
        tokens = prompt(seed, length)
        cold = engine.run(Ask(name=f"cold {seed}", tokens=tokens))
        local = engine.run(Ask(name=f"local {seed}", tokens=tokens))
        engine.reset()
        loaded = engine.run(Ask(name=f"loaded {seed}", tokens=tokens))
        assert cold[0].cached == 0
        assert local[0].cached == loaded[0].cached == usable_tokens(length)
        assert same(loaded, local), length
        assert alike(cold, local), length
    assert engine.count("load_failed_blocks") == 0


def test_concurrent_requests_share_what_they_load(engine: EngineProcess) -> None:
    """Goal: requests with a common prefix that come together get the same answers as alone.

    Batches change the last bits of logprobs, so only tokens are compared here.
    """
    first = 1000
    common = prompt(first, 320)
    prompts = [common + prompt(first + number, 20 + 40 * number) for number in range(1, 9)]
    alone = [engine.run(Ask(name=f"{first} {n}", tokens=p))[0] for n, p in enumerate(prompts)]
    engine.reset()
    together = engine.run(
        *(Ask(name=f"{first} again {n}", tokens=p) for n, p in enumerate(prompts))
    )
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert all(answer.cached >= 320 - BLOCK_TOKENS for answer in together)


def test_it_keeps_off_the_processor_that_computes(engine: EngineProcess) -> None:
    """Goal: an engine with nothing to load or store pays nothing for the connector.

    The engine's OpenMP is bound to one processor, as vLLM's server does it. The connector's threads
    are not, and its mover does not poll for a host tier that has nothing to read.
    """
    engine.run(Ask(name="busy", tokens=prompt(1500, 100)))
    state = engine.state()
    ours = {name: cpus for name, cpus in state.cpus.items() if re.match("kvbm|mover|arena", name)}
    assert len(ours) >= 4
    assert set(ours.values()) == {os.cpu_count()}
    assert state.cpus.keys() - ours.keys()
    assert not state.expects_reads


def test_an_aborted_request_leaves_nothing_behind(engine: EngineProcess) -> None:
    """Goal: a request may be aborted at every step of lookup, load and compute.

    `run` returns only when no block is held and nothing is on offer or leased.
    """
    tokens = prompt(2000, 900)
    cold = engine.run(Ask(name="before", tokens=tokens))
    for steps in range(1, 9):
        engine.reset()
        engine.run(Ask(name=f"abort {steps}", tokens=tokens, abort_after_steps=steps))
    engine.reset()
    again = engine.run(Ask(name="after", tokens=tokens))
    assert alike(again, cold)
    assert again[0].cached == usable_tokens(900)


def test_preempted_requests_answer_as_if_alone(engine: EngineProcess) -> None:
    """Goal: preemption takes blocks from a request, and from offers; nothing wrong is cached.

    1. Four requests need more blocks together than the device has: some are preempted.
    2. Their answers are those that they give alone, with the blocks that were cached meanwhile.
    """
    asks = [Ask(name=f"p {n}", tokens=prompt(3000 + n, 320), new_tokens=300) for n in range(4)]
    before = engine.state().preemptions
    together = engine.run(*asks)
    assert engine.state().preemptions > before
    engine.reset()
    for ask, answer in zip(asks, together, strict=True):
        alone = engine.run(
            Ask(name=f"{ask.name} alone", tokens=ask.tokens, new_tokens=ask.new_tokens)
        )
        assert alone[0].tokens == answer.tokens
        assert alone[0].cached == usable_tokens(320)


def test_wrong_bytes_are_noticed(stack: LiveStack, engine: EngineProcess) -> None:
    """The negative control: do answers depend on the bytes, and does verification find wrong ones?

    1. Nonsense is written over the arena. With verification the load is refused, the blocks are
       recomputed, and the answer is right. A second request loads nothing.
    2. The same without verification: the answer differs. (Last: it poisons caches.)
    """
    tokens = prompt(4000, 640)
    cold = engine.run(Ask(name="intact", tokens=tokens))
    engine.reset()
    corrupt_arena(stack.settings)
    refused = engine.count("loads_failed")
    verified = engine.run(Ask(name="verified", tokens=tokens))
    assert alike(verified, cold)
    assert engine.count("loads_failed") == refused + 1
    assert re.search(r"corrupt: load of verified\S* failed", engine.log_text())
    engine.reset()
    assert alike(engine.run(Ask(name="avoided", tokens=tokens)), cold)

    other = prompt(4001, 640)
    right = engine.run(Ask(name="other", tokens=other))
    engine.reset()
    corrupt_arena(stack.settings)
    engine.say(Command(what="verify never"))
    wrong = engine.run(Ask(name="unverified", tokens=other))
    assert wrong[0].cached == usable_tokens(640)
    assert not alike(wrong, right)


def test_blocks_from_disk_and_after_a_restart(model: str, log_dir: Path) -> None:
    """Goal: what left the host tier comes back from disk, also for the next life of the engine.

    1. The arena has room for 30 blocks, the disk for all. A prompt is computed, and pushed out
       of the arena by others.
    2. It is loaded through the disk tier; the answer is the same.
    3. The engine stops; its next life gets the same answer from the tiers.
    """
    tiers = {
        "cpu_cache_gb": 30 * BLOCK_BYTES / 1e9,
        "disk_cache_gb": 400 * BLOCK_BYTES / 1e9,
        "disable_disk_offload_filter": True,
    }
    with live_stack(tiers) as stack:
        engine = EngineProcess(model, stack.settings, log=log_dir / "disk.log").wait_started()
        try:
            engine.wait_attached(stack)
            tokens = prompt(5000, 500)
            cold = engine.run(Ask(name="cold", tokens=tokens))
            wait_for(lambda: len(stack.held("disk-tier")) >= 15, "nothing is on disk")
            mine = stack.held("disk-tier")
            for seed in range(5001, 5005):
                engine.run(Ask(name=f"other {seed}", tokens=prompt(seed, 500)))
            wait_for(lambda: not mine & stack.held("host-tier"), "the arena holds it for ever")
            engine.reset()
            from_disk = engine.run(Ask(name="from disk", tokens=tokens))
            assert from_disk[0].cached == usable_tokens(500)
            assert stack.figures("host-tier")["lookup_blocks.disk"] >= 15
            assert alike(from_disk, cold)
        finally:
            engine.stop()
        engine = EngineProcess(model, stack.settings, log=log_dir / "again.log").wait_started()
        try:
            engine.wait_attached(stack)
            restarted = engine.run(Ask(name="restarted", tokens=tokens))
            assert restarted[0].cached == usable_tokens(500)
            assert same(restarted, from_disk)
        finally:
            engine.stop()
