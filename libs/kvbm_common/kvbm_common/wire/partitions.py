"""Partitions of an index on the wire: where their verbs are served, a field in answers."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvbm_common.wire import VERSION
from kvbm_common.wire.events import Natural

INDEX_GROUP = "index-partition"
"""The services that answer the index's verbs for partition p of n:
`kvbm.v1.index-partition.n.p.VERB`."""


class _OfPartitions(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the whole index, which in a large fleet is made of those of its partitions."""

    v: Literal[1] = VERSION  # type: ignore[assignment]
    missing: list[Natural] | UnsetType = UNSET
    """Partitions that have not answered: what their hosts have is not in it. Left out: none."""
