"""The connector's classes beside the interface of release 1.2 and of the candidates of 1.3."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvbm_connectors.trtllm import protocols

from tests.connectors.trtllm.interface import (
    ABSTRACT,
    LEFT_TO_THE_BASE,
    OPTIONAL,
    REQUEST_DATA,
    SCHEDULER,
    WORKER,
)
from tests.connectors.trtllm.package import installed

CLASSES = {SCHEDULER: "KvbmConnectorLeader", WORKER: "KvbmConnectorWorker"}
DOCUMENT = (Path(__file__).parents[3] / "docs" / "trtllm.md").read_text()
OF_THE_BASE = {"bind_connector_meta", "get_connector_meta", "register_forward_pass_callable"}


@pytest.fixture
def module() -> Iterator[Any]:
    with installed():
        yield importlib.import_module("kvbm_connectors.trtllm")


@pytest.mark.parametrize("base", CLASSES)
def test_every_method_takes_what_the_engine_passes(module: Any, base: str) -> None:
    """Goal: the engine passes arguments by place, and its own code names them."""
    ours = vars(getattr(module, CLASSES[base]))
    wanted = ABSTRACT[base] | {
        name: parameters
        for name, parameters in OPTIONAL[base].items()
        if name not in LEFT_TO_THE_BASE
    }
    for name, parameters in wanted.items():
        assert name in ours, name
        assert tuple(inspect.signature(ours[name]).parameters)[1:] == parameters, name
    assert not LEFT_TO_THE_BASE & ours.keys()


@pytest.mark.parametrize("base", CLASSES)
def test_nothing_else_is_public(module: Any, base: str) -> None:
    """Goal: no method that a later release could mean in another way."""
    public = {name for name in vars(getattr(module, CLASSES[base])) if not name.startswith("_")}
    of_ours = {"counts", "shutdown"}
    assert public - of_ours <= (ABSTRACT[base] | OPTIONAL[base]).keys()


def test_attention_data_parallelism_is_not_promised(module: Any) -> None:
    """Goal: the engine of 1.3 refuses such a deployment before it builds the connector."""
    for name in CLASSES.values():
        assert not getattr(getattr(module, name), "supports_attention_dp", False)


def test_what_is_read_of_a_request_is_in_every_release() -> None:
    """Goal: a field that only one of them has is not relied on."""
    read = {
        name for name, value in vars(protocols.RequestData).items() if isinstance(value, property)
    }
    assert read
    for release, fields in REQUEST_DATA.items():
        assert read <= set(fields), release


def test_the_document_lists_what_changed() -> None:
    """Goal: whoever comes with 1.3 finds each new method and field."""
    section = DOCUMENT.split("## From 1.2 to 1.3")[1].split("\n## ")[0]
    new = {name for methods in OPTIONAL.values() for name in methods}
    new |= set(REQUEST_DATA["1.3"]) - set(REQUEST_DATA["1.2"])
    new |= {"attention_dp_rank", "supports_attention_dp", "aggressive_prefix_budgeting"}
    assert {name for name in new if f"`{name}`" not in section} == set()
