"""Which engines forget with a reset of vLLM's prefix cache alone, and how such a reset is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.errors import ConfigError
from kvbm_connectors.vllm.options import Options
from kvbm_connectors.vllm.resets import PrefixCacheWatch, weights_are_pushed


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
