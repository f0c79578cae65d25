"""Weights that are updated in a running engine: nothing of before is found after a reset."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import make_lora, make_model
from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import (
    EngineProcess,
    LiveStack,
    alike,
    live_stack,
    prompt,
    same,
)
from tests.vllm.test_events import wait_agreed
from tests.vllm.worker_extension import WeightWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    tiers = {"cpu_cache_gb": 0.05, "disk_cache_gb": 0.05, "disable_disk_offload_filter": True}
    with live_stack(tiers) as running:
        yield running


def test_a_reset_after_new_weights_hides_what_the_old_ones_made(
    stack: LiveStack, model: str, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: the answers are a fresh engine's with the new weights, token for token.

    1. A prompt is computed, stored, and loaded again.
    2. Its engine loads other weights and resets its caches, ours with them.
    3. The prompt is computed; the index agrees; a second time it is loaded, as the new weights
       have made it.
    4. A pause that clears the caches works, too.
    5. The memory is taken back, as for a sleep: the engine computes, and nothing is stored. It is
       lent again: blocks are loaded as before.
    6. A reset that vLLM refuses, after yet other weights: what the device has kept of the first
       ones is hit, and not stored, so that nobody loads it later.
    7. Weights are written in a pause, while a request runs, and vLLM's cache alone is reset, as the
       connector is not told: nothing of before is found, and nothing of that request is stored.
    8. So it is where a function of the program writes them, whose name says nothing.
    """
    other = make_model(tmp_path / "other", "full", seed=1)
    log = log_dir / "fresh.log"
    fresh = EngineProcess(other, stack.settings, log=log).wait_started()
    tokens = prompt(1, 500)
    try:
        expected = fresh.run(Ask(name="fresh", tokens=tokens))
        elsewhere = fresh.run(Ask(name="fresh 2", tokens=prompt(2, 500)))
    finally:
        fresh.stop()
    engine = EngineProcess(model, stack.settings, log=log_dir / "resets.log").wait_started()
    try:
        engine.wait_attached(stack)
        old = engine.run(Ask(name="old", tokens=tokens))
        engine.reset()
        assert engine.run(Ask(name="old again", tokens=tokens))[0].cached == 480
        engine.say(Command(what="load weights", path=other))
        assert engine.say(Command(what="reset all")).ok
        new = engine.run(Ask(name="new", tokens=tokens))
        assert new[0].cached == 0
        assert same(new, expected)
        assert not same(new, old)
        wait_agreed(stack, engine)
        engine.reset()
        again = engine.run(Ask(name="new again", tokens=tokens))
        assert again[0].cached == 480
        assert alike(again, expected)
        assert engine.say(Command(what="pause")).ok
        paused = engine.run(Ask(name="after a pause", tokens=tokens))
        assert paused[0].cached == 0
        wait_agreed(stack, engine)
        engine.reset()
        engine.say(Command(what="park"))
        parked = engine.run(Ask(name="parked", tokens=prompt(2, 500)))
        assert alike(parked, elsewhere)
        engine.reset()
        engine.say(Command(what="restore"))
        engine.wait_attached(stack)
        woken = engine.run(Ask(name="after a sleep", tokens=tokens))
        assert woken[0].cached == 480
        assert alike(woken, expected)
        wait_agreed(stack, engine)
        engine.say(Command(what="load weights", path=model))
        beside = Ask(name="beside", tokens=prompt(3, 100))
        assert engine.say(Command(what="reset refused", asks=[beside])).ok
        assert engine.run(Ask(name="stale", tokens=tokens))[0].cached == 480
        engine.reset()
        clean = engine.run(Ask(name="clean", tokens=tokens))
        assert clean[0].cached == 0
        assert alike(clean, old)
        refused = engine.count("requests_refused.reset")
        during = Ask(name="during", tokens=prompt(3, 300), new_tokens=40)
        engine.say(Command(what="write in pause", path=other, asks=[during]))
        assert engine.count("requests_refused.reset") == refused + 1
        for cached in (0, 480):
            engine.reset()
            written = engine.run(Ask(name=f"written {cached}", tokens=tokens))
            assert written[0].cached == cached
            assert alike(written, expected)
        engine.say(Command(what="receive weights", path=model))
        engine.reset()
        received = engine.run(Ask(name="received", tokens=tokens))
        assert received[0].cached == 0
        assert alike(received, old)
    finally:
        engine.stop()


