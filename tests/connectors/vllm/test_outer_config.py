"""The outer configuration of KV transfer, with vLLM's rule for `--kv-offloading-size`; the real one
is run by `tests/vllm/test_outer_config.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.outer_config import keep_kvbm

BESIDE = [{"kv_connector": "NixlConnector"}, {"kv_connector": "KvbmConnector"}]


def completed(
    connector: str | None, *, size: float | None = None, module_path: str | None = None,
    **extra: Any,
) -> Any:  # fmt: skip
    """What is configured in the end."""

    class Config:
        def __init__(self) -> None:
            self.kv_transfer_config = SimpleNamespace(
                kv_connector=connector, kv_connector_extra_config=extra,
                kv_load_failure_policy="fail", kv_connector_module_path=module_path,
            )  # fmt: skip

        def _post_init_kv_transfer_config(self) -> None:
            if size is not None:
                self.kv_transfer_config.kv_connector = "OffloadingConnector"

        def complete(self) -> Any:
            self._post_init_kv_transfer_config()
            return self.kv_transfer_config

    keep_kvbm(Config)
    keep_kvbm(Config)
    return Config().complete()


@pytest.mark.parametrize("connector", ["KvbmConnector", "DynamoConnector", "PdConnector"])
def test_kvbm_is_not_replaced(connector: str) -> None:
    assert completed(connector).kv_connector == connector
    with pytest.raises(ValueError, match=f"OffloadingConnector in the place of {connector}"):
        completed(connector, size=1.0)


def test_kvbm_beside_another_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="so that KvbmConnector would not run"):
        completed("MultiConnector", size=1.0, connectors=BESIDE)


def test_failed_loads_are_recomputed_where_kvbm_is_a_child() -> None:
    """Goal: vLLM asks the outer configuration, and its default ends a request."""
    assert completed("MultiConnector", connectors=BESIDE).kv_load_failure_policy == "recompute"


def test_others_are_left_alone() -> None:
    assert completed("NixlConnector", size=1.0).kv_connector == "OffloadingConnector"
    assert completed(None, size=1.0).kv_connector == "OffloadingConnector"
    others = completed("MultiConnector", connectors=BESIDE[:1])
    assert others.kv_load_failure_policy == "fail"


@pytest.mark.parametrize("children", [["a", "b"], {"prefill": 1}, 3, "ab", [None], [["a"]], None])
@pytest.mark.parametrize("connector", ["OtherConnector", "MultiConnector"])
def test_children_of_any_form_end_no_start(connector: str, children: Any) -> None:
    """Goal: the plug-in is in every engine of its environment. What is wrong, vLLM says."""
    assert completed(connector, connectors=children).kv_load_failure_policy == "fail"


def test_kvbm_in_the_second_depth_is_seen() -> None:
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": BESIDE}}
    children = ["no connector", {}, inner]
    policy = completed("MultiConnector", connectors=children).kv_load_failure_policy
    assert policy == "recompute"


def test_what_another_connector_calls_its_connectors_is_not_read() -> None:
    assert completed("OtherConnector", connectors=BESIDE).kv_load_failure_policy == "fail"


@pytest.mark.parametrize("name", ["DynamoConnector", "PdConnector"])
def test_a_connector_of_another_package_with_our_name_is_left_alone(name: str) -> None:
    """Goal: NVIDIA's KVBM has two of our names, and decides for itself."""
    theirs = "kvbm.vllm_integration.connector"
    child = {"kv_connector": name, "kv_connector_module_path": theirs}
    assert completed("MultiConnector", connectors=[child]).kv_load_failure_policy == "fail"
    replaced = completed(name, size=1.0, module_path=theirs)
    assert replaced.kv_connector == "OffloadingConnector"
    ours = child | {"kv_connector_module_path": "kvbm_connectors.vllm"}
    assert completed("MultiConnector", connectors=[ours]).kv_load_failure_policy == "recompute"
    with pytest.raises(ValueError, match=f"so that {name} would not run"):
        completed(name, size=1.0, module_path="kvbm_connectors.vllm")


def test_a_vllm_without_the_rule_is_left_alone() -> None:
    class Config:
        """A version without the option."""

    keep_kvbm(Config)
    assert not [name for name in vars(Config) if name.startswith("_post_init")]
