"""The verb `holders` of the index: who holds how much. The request is `verbs.DumpRequest`."""

from __future__ import annotations

import msgspec

from kvbm_common.wire.events import Natural, Tier, Token
from kvbm_common.wire.verbs import _Message


class HolderSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One holder, how many blocks it has, and the position up to which that is true."""

    host: Token
    source: Token
    tier: Tier
    rank: Natural = 0
    group: Natural = 0
    epoch: Natural
    seq: Natural
    blocks: Natural


class HoldersReply(_Message, frozen=True, kw_only=True):
    """One entry per holder, in the order of host, source, tier, rank and group."""

    holders: list[HolderSummary]
