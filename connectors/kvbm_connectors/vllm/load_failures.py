"""The policy for blocks that fail to load: vLLM recomputes them.

vLLM's default (`kv_load_failure_policy`: `fail`) ends the whole request with an error when one of
its blocks could not be loaded. A cache must never cost a request, so the connector sets
`recompute` itself. vLLM's scheduler reads the value after it has made its connector.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

RECOMPUTE = "recompute"


def recompute_failed_loads(transfer: Any) -> None:
    """Set the policy of a `KVTransferConfig` to `recompute`, and log that it was another one."""
    if transfer.kv_load_failure_policy != RECOMPUTE:
        log.info(
            "kv_load_failure_policy is %r; set to %r, so that a block that fails to load is "
            "recomputed", transfer.kv_load_failure_policy, RECOMPUTE,
        )  # fmt: skip
        transfer.kv_load_failure_policy = RECOMPUTE
