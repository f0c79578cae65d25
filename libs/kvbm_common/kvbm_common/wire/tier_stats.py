"""Tier statistics: what a `StatsReply` says of each size of slots, and of each engine worker."""

from __future__ import annotations

import msgspec

from kvbm_common.identity import Namespace
from kvbm_common.wire.events import Natural, Token


class SizeStats(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one size in a tier."""

    slot_bytes: Natural
    slabs: Natural
    slots: Natural
    """The slots that may be used."""
    used: Natural
    """The slots that hold a block."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks and bytes of one tenant in a tier."""

    name: str
    """The value of KVBM_TENANT; its tag in hex if it is not known; empty: engines without one."""
    blocks: Natural
    bytes: Natural
    share_bytes: Natural
    """Bytes that the tenant keeps when others want all; 0: it has used nothing for an hour."""
    waiting: Natural = 0
    """Blocks that wait to be written."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One attached engine worker, for `GET /v1/workers`."""

    engine: Token
    incarnation: str
    rank: Natural
    world_size: Natural
    namespace: Namespace
    block_bytes: Natural
    seen_ms_ago: Natural
    verify: str = ""
    """The loads that it compares with their checksums, as its Hello says; empty: not known."""
    prefill_tokens_per_s: float = 0.0
    """Tokens per second of short prompts, as its connector has measured; 0: not known."""
    passes_through: str = ""
    """The reason why its engine computes without a cache; empty: it has one."""
