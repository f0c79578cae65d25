"""KVBM for SGLang: a HiCache storage back end, `class_name` KvbmHiCacheStorage in this module.

Light on purpose: SGLang, and with it torch, is imported when the class is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm_common.extras import engine_needed

if TYPE_CHECKING:
    from kvbm_connectors.sglang.backend import KvbmHiCacheStorage

__all__ = ["KvbmHiCacheStorage"]


def __getattr__(name: str) -> Any:
    if name == "KvbmHiCacheStorage":
        with engine_needed("sglang"):
            from kvbm_connectors.sglang.backend import KvbmHiCacheStorage

        return KvbmHiCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
