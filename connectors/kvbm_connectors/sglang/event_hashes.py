"""Hashes of SGLang's events, compared with those that the consolidator computes.

A later release may hash otherwise: every prompt would then seem to have an extra key, and no router
would find its blocks.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from kvbm_common.wire.engine_events import BlockStored

from kvbm_connectors.consolidator.core.sglang_keys import unsaid_key

TOKENS = (1, 2, 3, 4)
"""One small page."""


def not_ours(arguments: Any) -> str:
    """Return why the hashes of SGLang's events do not show extra keys; empty: they do."""
    if getattr(arguments, "elastic_ep_backend", None):
        return "elastic_ep_backend gives one to every request"
    try:
        plain, salted, keyed = (_event(*of) for of in ((None, None), (None, "s"), ("k", None)))
    except Exception as error:  # Another SGLang keeps them elsewhere: of any type.
        return f"the hashes of its events are not known: {error!r}"
    is_known = not unsaid_key(plain) and not unsaid_key(salted) and unsaid_key(keyed)
    return "" if is_known else "the hashes of its events are others than those of 0.5.23"


def _event(extra_key: str | None, salt: str | None) -> BlockStored:
    """Return what SGLang says of a page in the format `dynamo`, by its own functions."""
    from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed, namespaced_block_hash
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64

    key = RadixKey(array("q", TOKENS), extra_key=extra_key, cache_salt=salt)
    node = SimpleNamespace(key=key, parent=None, hash_value=None, event_hash_value=None)
    (found,) = compute_node_event_hash_values(node, len(TOKENS))
    seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=salt)
    said = namespaced_block_hash(hash_str_to_int64(found), namespace_seed=seed)
    return BlockStored(
        block_hashes=(said % 2**64,), token_ids=TOKENS, block_size=len(TOKENS), cache_salt=salt
    )
