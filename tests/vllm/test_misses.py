"""A lookup that finds nothing costs no step: a cold prompt is scheduled as without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import make_model
from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import EngineProcess, LiveStack, alike, live_stack, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NOTHING = {
    "kv_transfer_config": {
        "kv_connector": "NothingConnector",
        "kv_connector_module_path": "tests.vllm.nothing",
        "kv_role": "kv_both",
    }
}
LENGTHS = (70, 300, 400, 90, 500)


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.05, "scrub_cpu_percent": 0}) as running:
        yield running


@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_a_cold_prompt_waits_no_step_more_than_without_a_cache(
    stack: LiveStack, tmp_path: Path, log_dir: Path, kind: str
) -> None:
    """Goal: steps between arrival and first schedule are those of a connector that does nothing.

    1. Prompts arrive together in an engine whose connector does nothing, then alone.
    2. The same in an engine with ours, which has never seen them: each is answered at once.
    3. The device forgets them: they come back from the host tier, so that the filter hides none.
    4. Every lookup is counted, and every miss explained: the host tier was told afterwards.
    """
    model = make_model(tmp_path / "model", kind)
    # Else the second engine's misses would be blocks that are here under the first one's names.
    seed = 1_000 * len(kind)
    asks = [Ask(name=f"prompt {n}", tokens=prompt(seed + n, n), new_tokens=4) for n in LENGTHS]
    last = Ask(name="alone", tokens=prompt(seed + 1, 200), new_tokens=4)
    nothing = EngineProcess(
        model, None, log=log_dir / f"{kind}-nothing.log", blocks=256, arguments=NOTHING
    ).wait_started()
    expected = [*nothing.run(*asks), *nothing.run(last)]
    nothing.stop()
    engine = EngineProcess(model, stack.settings, log=log_dir / f"{kind}.log", blocks=256)
    engine.wait_started()
    try:
        engine.wait_attached(stack)
        before = stack.figures("host-tier")
        found = [*engine.run(*asks), *engine.run(last)]
        assert [one.waited for one in found] == [one.waited for one in expected]
        assert alike(found, expected)
        assert engine.count("lookups_at_once") == engine.count("lookups") == len(found)

        engine.reset()
        loaded = engine.run(*asks, last)
        assert [one.cached for one in loaded] == [64, 288, 384, 64, 480, 192]
        assert engine.say(Command(what="state")).ok

        figures = {
            name: round(value - before.get(name, 0))
            for name, value in stack.figures("host-tier").items()
        }
        assert figures["lookups_at_once"] == len(found)
        assert figures["lookups"] == 2 * len(found)
        reasons = {name: n for name, n in figures.items() if name.startswith("missed_blocks.")}
        assert sum(reasons.values()) == figures["lookup_blocks.miss"] > 0
        # On a busy machine some are told when their own request's blocks are on their way.
        explained = {name.removeprefix("missed_blocks.") for name, n in reasons.items() if n}
        assert "never_stored" in explained <= {"never_stored", "arriving"}
    finally:
        engine.stop()
