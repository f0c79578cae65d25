"""The connector's options: KVBM's settings, what vLLM's configuration overrides, and sets."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbm_common.errors import ConfigError

from kvbm_connectors.client.engine_options import (
    PLAIN_RESETS,
    EngineOptions,
    forgets,
    one_of,
    settings_of,
)

WHERE = "kv_connector_extra_config"
RECOMPUTE = "recompute"
LORA_FILES = ("watched", "final")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options(EngineOptions):
    """The options that are in force in one engine."""

    revision: str = ""
    """The name of the weights in the hashes of blocks, if their content cannot be read here."""
    lora_final: bool = False
    """The operator vouches that files of adapters do not change once vLLM may have loaded them."""
    plain_reset: str = PLAIN_RESETS[0]
    """One of PLAIN_RESETS: whether a reset of vLLM's prefix cache alone hides what was stored
    before."""

    harmless_calls: frozenset[str] = frozenset()
    """Names of calls of vLLM's workers that the operator vouches for: they write no weights."""

    def forgets(self, pushed: bool) -> bool:
        """Return whether it does, in an engine whose weights are `pushed` while it runs or not."""
        return forgets(self.plain_reset, pushed=pushed)

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """See `settings_of`. Raises ConfigError for a value that does not parse."""
        if extra.get("load", "async") != "async":
            # vLLM keeps the blocks of a failed synchronous load in its prefix cache until it has
            # computed them again, and loses the thread if the next step is planned already.
            log.warning("%s.load is ignored: loads are asynchronous", WHERE)
        lora_files = one_of(LORA_FILES, extra, "lora_files", where=WHERE)
        plain_reset = one_of(PLAIN_RESETS, extra, "plain_reset", where=WHERE)
        calls = extra.get("harmless_calls", ())
        if not isinstance(calls, (list, tuple)) or not all(isinstance(one, str) for one in calls):
            raise ConfigError(f"{WHERE}.harmless_calls", calls, "a list of names of methods")
        others = ("load", "revision", "lora_files", "plain_reset", "harmless_calls")
        settings = settings_of(extra, environ, where=WHERE, others=others)
        revision = str(extra.get("revision", ""))
        return cls(settings, revision, lora_files == "final", plain_reset, frozenset(calls))


def recompute_failed_loads(transfer: Any) -> None:
    """Set the policy of a `KVTransferConfig` to `recompute`, and log that it was another one.

    vLLM's default (`fail`) ends a request with an error when a block of it could not be loaded, and
    a cache must never cost a request. vLLM's scheduler reads the value after it has made its
    connector.
    """
    if transfer.kv_load_failure_policy != RECOMPUTE:
        log.info(
            "kv_load_failure_policy is %r; set to %r, so that a block that fails to load is "
            "recomputed", transfer.kv_load_failure_policy, RECOMPUTE,
        )  # fmt: skip
        transfer.kv_load_failure_policy = RECOMPUTE


def refusal_beside_nixl(config: Any) -> str:
    """Return why `PdConnector` may not stand for `MultiConnector` in an engine; `""` if it may.

    vLLM looks for `NixlConnector` among the children of a connector that is called
    `MultiConnector`, and of no other. With context parallelism it then lays blocks out so that the
    decode worker can read them, and it refuses what NIXL does not transfer.
    """
    children = config.kv_transfer_config.kv_connector_extra_config.get("connectors", ())
    parallel, reported = config.parallel_config, getattr(config, "aux_output_config", None)
    ranks = ("decode_context_parallel_size", "prefill_context_parallel_size")
    if not any(child.get("kv_connector") == "NixlConnector" for child in children):
        return ""
    if any(getattr(parallel, name, 1) != 1 for name in ranks):
        feature = "context parallelism"
    elif getattr(reported, "enabled", False):
        feature = "--enable-return-routed-experts"
    else:
        return ""
    return (
        f"{feature}: PdConnector hides NixlConnector from vLLM; use kv_connector=MultiConnector "
        f"with kv_load_failure_policy={RECOMPUTE}"
    )
