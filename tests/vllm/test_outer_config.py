"""The outer configuration of KV transfer in a real vLLM: an engine does not start without KVBM, and
failed loads are recomputed where KVBM is a child."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.vllm.harness import ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(skip_tokenizer_init=True, **json.loads(sys.argv[1])).create_engine_config()
print("policy", config.kv_transfer_config.kv_load_failure_policy)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print("known as", KVConnectorFactory.get_connector_class_by_name("KvbmConnector").__name__)
"""
OURS = {"kv_connector": "KvbmConnector", "kv_role": "kv_both"}
BY_MODULE = OURS | {"kv_connector_module_path": "kvbm_connectors.vllm"}
MULTI = {
    "kv_connector": "MultiConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [BY_MODULE]},
}  # fmt: skip


def configured(plugins: str = "", **arguments: Any) -> subprocess.CompletedProcess[str]:
    """A process that configures an engine, and ends. `plugins` are all that vLLM may load."""
    return subprocess.run(
        [VLLM_PYTHON, "-c", CONFIGURE, json.dumps(arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | ({"VLLM_PLUGINS": plugins} if plugins else {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "transfer",
    [OURS, BY_MODULE, MULTI],
    ids=["by name", "by module", "a child"],
)
def test_an_engine_that_would_run_without_kvbm_says_so(
    model: str, transfer: dict[str, Any]
) -> None:
    """Goal: vLLM does not put its own connector in KVBM's place in silence."""
    ended = configured(model=model, kv_offloading_size=1.0, kv_transfer_config=transfer)
    assert "so that KvbmConnector would not run: leave it out" in ended.stderr, ended
    assert ended.returncode == 1


def test_a_failed_load_ends_no_request_of_several_connectors(model: str) -> None:
    """Goal: vLLM's scheduler reads the policy where KVBM as a child cannot set it."""
    assert "policy recompute" in configured(model=model, kv_transfer_config=MULTI).stdout


def test_a_child_is_known_where_plugins_are_chosen(model: str) -> None:
    """Goal: statistics of a child do not end the engine: vLLM looks for its class by name."""
    ended = configured("another", model=model, kv_transfer_config=MULTI)
    assert "known as KvbmConnector" in ended.stdout, ended
