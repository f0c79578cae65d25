"""Watch over calls of vLLM's workers, on a core with one method; `tests/vllm/test_resets.py` has
the real one."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.weight_writes import watch_writes, writes


class Connector:
    """Ours: it hears of written weights."""

    def __init__(self) -> None:
        self.heard = 0

    def weights_written(self) -> None:
        self.heard += 1


class Core:
    """vllm.v1.engine.core.EngineCore; before it has a scheduler, too."""

    def __init__(self, connector: Any) -> None:
        if connector is not None:
            self.scheduler = SimpleNamespace(connector=connector)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[str, ...] = ()
    ) -> str:
        if args == ("broken",):
            raise OSError(args)
        return f"{method} {timeout}"


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("reload_weights", True), ("start_weight_update", True), ("update_weights", True),
        ("finish_weight_update", True), ("start_draft_weight_update", True), ("load_model", True),
        ("update_weights_from_ipc", True), ("update_named_param", True), ("reset_weights", True),
        ("init_weight_transfer_engine", False), ("shutdown_weight_transfer_engine", False),
        ("compute_weight_checksums", False), ("list_loras", False), ("sleep", False),
        (lambda worker: worker.rank, False),
    ],
)  # fmt: skip
def test_methods_that_write_weights_are_known_by_their_names(method: Any, written: bool) -> None:
    assert writes(method) == written


def test_our_connector_hears_of_each_write_once() -> None:
    """One that fails counts: it may have written some."""

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


def test_a_core_without_such_calls_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch_writes(SimpleNamespace)
    assert "no 'collective_rpc'" in caplog.text
