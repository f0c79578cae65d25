"""Truth in events: at every quiet point the index holds what the device and the tiers hold.

Device events come from vLLM's own publisher through the consolidator, tier events from the tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import EngineProcess, LiveStack, alike, live_stack, prompt, same, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TIERS = ("host-tier", "disk-tier")


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    tiers = {"cpu_cache_gb": 0.05, "disk_cache_gb": 0.05, "disable_disk_offload_filter": True}
    with live_stack(tiers) as running:
        yield running


@pytest.fixture(scope="module")
def engine(stack: LiveStack, model: str, log_dir: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(model, stack.settings, log=log_dir / "events.log").wait_started()
    process.wait_attached(stack)
    yield process
    process.stop()


def differences(stack: LiveStack, *engines: EngineProcess) -> dict[str, tuple[int, int]]:
    """Sources of which the index thinks otherwise: blocks unknown to it, blocks gone."""
    own = {f"{kind}-0": stack.held(kind) for kind in TIERS}
    own |= {engine.state().engine: engine.blocks() for engine in engines}
    indexed = stack.indexed()
    return {
        source: (len(blocks - known), len(known - blocks))
        for source in own.keys() | indexed.keys()
        if (blocks := own.get(source, set())) != (known := indexed.get(source, set()))
    }


def wait_agreed(stack: LiveStack, *engines: EngineProcess) -> None:
    """Events take a moment; then there must be no difference."""
    found: dict[str, tuple[int, int]] = {}

    def agreed() -> bool:
        found.clear()
        found.update(differences(stack, *engines))
        return not found

    wait_for(agreed, "the index differs", details=lambda: str(found))


def test_the_index_agrees_at_every_quiet_point(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: one truth.

    1. Prompts are computed until the device evicts; answers of a few blocks are cached too.
    2. They are loaded again, which evicts others; then the prefix cache is reset.
    3. After each step the index holds, by source, exactly what each source holds.
    """
    prompts = [prompt(seed, 200 + 37 * seed) for seed in range(12)]
    for seed, tokens in enumerate(prompts):
        engine.run(Ask(name=f"first {seed}", tokens=tokens, new_tokens=70))
        if seed % 4 == 3:
            wait_agreed(stack, engine)
    for seed, tokens in enumerate(prompts):
        engine.run(Ask(name=f"second {seed}", tokens=tokens))
    wait_agreed(stack, engine)
    engine.reset()
    assert engine.blocks() == set()
    wait_agreed(stack, engine)


def test_no_hit_across_salts(stack: LiveStack, engine: EngineProcess) -> None:
    """Goal: a salt is part of every block's name, on the device, in the tiers and in the index."""
    tokens = prompt(100, 300)
    blue = engine.run(Ask(name="blue", tokens=tokens, salt="blue"))
    names = engine.blocks()
    engine.reset()
    red = engine.run(Ask(name="red", tokens=tokens, salt="red"))
    plain = engine.run(Ask(name="plain", tokens=tokens))
    assert blue[0].cached == red[0].cached == plain[0].cached == 0
    assert same(blue, red)
    assert not names & engine.blocks()
    wait_agreed(stack, engine)
    engine.reset()
    again = engine.run(Ask(name="blue again", tokens=tokens, salt="blue"))
    assert again[0].cached == 288
    wait_agreed(stack, engine)


def test_two_engines_share_one_cache(
    stack: LiveStack, engine: EngineProcess, model: str, log_dir: Path
) -> None:
    """Goal: what one engine has computed the other loads, and either survives the other's death.

    1. A second engine starts; their sources and sockets differ. It loads what the first computed.
    2. It computes something, and is killed; the index forgets its blocks.
    3. The first one loads what the dead one computed.
    """
    tokens = prompt(200, 400)
    first = engine.run(Ask(name="mine", tokens=tokens))
    log = log_dir / "second.log"
    second = EngineProcess(model, stack.settings, log=log).wait_started()
    try:
        second.wait_attached(stack)
        assert second.state().engine != engine.state().engine
        loaded = second.run(Ask(name="theirs", tokens=tokens))
        assert loaded[0].cached == 384
        assert alike(loaded, first)
        other = prompt(201, 400)
        computed = second.run(Ask(name="other", tokens=other))
        wait_agreed(stack, engine, second)
    finally:
        second.kill()
    wait_agreed(stack, engine)
    survived = engine.run(Ask(name="inherited", tokens=other))
    assert survived[0].cached == 384
    assert alike(survived, computed)


def test_the_second_engine_survives_the_first(
    stack: LiveStack, engine: EngineProcess, model: str, log_dir: Path
) -> None:
    """Goal: whoever came first is nobody special: no port, no tier and no event hangs on it.

    1. The first engine computes something; a later one starts and computes something else.
    2. The first one is killed while it computes; the index forgets its blocks.
    3. The later one loads what either has computed, and stores more. (Last: it takes the engine.)
    """
    tokens = prompt(300, 400)
    first = engine.run(Ask(name="legacy", tokens=tokens))
    log = log_dir / "later.log"
    later = EngineProcess(model, stack.settings, log=log).wait_started()
    try:
        later.wait_attached(stack)
        own = prompt(301, 400)
        computed = later.run(Ask(name="own", tokens=own))
        wait_agreed(stack, engine, later)
        engine.begin(Command(what="run", asks=[Ask(name="cut off", tokens=prompt(302, 1500))]))
        engine.kill()
        wait_agreed(stack, later)
        later.reset()
        inherited = later.run(Ask(name="inherited", tokens=tokens))
        mine = later.run(Ask(name="mine", tokens=own))
        assert inherited[0].cached == mine[0].cached == 384
        assert alike(inherited, first)
        assert alike(mine, computed)
        before = later.count("offload_blocks")
        later.run(Ask(name="goes on", tokens=prompt(303, 400)))
        assert later.count("offload_blocks") > before
        wait_agreed(stack, later)
    finally:
        later.stop()
