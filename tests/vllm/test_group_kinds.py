"""Kinds of attention beside each other, on a real engine: from device, host, disk, after a restart.

Each model has a last layer with full attention. A prompt is computed, hit on the device, and loaded
from every tier: the answers are equal bit for bit, and of each group no more is loaded than a hit
needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("several_groups")
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and what a hit of its prompt is."""

    kind: str
    cached: int
    """Tokens of the hit; 0: as many as are in whole blocks."""
    loaded: int
    """Blocks of all groups that it needs; 0: those, and one of each of two groups of states."""
    block_bytes: int
    tokens: int = 500
    arena: int = 40
    """Blocks: room for a prompt or two."""
    arguments: Mapping[str, object] = field(default_factory=dict)


STATES = {"max_num_batched_tokens": 64}
"""vLLM's Mamba-2 on CPU cannot leave a state in the middle of a step."""
CASES = (
    Case("sinks", 480, 15 + 2, 65_536),
    Case("chunks", 480, 15 + 2 * 1, 32_768),
    Case("sizes", 448, 14 + 2 * 1, 65_536),
    Case("states", 0, 0, 32_768, arguments=STATES),
    Case("delta", 0, 0, 131_072, arguments={"dtype": "bfloat16"}),
)
BLOCK_OF_STATE = re.compile(r"Setting attention block size to (\d+) tokens")
"""vLLM's log: beside states a block is as large as one; some processors have them in float32."""
by_kind = pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)


def start(case: Case, model: str, stack: LiveStack, log: Path) -> EngineProcess:
    process = EngineProcess(
        model, stack.settings, log=log, blocks=96, arguments=case.arguments
    ).wait_started()
    process.wait_attached(stack)
    return process


def with_states_of(case: Case, log: Path) -> Case:
    """Return the case with the size of blocks that vLLM has chosen."""
    if case.cached:
        return case
    found = BLOCK_OF_STATE.search(log.read_text())
    assert found, "vLLM's log names no size of blocks"
    size = int(found[1])
    blocks = case.tokens // size
    return replace(case, cached=blocks * size, loaded=blocks + 2)


@by_kind
def test_every_tier_gives_the_answer_of_the_device(
    case: Case, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: all groups' blocks come back whole, and no block that a hit does not need.

    1. A prompt is computed, hit on the device, and loaded from the host tier.
    2. The next turn begins at the end of the answer; what the two turns have in common is found.
    3. All is written to disk and pushed out of the arena, and comes back from there.
    4. The host tier is killed and starts anew; another engine loads the prompt.
    5. The arena is garbage: the prompt is computed again.
    """
    model = make_model(tmp_path / "model", case.kind)
    tiers = {
        "cpu_cache_gb": case.arena * case.block_bytes / 1e9,
        "disk_cache_gb": 1_000 * case.block_bytes / 1e9,
        "disable_disk_offload_filter": True,
        "scrub_cpu_percent": 0,
    }
    with live_stack(tiers) as stack:
        engine = start(case, model, stack, log_dir / f"{case.kind}.log")
        case = with_states_of(case, log_dir / f"{case.kind}.log")
        tokens = prompt(1, case.tokens)
        try:
            cold = engine.run(Ask(name="cold", tokens=tokens))
            local = engine.run(Ask(name="local", tokens=tokens))
            engine.reset()
            loaded = engine.run(Ask(name="loaded", tokens=tokens))
            told = engine.state().counts, stack.figures("host-tier")
            assert (local[0].cached, loaded[0].cached) == (case.cached, case.cached), told
            assert same(loaded, local)
            assert alike(local, cold)
            assert engine.count("loaded_blocks") == case.loaded

            following = [*tokens, *loaded[0].tokens, *prompt(2, 90)]
            engine.reset()
            [second] = engine.run(Ask(name="second", tokens=following))
            assert second.cached >= case.cached
            # In bfloat16 a prompt computed in other pieces has logprobs that differ by 0.02.
            salt = "nobody has this one"
            engine.run(Ask(name="alone", tokens=tokens, salt=salt))
            alone = engine.run(Ask(name="alone, from the device", tokens=following, salt=salt))
            assert alike([second], alone)

            mine = stack.held("host-tier")
            wait_for(lambda: mine <= stack.held("disk-tier"), "not all is on disk")
            for seed in range(3, 8):
                engine.run(Ask(name=f"other {seed}", tokens=prompt(seed, case.tokens)))
            engine.reset()
            before = stack.figures("host-tier")["lookup_blocks.disk"]
            from_disk = engine.run(Ask(name="from disk", tokens=tokens))
            assert from_disk[0].cached == case.cached
            assert stack.figures("host-tier")["lookup_blocks.disk"] > before
            assert same(from_disk, local)
        finally:
            engine.stop()
        stack.kill("host-tier")
        stack.start("host-tier")
        another = start(case, model, stack, log_dir / f"{case.kind}-another.log")
        try:
            restarted = another.run(Ask(name="restarted", tokens=tokens))
            facts = another.state().counts, stack.figures("host-tier")
            assert restarted[0].cached == case.cached, facts
            assert same(restarted, local)
            another.reset()
            corrupt_arena(stack.settings)
            again = another.run(Ask(name="again", tokens=tokens))
            assert another.count("load_failed_blocks") > 0
            assert alike(again, cold)
        finally:
            another.stop()
