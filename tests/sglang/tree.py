"""SGLang's own tree, the core that it uses by default: it says what a scheduler's cache would."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.sglang.conversation import Prompt

POET = "a" * 32
"""The id of an adapter that is loaded, as SGLang adds it to a request's extra key."""


def make_tree(*, page_size: int, is_dynamo: bool) -> Any:
    """Return a tree without pools: nothing of it has bytes."""
    names = KvEventLoraNames()
    names.register(lora_id=POET, lora_name="poet")
    return RustUnifiedTreeCore(
        CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None,
            page_size=page_size, enable_kv_cache_events=True, dynamo_kv_event_format=is_dynamo,
            kv_event_lora_names=names, tree_components=(ComponentType.FULL,),
        )
    )  # fmt: skip


def cache(tree: Any, prompt: Prompt) -> None:
    """Have a prompt cached, as after its prefill."""
    key = RadixKey(
        array("q", prompt.tokens),
        extra_key=f"{prompt.extra_key}{POET if prompt.is_poet else ''}" or None,
        cache_salt=prompt.salt or None,
    )
    step = tree.begin_insert(InsertParams(key=key, value=torch.arange(len(prompt.tokens))))
    while step.result is None:
        step = tree.resume_insert()
    tree.end_insert()
