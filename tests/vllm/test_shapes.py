"""Engines of several shapes on one set of tiers, in vLLM's own server with its own processes.

vLLM's latent attention has no prefix caching on CPU: worker halves in processes stand for its ranks
(`tests/services/host_tier/shell/test_shapes.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.conftest import make_model
from tests.vllm.conversation import Answer, Ask
from tests.vllm.harness import (
    VLLM_PYTHON,
    EngineProcess,
    LiveStack,
    alike,
    live_stack,
    prompt,
    same,
    vllm_minor,
    wait_for,
)
from tests.vllm.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]

PROMPT_TOKENS, CACHED = 500, 480
"""The tokens of a prompt, and how many of them are found: those in whole blocks."""
DEVICE_BLOCKS = 128
"""Room for the longest request in three KV groups."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how many blocks of a prompt are stored, and loaded for a hit."""

    kind: str = "full"
    kv_heads: int = 2
    stored: int = 15
    loaded: int = 15


FULL = Model()
ONE_HEAD = Model(kv_heads=1)
IN_TURN = Model("sinks", stored=15 + 4, loaded=15 + 2)
"""Layers with a window and with full attention in turn: each stage has both."""
WINDOWS = Model("windowed", stored=15 + 2 * 4, loaded=15 + 2 * 2)
"""Of each of two windows the two blocks before the end are loaded; two others are kept for prompts
that part earlier."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's ranks, by tensor parallelism and by pipeline stages."""

    ranks: int = 1
    stages: int = 1

    @property
    def workers(self) -> int:
        """Processes with a part of the model."""
        return self.ranks * self.stages


ONE, TWO, FOUR, STAGES = Engine(), Engine(ranks=2), Engine(ranks=4), Engine(stages=2)


FOUR_CORES = pytest.mark.skipif(
    (os.cpu_count() or 1) < 4, reason="four ranks spin, and leave the services nothing of two cores"
)
SEVERAL_GROUPS = pytest.mark.skipif(
    VLLM_PYTHON.exists() and vllm_minor() < 30, reason="vLLM 0.29 passes them through"
)
WITH_WARM_UP = ["--no-enforce-eager", "--compilation-config", '{"mode":2,"backend":"eager"}']
"""For stages: they make their buffers while they warm up, and vLLM on CPU leaves that out with
`--enforce-eager`. The model is traced, and not compiled, which would take minutes."""


@contextmanager
def served(stack: LiveStack, model: str, log_dir: Path, engine: Engine) -> Iterator[ServerProcess]:
    """A server of that shape, all its ranks attached."""
    arguments = [
        "--tensor-parallel-size", str(engine.ranks),
        "--pipeline-parallel-size", str(engine.stages),
    ]  # fmt: skip
    cores = [str(number % 2) for number in range(engine.workers)]
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}
    if engine.stages > 1:
        arguments += WITH_WARM_UP
    server = ServerProcess(
        model, stack.settings, log=log_dir / f"{engine.ranks}-{engine.stages}.log",
        arguments=arguments, environ=environ, blocks=DEVICE_BLOCKS,
    )  # fmt: skip
    try:
        server.wait_started()
        server.wait_attached()
        assert stack.workers() == set(range(engine.workers))
        yield server
    finally:
        server.stop()
    wait_for(lambda: not stack.workers(), "the ranks do not leave")


def store(
    stack: LiveStack, server: ServerProcess, tokens: Sequence[int], stored: int, *, exact: bool
) -> None:
    """Compute a prompt, and load it: the answer is that of the hit on the device, bit for bit if it
    is `exact`."""
    before = stack.held("host-tier")
    answer, _ = server.complete(tokens)
    assert answer.cached == 0
    wait_for(lambda: len(stack.held("host-tier") - before) == stored, "nothing is stored")
    local, _ = server.complete(tokens)
    server.reset()
    loaded, _ = server.complete(tokens)
    assert local.cached == loaded.cached == CACHED
    assert same([loaded], [local]) if exact else alike([loaded], [local])


def wait_loaded(server: ServerProcess, engine: Engine, blocks: int) -> None:
    """Wait until so many blocks are counted as loaded; each rank has compared its part of them."""
    wait_for(lambda: server.counted("loaded_blocks") == blocks, "loads are not counted")
    assert server.counted("verified_blocks") == blocks * engine.workers
    assert server.counted("load_failed_blocks") == 0


def hits_alone(model: str, log_dir: Path, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """What vLLM without a connector answers to each prompt, with a hit on its device."""
    engine = EngineProcess(model, None, log=log_dir / "alone.log", blocks=DEVICE_BLOCKS)
    try:
        engine.wait_started()
        answers = []
        for number, tokens in enumerate(prompts):
            for time in ("first", "second"):
                [answer] = engine.run(Ask(name=f"{time} {number}", tokens=list(tokens)))
            assert answer.cached == CACHED
            answers.append(answer)
        return answers
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("engines", "model"),
    [
        pytest.param((ONE, TWO, ONE), FULL, id="ranks"),
        pytest.param((ONE, TWO), ONE_HEAD, id="more ranks than heads"),
        pytest.param((ONE, TWO), WINDOWS, id="several groups", marks=SEVERAL_GROUPS),
        pytest.param((FOUR, TWO, FOUR), FULL, id="four ranks", marks=FOUR_CORES),
        pytest.param((STAGES, ONE, STAGES), FULL, id="stages"),
        pytest.param((STAGES, ONE, STAGES), IN_TURN, id="stages of groups", marks=SEVERAL_GROUPS),
    ],
)  # fmt: skip
def test_what_one_shape_stores_the_other_loads(
    engines: Sequence[Engine], model: Model, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: blocks are cut by layers and heads, not by ranks: one size, one name, one copy.

    1. Each engine loads the prompts of those before it, and every rank compares what it has read.
       The answers are those of vLLM alone. 2. It computes a prompt of its own, and loads it.
    """
    path = make_model(tmp_path / "model", model.kind, kv_heads=model.kv_heads)
    prompts = [prompt(number, PROMPT_TOKENS) for number in range(len(engines))]
    expected = hits_alone(path, log_dir, prompts)
    sizes: set[int] = set()
    with live_stack({"cpu_cache_gb": 0.1}) as stack:
        for number, engine in enumerate(engines):
            with served(stack, path, log_dir, engine) as server:
                workers = stack.call(stack.view.stats("host-tier")).workers
                sizes |= {one.block_bytes for one in workers}
                for tokens, wanted in zip(prompts[:number], expected[:number], strict=True):
                    loaded, _ = server.complete(tokens)
                    assert loaded.cached == CACHED, engine
                    assert alike([loaded], [wanted]), f"{engine} {loaded} {wanted}"
                # Each of four ranks sums up what all have computed in another order. So the two
                # copies of a KV head differ by rounding, and one of them is stored.
                store(stack, server, prompts[number], model.stored, exact=engine.ranks <= 2)
                wait_loaded(server, engine, (number + 1) * model.loaded)
    assert len(sizes) == 1
