"""Options of an engine, and the policy for failed loads on a configuration of one field."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvbm_common.errors import ConfigError
from kvbm_connectors.vllm.options import Options, recompute_failed_loads


@dataclass
class Transfer:
    """vllm.config.KVTransferConfig; vLLM's default fails the request."""

    kv_load_failure_policy: str = "fail"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_loads_are_recomputed_whatever_was_configured(policy: str) -> None:
    transfer = Transfer(policy)
    recompute_failed_loads(transfer)
    assert transfer.kv_load_failure_policy == "recompute"


def test_an_operator_may_vouch_for_files_of_adapters() -> None:
    assert not Options.read({}, {}).lora_final
    assert not Options.read({"lora_files": "watched"}, {}).lora_final
    assert Options.read({"lora_files": "final"}, {}).lora_final
    for value in ("Final", "", True, ["final"]):
        with pytest.raises(ConfigError, match=r"lora_files .* accepts watched or final"):
            Options.read({"lora_files": value}, {})


def test_loads_are_asynchronous_whatever_was_configured(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: no block of a failed load in vLLM's prefix cache, where others hit it; and a
    configuration of before goes on."""
    for load, warnings in (("async", 0), ("sync", 1)):
        caplog.clear()
        assert Options.read({"load": load}, {}).revision == ""
        assert len(caplog.records) == warnings
    assert caplog.messages == ["kv_connector_extra_config.load is ignored: loads are asynchronous"]
