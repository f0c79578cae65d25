"""Say the namespaces of engines that are configured and never started.

`python -m tests.vllm.namespace_process` reads a JSON list of EngineArgs from stdin, and writes the
JSON list of what each is named by: a digest, or the error. `environ` among the arguments are
variables that are set for one engine.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def namespace(arguments: dict[str, Any]) -> str:
    """The digest of an engine's namespace."""
    from kvbm_common.errors import KvbmError
    from kvbm_connectors.vllm.namespace import namespace_of
    from vllm.engine.arg_utils import EngineArgs

    for name, value in arguments.pop("environ", {}).items():
        os.environ[name] = value
    config = EngineArgs(skip_tokenizer_init=True, **arguments).create_engine_config()
    spec = SimpleNamespace(block_size=32, head_size=config.model_config.get_head_size())
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1", "2"])
    cache = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")
    try:
        return namespace_of(config, cache).digest.hex()
    except KvbmError as error:
        return error.code


def each(arguments: list[dict[str, Any]]) -> list[str]:
    """The digests; no engine sees the variables of another one."""
    before, found = dict(os.environ), []
    for one in arguments:
        found.append(namespace(one))
        os.environ.clear()
        os.environ.update(before)
    return found


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(each(json.load(sys.stdin)), ours)
    ours.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
