"""The outer configuration of KV transfer, where KVBM is in it: what no connector can see to itself.

vLLM reads `kv_load_failure_policy` from the outer configuration alone, and a child of its
`MultiConnector` has another one. vLLM's default ends a request whose load has failed.

vLLM's `--kv-offloading-size` (`VllmConfig._post_init_kv_transfer_config`) overwrites the name of
the configured connector, and says nothing. The engine then runs without KVBM, or ends at once: with
`kv_connector_module_path` vLLM looks for its own connector in our package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

COMPLETE = "_post_init_kv_transfer_config"
"""The method in which vLLM completes the configuration of KV transfer, and applies that size."""
OURS = frozenset({"KvbmConnector", "DynamoConnector", "PdConnector"})
PACKAGE = "kvbm_connectors"
"""The first word of our module paths: NVIDIA's connectors have two of our names, and another."""
MULTI = "MultiConnector"
"""vLLM's own connector that has children; what others call so is not for us to read."""
FIELDS = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
WATCHED = "kvbm_watches"
"""Attribute of the method that stands for vLLM's own."""


def keep_kvbm(config_class: Any) -> None:
    """Have vLLM's `VllmConfig` raise ValueError where the size takes KVBM's place, and recompute
    failed loads where KVBM is a child.

    Nothing changes without KVBM, or in a version of vLLM without the method.
    """
    complete = getattr(config_class, COMPLETE, None)
    if complete is None or hasattr(complete, WATCHED):
        return

    @functools.wraps(complete)
    def completed(config: Any) -> None:
        ours, before = _kvbm_in(config.kv_transfer_config), _name_in(config.kv_transfer_config)
        complete(config)
        after = _name_in(config.kv_transfer_config)
        if ours and after != before:
            raise ValueError(
                f"kv_offloading_size would put {after} in the place of {before}, so that {ours} "
                "would not run: leave it out; DYN_KVBM_CPU_CACHE_GB sizes KVBM's host memory"
            )
        if ours and before != ours:
            # Plug-ins run in every process: what is light stays so.
            from kvbm_connectors.vllm.options import recompute_failed_loads

            recompute_failed_loads(config.kv_transfer_config)

    setattr(completed, WATCHED, True)
    setattr(config_class, COMPLETE, completed)


def _name_in(transfer: Any) -> str:
    return str(getattr(transfer, "kv_connector", None) or "")


def _kvbm_in(transfer: Any) -> str:
    """Return the name of our connector, alone or a child of `MultiConnector`; `""` without KVBM."""
    return _ours_in({name: getattr(transfer, name, None) for name in FIELDS})


def _ours_in(described: Mapping[str, Any]) -> str:
    """Return the name of our connector in the description of one. Its form is the operator's."""
    name = str(described.get("kv_connector") or "")
    path = str(described.get("kv_connector_module_path") or PACKAGE)
    if name in OURS and path.split(".")[0] == PACKAGE:
        return name
    extra = described.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    if name != MULTI or not isinstance(children, (list, tuple)):
        return ""
    found = (_ours_in(child) for child in children if isinstance(child, Mapping))
    return next((ours for ours in found if ours), "")
