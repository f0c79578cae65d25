"""Watch over calls of vLLM's workers, on a core with one method; `tests/vllm/test_resets.py` has
the real one."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.weight_writes import is_harmless, name_of, watch_writes


class Connector:
    """Ours: it hears of written weights."""

    def __init__(self) -> None:
        self.heard = 0

    def weights_written(self, name: str) -> bool:
        self.heard += 1
        return name != "tick"


class Core:
    """vllm.v1.engine.core.EngineCore; before it has a scheduler, too."""

    def __init__(self, connector: Any) -> None:
        if connector is not None:
            self.scheduler = SimpleNamespace(connector=connector)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[str, ...] = (), *_: Any
    ) -> str:
        if args == ("broken",):
            raise OSError(args)
        return f"{method} {timeout}"


def receive(worker: object) -> None:
    raise AssertionError(worker)


def get_rank(worker: object) -> None:
    raise AssertionError(worker)


@pytest.mark.parametrize(
    "method",
    ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update",
     "start_draft_weight_update", "load_model", "update_weights_from_ipc", "update_named_param",
     "reset_weights", "load_state_dict", "load_states", "recv_and_load", "broadcast_bucket",
     "sync_model", "refit", "merge_lora_into_base", "set_steering_data", "init_weights", "sleep",
     "wake_up", "add_lora", receive, functools.partial(receive, None),
     "check_and_update_weights", "_save_and_reload_weights", "get_weights_from_trainer",
     "validate_then_load_weights", lambda worker: worker.rank],
)  # fmt: skip
def test_a_method_that_is_not_known_as_harmless_writes_weights(method: Any) -> None:
    assert not is_harmless(name_of(method))


@pytest.mark.parametrize(
    "method",
    ["init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums",
     "list_loras", "init_weight_update_group", "init_process_group", "init_communicator",
     "init_weight_update_communicator", "init_collective", "report_device_id", "profile",
     "release_late_interaction_query_cache", "get_model_inspection", "check_weights_changed",
     "save_self_weights_to_disk", "synchronize_device", "liveness_probe", "ping", get_rank,
     functools.partial(get_rank, None)],
)  # fmt: skip
def test_methods_that_write_no_weights_are_known_by_their_names(method: Any) -> None:
    assert is_harmless(name_of(method))


def test_of_a_model_it_is_the_function_that_counts() -> None:
    assert name_of("apply_model", None, (get_rank,)) == "get_rank"
    assert name_of("apply_model", kwargs={"fn": receive}) == "receive"
    assert name_of("apply_model", args=[receive], non_block=True) == "receive", "later versions"
    assert not is_harmless(name_of("apply_model"))


def test_our_connector_hears_of_each_write_once(caplog: pytest.LogCaptureFixture) -> None:
    """One that fails counts: it may have written some. A name that nobody knows is logged once."""

    class Watched(Core):
        collective_rpc = Core.collective_rpc

    def _write_weights(worker: object) -> None:
        raise AssertionError(worker)

    for _ in range(2):
        watch_writes(Watched)
    ours = Connector()
    assert Watched(ours).collective_rpc("update_weights", 3.0) == "update_weights 3.0"
    assert ours.heard == 1
    several = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
    Watched(several).collective_rpc(_write_weights)
    with pytest.raises(OSError, match="broken"):
        Watched(ours).collective_rpc("reload_weights", args=("broken",))
    assert ours.heard == 3
    for connector in (None, SimpleNamespace()):
        Watched(connector).collective_rpc("update_weights")
    Watched(ours).collective_rpc("list_loras")
    assert ours.heard == 3
    for _ in range(2):
        Watched(ours).collective_rpc("broadcast_buckets")
    assert ours.heard == 5
    Watched(ours).collective_rpc("tick", None, (), None, "a fifth of later versions")
    assert ours.heard == 6
    assert caplog.text.count("may write weights") == caplog.text.count("'broadcast_buckets'") == 1


def test_a_core_without_such_calls_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch_writes(SimpleNamespace)
    assert "no 'collective_rpc'" in caplog.text