def test_a_reset_of_vllm_alone_is_enough_where_weights_are_pushed(
    stack: LiveStack, model: str, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: the answers of vLLM alone in the flow of an RL framework, which knows no connector.

    1. A prompt is computed, stored, and the engine loads other weights.
    2. vLLM's prefix cache is reset, and the connector is not told.
    3. The prompt is computed, as by a fresh engine with the new weights; the index agrees.
    4. A second time nothing is found either: no reset hits what was stored before it.
    """
    other = make_model(tmp_path / "other", "full", seed=1)
    tokens = prompt(4, 500)
    fresh = EngineProcess(other, None, log=log_dir / "alone.log").wait_started()
    try:
        expected = fresh.run(Ask(name="alone", tokens=tokens))
    finally:
        fresh.stop()
    extension = {"worker_extension_cls": f"{WeightWriter.__module__}.{WeightWriter.__name__}"}
    log = log_dir / "pushed.log"
    engine = EngineProcess(model, stack.settings, log=log, arguments=extension).wait_started()
    try:
        engine.wait_attached(stack)
        old = engine.run(Ask(name="old", tokens=tokens))
        engine.say(Command(what="load weights", path=other))
        engine.reset()
        new = engine.run(Ask(name="new", tokens=tokens))
        assert new[0].cached == 0
        assert alike(new, expected)
        assert not same(new, old)
        wait_agreed(stack, engine)
        engine.reset()
        again = engine.run(Ask(name="new again", tokens=tokens))
        assert again[0].cached == 0
        assert alike(again, expected)
        assert engine.run(Ask(name="hit", tokens=tokens))[0].cached == 480
    finally:
        engine.stop()


def test_an_adapter_is_known_by_its_content(
    stack: LiveStack, model: str, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: another adapter under the same name finds nothing of the first one.

    1. An adapter's blocks are stored, and loaded again; the index agrees with both halves.
    2. The same name stands for another directory: computed.
    3. The first directory's files are replaced: its requests pass through, and are counted,
       until the caches are reset.
    """
    first = make_lora(tmp_path / "first", model, seed=1)
    second = make_lora(tmp_path / "second", model, seed=2)
    log = log_dir / "adapters.log"
    arguments = {"enable_lora": True, "max_lora_rank": 8}
    engine = EngineProcess(model, stack.settings, log=log, arguments=arguments).wait_started()
    tokens = prompt(2, 300)

    def ask(name: str, number: int, path: str) -> Ask:
        return Ask(name=name, tokens=tokens, lora=("poet", number, path))

    try:
        engine.wait_attached(stack)
        one = engine.run(ask("one", 1, first))
        wait_agreed(stack, engine)
        engine.reset()
        again = engine.run(ask("one again", 1, first))
        assert again[0].cached == 288
        assert alike(again, one)
        wait_agreed(stack, engine)
        engine.reset()
        two = engine.run(ask("two", 2, second))
        assert two[0].cached == 0
        assert not same(two, one)
        wait_agreed(stack, engine)
        engine.reset()
        shutil.copy(Path(second) / "adapter_model.safetensors", first)
        engine.run(ask("changed", 1, first))
        assert engine.count("requests_refused.lora_changed") == 1
        assert engine.say(Command(what="reset all")).ok
        engine.run(ask("read again", 3, first))
        assert engine.count("requests_refused.lora_recent") == 1
    finally:
        engine.stop()


def test_an_adapter_that_is_replaced_in_place_stores_nothing(
    stack: LiveStack, model: str, tmp_path: Path, log_dir: Path
) -> None:
    """Goal: what vLLM computes with new weights under an old adapter's name is not stored.

    1. A request with an adapter is computed.
    2. vLLM loads another adapter under its number, and then computes a request with the old one
       that had waited.
    3. The same prompt with the old adapter under a number of its own is answered as without a
       cache.
    4. The first load of a third number fails half-way, and vLLM keeps what it has of it. What it
       computes so with that number is not found with another one.
    """
    first = make_lora(tmp_path / "first", model, seed=1)
    second = make_lora(tmp_path / "second", model, seed=2)
    arguments = {"enable_lora": True, "max_lora_rank": 8}
    engine = EngineProcess(
        model, stack.settings, log=log_dir / "replaced.log", arguments=arguments
    ).wait_started()
    tokens = prompt(3, 300)

    def ask(name: str, number: int, path: str, salt: str | None = None) -> Ask:
        return Ask(name=name, tokens=tokens, lora=("poet", number, path), salt=salt)

    try:
        engine.wait_attached(stack)
        one = engine.run(ask("one", 1, first, salt="first"))
        assert engine.say(Command(what="replace adapter", asks=[ask("", 1, second)])).ok
        waited = engine.run(ask("waited", 1, first))
        assert not same(waited, one), "computed with the new weights"
        engine.reset()
        again = engine.run(ask("again", 2, first))
        assert alike(again, one)
        assert engine.say(Command(what="reset all")).ok
        broken = make_lora(tmp_path / "broken", model, seed=2, broken=True)
        assert not engine.say(Command(what="replace adapter", asks=[ask("", 3, broken)])).ok
        assert not same(engine.run(ask("half", 3, first)), one), "computed with a part"
        engine.reset()
        assert alike(engine.run(ask("whole", 2, first)), one)
    finally:
        engine.stop()
