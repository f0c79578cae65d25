"""Options of an engine, and the policy for failed loads on a configuration of one field."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from kvbm_common.errors import ConfigError
from kvbm_connectors.vllm.options import (
    Options,
    recompute_failed_loads,
    refusal_beside_nixl,
)


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


def test_an_operator_may_vouch_for_calls_of_workers() -> None:
    assert Options.read({}, {}).harmless_calls == frozenset()
    assert Options.read({"harmless_calls": ["tick", "tock"]}, {}).harmless_calls == {"tick", "tock"}
    for value in ("tick", [1], {"tick": True}):
        with pytest.raises(ConfigError, match=r"harmless_calls .* accepts a list of names"):
            Options.read({"harmless_calls": value}, {})


def test_loads_are_asynchronous_whatever_was_configured(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: no block of a failed load in vLLM's prefix cache, where others hit it; and a
    configuration of before goes on."""
    for load, warnings in (("async", 0), ("sync", 1)):
        caplog.clear()
        assert Options.read({"load": load}, {}).revision == ""
        assert len(caplog.records) == warnings
    assert caplog.messages == ["kv_connector_extra_config.load is ignored: loads are asynchronous"]


@pytest.mark.parametrize(
    ("child", "ranks", "reports", "refused"),
    [
        ("NixlConnector", 1, False, ""),
        ("NixlConnector", 2, False, "context parallelism"),
        ("NixlConnector", 1, True, "--enable-return-routed-experts"),
        ("OffloadingConnector", 2, True, ""),
    ],
)
def test_nixl_is_not_hidden_from_vllm_where_it_must_be_seen(
    child: str, ranks: int, reports: bool, refused: str
) -> None:
    """Goal: a decode worker reads blocks as the prefill worker has laid them out."""
    children = [{"kv_connector": "KvbmConnector"}, {"kv_connector": child}]
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"connectors": children}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
        aux_output_config=SimpleNamespace(enabled=reports),
    )
    said = refusal_beside_nixl(config)
    assert said.startswith(refused)
    assert bool(said) == bool(refused)
    assert not said or "kv_connector=MultiConnector" in said
