"""Models with sliding windows: blocks of several KV groups, from host, disk and after a restart.

The windowed model has a layer with full attention and two with a window of 64 tokens, each in a
group of its own; the sliding one has windows alone. A block has 32 tokens: a window is two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import make_model
from tests.vllm.conversation import Ask
from tests.vllm.harness import (
    EngineProcess,
    LiveStack,
    alike,
    corrupt_arena,
    live_stack,
    prompt,
    same,
    wait_for,
)
from tests.vllm.test_events import differences, wait_agreed

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("several_groups")
]  # fmt: skip

BLOCK_BYTES = 32_768
WINDOW = 2
"""Blocks."""
FULL_ATTENTION = 2
"""The KV group of the last layer."""
TIERS = {
    "cpu_cache_gb": 60 * BLOCK_BYTES / 1e9,
    "disk_cache_gb": 1_000 * BLOCK_BYTES / 1e9,
    "disable_disk_offload_filter": True,
    "scrub_cpu_percent": 0,
}
"""Room for one prompt in the arena, and for all on disk."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack(TIERS) as running:
        yield running


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("windowed"), "windowed")


@pytest.fixture(scope="module")
def engine(stack: LiveStack, windowed: str, log_dir: Path) -> Iterator[EngineProcess]:
    process = start(windowed, stack, log_dir / "groups.log")
    yield process
    process.stop()


def start(model: str, stack: LiveStack, log: Path) -> EngineProcess:
    process = EngineProcess(model, stack.settings, log=log, blocks=128).wait_started()
    process.wait_attached(stack)
    return process


def test_a_hit_brings_of_a_window_what_it_needs_and_no_more(engine: EngineProcess) -> None:
    """Goal: 480 of 500 tokens are 15 blocks of full attention, and two of each window."""
    tokens = prompt(1, 500)
    cold = engine.run(Ask(name="cold", tokens=tokens))
    local = engine.run(Ask(name="local", tokens=tokens))
    engine.reset()
    before = engine.count("loaded_blocks")
    loaded = engine.run(Ask(name="loaded", tokens=tokens))
    assert local[0].cached == loaded[0].cached == 480
    assert same(loaded, local)
    assert alike(local, cold)
    assert engine.count("loaded_blocks") - before == 15 + 2 * WINDOW


def test_the_next_turn_begins_where_the_last_one_ended(engine: EngineProcess) -> None:
    """Goal: the blocks of an answer are found, too: the window before its end is stored."""
    tokens = prompt(2, 300)
    [first] = engine.run(Ask(name="first", tokens=tokens, new_tokens=100))
    following = [*tokens, *first.tokens, *prompt(3, 100)]
    engine.reset()
    [second] = engine.run(Ask(name="second", tokens=following))
    assert second.cached == (300 + 100 - 1) // 32 * 32
    engine.reset()
    cold = engine.run(Ask(name="alone", tokens=following, salt="nobody has this one"))
    assert alike([second], cold)


def test_where_prompts_part_the_third_one_hits(engine: EngineProcess) -> None:
    """Goal: a shared beginning that no request ended at is found from the third prompt on.

    1. The second prompt shares 224 tokens with the first: the window there was not kept. All that
       full attention has is no hit, and it computes.
    2. The third one loads the 224 tokens.
    """
    shared = prompt(4, 230)
    cached = []
    for seed in (5, 6, 7):
        tokens = [*shared, *prompt(seed, 170)]
        engine.reset()
        [answer] = engine.run(Ask(name=f"prompt {seed}", tokens=tokens))
        cached.append(answer.cached)
        engine.reset()
        cold = engine.run(Ask(name=f"alone {seed}", tokens=tokens, salt=f"alone {seed}"))
        assert alike([answer], cold)
    assert cached[0] == 0
    assert cached[1] < 224
    assert cached[2] == 224


def test_wrong_bytes_are_noticed_in_every_group(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: one bad block of any group, and the whole hit is computed."""
    tokens = prompt(8, 400)
    cold = engine.run(Ask(name="cold", tokens=tokens))
    engine.reset()
    corrupt_arena(stack.settings)
    failed = engine.count("load_failed_blocks")
    again = engine.run(Ask(name="again", tokens=tokens))
    assert alike(again, cold)
    assert engine.count("load_failed_blocks") > failed


def test_the_index_agrees(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: in the tiers all blocks are known, on the device all of full attention.

    Of some blocks of a window vLLM's events do not say which ones they are; the index never holds
    one that is not there.
    """
    engine.reset()
    source = engine.state().engine

    def found() -> dict[str, tuple[int, int]]:
        known = stack.indexed().get(source, set())
        full, device = engine.blocks(group=FULL_ATTENTION), engine.blocks()
        differs = differences(stack, engine)
        differs.pop(source, None)
        if not full <= known <= device:
            differs[source] = len(full - known), len(known - device)
        return differs

    def agreed() -> bool:
        return not found()

    for seed in range(20, 26):
        engine.run(Ask(name=f"prompt {seed}", tokens=prompt(seed, 150 + 40 * seed), new_tokens=40))
        wait_for(agreed, "the index differs", details=lambda: str(found()))
    engine.run(Ask(name="loaded", tokens=prompt(20, 950)))
    wait_for(agreed, "the index differs", details=lambda: str(found()))
    engine.reset()
    wait_agreed(stack, engine)


def test_from_disk_and_after_a_restart_of_everything(
    stack: LiveStack, engine: EngineProcess, windowed: str, log_dir: Path
) -> None:
    """Goal: what left the host tier comes back from disk, group by group.

    1. A prompt is pushed out of the arena by others, and loaded through the disk tier.
    2. The host tier is killed; another life of it, and another engine, get the same answer.
    """
    tokens = prompt(30, 400)
    cold = engine.run(Ask(name="cold", tokens=tokens))
    mine = stack.held("host-tier")
    wait_for(lambda: mine <= stack.held("disk-tier"), "not all is on disk")
    for seed in range(31, 35):
        engine.run(Ask(name=f"other {seed}", tokens=prompt(seed, 600)))
    engine.reset()
    before = stack.figures("host-tier")["lookup_blocks.disk"]
    from_disk = engine.run(Ask(name="from disk", tokens=tokens))
    assert from_disk[0].cached == 384
    assert stack.figures("host-tier")["lookup_blocks.disk"] > before
    assert alike(from_disk, cold)

    stack.kill("host-tier")
    stack.start("host-tier")
    another = start(windowed, stack, log_dir / "another.log")
    try:
        restarted = another.run(Ask(name="restarted", tokens=tokens))
        assert restarted[0].cached == 384
        assert same(restarted, from_disk)
    finally:
        another.stop()


def test_windows_alone(log_dir: Path, tmp_path: Path) -> None:
    """Goal: a hit of 480 tokens brings the last two blocks, and no others."""
    model = make_model(tmp_path / "model", "sliding")
    with live_stack({"cpu_cache_gb": 0.1}) as stack:
        engine = start(model, stack, log_dir / "sliding.log")
        try:
            tokens = prompt(1, 500)
            cold = engine.run(Ask(name="cold", tokens=tokens))
            local = engine.run(Ask(name="local", tokens=tokens))
            engine.reset()
            loaded = engine.run(Ask(name="loaded", tokens=tokens))
            assert local[0].cached == loaded[0].cached == 480
            assert same(loaded, local)
            assert alike(local, cold)
            assert engine.count("loaded_blocks") == WINDOW
        finally:
            engine.stop()
