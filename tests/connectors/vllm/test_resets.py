"""Which engines forget with a reset of vLLM's prefix cache alone, and how such a reset and new
weights are seen."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvbm_common.errors import ConfigError
from kvbm_connectors.vllm.options import Options
from kvbm_connectors.vllm.resets import Generations, PrefixCacheWatch, weights_are_pushed


def config(transfer: object = None, **parallel: object) -> Any:
    """vllm.config.VllmConfig."""
    defaults = {
        "worker_cls": "vllm.v1.worker.gpu_worker.Worker",
        "worker_extension_cls": "",
        "distributed_executor_backend": "mp",
    }
    fields = SimpleNamespace(**(defaults | parallel))
    return SimpleNamespace(parallel_config=fields, weight_transfer_config=transfer)


@pytest.mark.parametrize(
    "pushed",
    [
        config(worker_extension_cls="rl.WeightWriter"),
        config(worker_cls="rl.Worker"),
        config(distributed_executor_backend="external_launcher"),
        config(transfer=object()),
    ],
    ids=["extension", "worker", "launcher", "transfer"],
)
def test_weights_are_pushed_into_engines_that_are_made_for_it(pushed: Any) -> None:
    assert weights_are_pushed(pushed)


@pytest.mark.parametrize("worker", ["auto", "vllm.v1.worker.cpu_worker.CPUWorker", ""])
def test_other_engines_keep_their_weights(worker: str) -> None:
    assert not weights_are_pushed(config(worker_cls=worker))
    assert not weights_are_pushed(SimpleNamespace(parallel_config=SimpleNamespace()))


def test_an_operator_may_choose_for_any_engine() -> None:
    chosen = {
        name: [Options.read({"plain_reset": name}, {}).forgets(pushed) for pushed in (False, True)]
        for name in ("auto", "forget", "keep")
    }
    assert chosen == {"auto": [False, True], "forget": [True, True], "keep": [False, False]}
    assert Options.read({}, {}).plain_reset == "auto"
    with pytest.raises(ConfigError, match=r"plain_reset .* accepts auto, forget or keep"):
        Options.read({"plain_reset": "always"}, {})


@pytest.mark.parametrize("free", [7, 6], ids=["cleared", "refused"])
def test_a_generation_is_announced_with_the_time_of_its_clear(free: int) -> None:
    """Events of before are earlier. A reset that vLLM refuses is announced with the next clear."""
    said: dict[str, Any] = {}
    side = SimpleNamespace(reset=lambda generation, *, cleared: cleared)
    half: Any = SimpleNamespace(describe=said.update, wait_described=lambda timeout_s: True)
    pool = SimpleNamespace(num_gpu_blocks=8, get_num_free_blocks=lambda: free)
    before, watch = time.time(), PrefixCacheWatch()
    watch.bind(pool)
    assert Generations(cast(Any, side), half, watch, forgets=False).reset() == (free == 7)
    if free == 6:
        assert said == {"adapters": []}
        watch.announce_awaited(half)
    assert before - 1e-6 <= said["generation_us"] / 1e6 <= time.time()
    assert len(said["generation"]) == 16
    assert not watch.awaited


def test_a_generation_is_announced_again_if_the_clock_is_set_back_before_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clear has an earlier time than the reset then, and would begin no generation."""
    said: list[int] = []
    half: Any = SimpleNamespace(
        describe=lambda **words: said.append(words["generation_us"]),
        wait_described=lambda timeout_s: True,
    )
    pool = SimpleNamespace(cached_block_hash_to_block={}, kv_event_queue=["cleared"])
    watch = PrefixCacheWatch()
    watch.bind(pool)
    watch.awaited = "00000000000000f1"
    now_s = [5_000.0, 5_001.0, 1_400.0, 1_401.0, 1_000.0, 900.0]
    monkeypatch.setattr(time, "time_ns", lambda: int(now_s[0] * 1e9))
    watch.follow(half, emptied=True)
    for _ in range(3):
        now_s.pop(0)
        watch.follow(half, emptied=False)
    assert said == [5_000_000_000, 1_400_000_000]
    pool.kv_event_queue = []  # The clear is published, and has begun the generation.
    for _ in range(2):
        now_s.pop(0)
        watch.follow(half, emptied=False)
    assert len(said) == 2


def test_a_reset_is_seen_once() -> None:
    pool, watch = SimpleNamespace(cached_block_hash_to_block={}), PrefixCacheWatch()
    assert not watch.emptied()
    watch.bind(pool)
    assert not watch.emptied()
    pool.cached_block_hash_to_block = {}
    assert watch.emptied()
    assert not watch.emptied()


def test_a_pool_without_a_map_is_never_seen_to_be_emptied() -> None:
    watch = PrefixCacheWatch()
    watch.bind(object())
    assert not watch.emptied()


class Side:
    """SchedulerSide, as generations know it."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def reset(self, _generation: str, *, cleared: bool) -> bool:
        self.heard.append(cleared)
        return cleared

    def device_cleared(self) -> None:
        self.heard.append("emptied")


@pytest.mark.parametrize("forgets", [False, True])
def test_new_weights_begin_a_generation_once(forgets: bool) -> None:
    """However many calls have written them, and whatever vLLM is asked to reset after."""
    half: Any = SimpleNamespace(describe=lambda **words: None, wait_described=lambda _: True)
    pool = SimpleNamespace(
        num_gpu_blocks=8, get_num_free_blocks=lambda: 7, cached_block_hash_to_block={"old": 1}
    )
    side, watch = Side(), PrefixCacheWatch()
    watch.bind(pool)
    generations = Generations(
        cast(Any, side), half, watch, forgets=forgets, harmless=frozenset({"tick"})
    )
    assert not generations.weights_written("tick")
    generations.look()
    for _ in range(3):
        generations.weights_written("load_model")
    assert side.heard == []
    for _ in range(2):
        generations.look()
    assert side.heard == [False], "the device has blocks of the old weights"
    pool.cached_block_hash_to_block = {}
    for _ in range(2):
        generations.look()
    assert side.heard[1:] == [True if forgets else "emptied"]
    generations.weights_written("load_model")
    generations.look()
    assert side.heard[2:] == [True], "written while the device was empty"
    generations.weights_written("load_model")
    assert generations.reset()
    generations.look()
    assert side.heard[3:] == [True], "vLLM's own reset after it is enough"


def test_a_device_that_keeps_old_blocks_is_told_of_once_a_run_of_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights may come a tensor at a time. A reset that vLLM has refused is told of each time."""
    half: Any = SimpleNamespace(describe=lambda **words: None, wait_described=lambda _: True)
    pool = SimpleNamespace(
        num_gpu_blocks=8, get_num_free_blocks=lambda: 6, cached_block_hash_to_block={"old": 1}
    )
    watch = PrefixCacheWatch()
    watch.bind(pool)
    generations = Generations(cast(Any, Side()), half, watch, forgets=False)
    for _ in range(3):
        generations.weights_written("load_model")
        generations.look()
    assert caplog.text.count("has not cleared") == 1
    assert not generations.reset()
    assert caplog.text.count("has not cleared") == 2
