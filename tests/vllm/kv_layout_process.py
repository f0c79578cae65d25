"""Layouts of KV memory that vLLM itself chooses for engines that are configured and not started.

`python -m tests.vllm.kv_layout_process MODEL` writes a JSON object: case → a layout, or the error.
The back ends' lists are given: a GPU's say nothing of the layout, or one of these.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

KVBM = {"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm_connectors.vllm"}
NIXL = {"kv_connector": "NixlConnector"}
HIDDEN = {"kv_connector": "ExampleHiddenStatesConnector"}
BOTH = {"kv_role": "kv_both"}


def several(name: str, *children: dict[str, Any], **more: str) -> dict[str, Any]:
    """The configuration of connectors side by side."""
    found = [child | BOTH for child in children]
    return {"kv_connector": name, "kv_connector_extra_config": {"connectors": found}} | more


ANY: list[str] = []
"""Back ends that read all layouts, and prefer heads inside of tokens: FlashAttention."""
CASES: dict[str, tuple[dict[str, Any] | None, list[str], str]] = {
    "alone": (None, ANY, ""),
    "kvbm": (KVBM, ANY, ""),
    "kvbm, NHD": (KVBM, ANY, "NHD"),
    "kvbm, HND": (KVBM, ANY, "HND"),
    "kvbm, inside only": (KVBM, ["LBNHC"], ""),
    "kvbm, blocks outermost": (KVBM, ["BLHNC"], ""),
    "beside nixl": (several("MultiConnector", KVBM, NIXL), ANY, ""),
    "PdConnector": (
        several("PdConnector", KVBM, NIXL, kv_connector_module_path="kvbm_connectors.vllm"),
        ANY, "",
    ),
    "beside another layout": (several("MultiConnector", KVBM, HIDDEN), ANY, ""),
    "beside another layout, NHD": (several("MultiConnector", KVBM, HIDDEN), ANY, "NHD"),
}  # fmt: skip


def layout(
    config: Any, connector: dict[str, Any] | None, supported: list[str], variable: str
) -> str:
    """Return what vLLM resolves, or its error."""
    from vllm.config import KVTransferConfig
    from vllm.v1.attention.backends import utils

    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if variable:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = variable
    config.cache_config.kv_cache_layout = None
    config.kv_transfer_config = KVTransferConfig(**connector | BOTH) if connector else None
    names = supported or [one.name for one in utils.get_supported_kv_cache_layouts([])]
    try:
        return str(utils.resolve_kv_cache_layout(config, [names]).name)
    except ValueError as error:
        return str(error)


def config_of(model: str) -> Any:
    """Return vLLM's configuration of an engine."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()


def main() -> None:
    """Write the answer to a copy of stdout: vLLM writes to stdout too."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = config_of(sys.argv[1])
    json.dump({name: layout(config, *case) for name, case in CASES.items()}, ours)
    ours.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
