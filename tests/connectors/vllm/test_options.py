"""The policy for failed loads, on a configuration that is a single field."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvbm_connectors.vllm.options import recompute_failed_loads


@dataclass
class Transfer:
    """vllm.config.KVTransferConfig; vLLM's default fails the request."""

    kv_load_failure_policy: str = "fail"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_loads_are_recomputed_whatever_was_configured(policy: str) -> None:
    transfer = Transfer(policy)
    recompute_failed_loads(transfer)
    assert transfer.kv_load_failure_policy == "recompute"
