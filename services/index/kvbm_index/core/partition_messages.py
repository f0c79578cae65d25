"""Messages between replicas of different partitions, besides the public verbs."""

from __future__ import annotations

import msgspec
from kvbm_common.wire.events import Natural
from kvbm_common.wire.routes import RouteRequest

PeerRange = tuple[Natural, Natural]
"""The blocks of a question that a host tier has: the first, and the one after the last."""


class PartitionRouteRequest(RouteRequest, frozen=True, kw_only=True):
    """A `route` as one partition of the index is asked for its engines."""

    peers: list[PeerRange] | None = None
    """The blocks that the host tiers of all partitions have; None: only those of this partition
    count."""
    tie: str = ""
    """A number by which all partitions order equals, in hex."""


class PeersReply(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that a partition's host tiers have of a question; none lies within another."""

    parts: list[PeerRange]
