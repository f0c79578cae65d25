"""Routing, the verb `route`: facts from the registry and a question in, an order of engines out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbm_common.copying.naming import NAMING
from kvbm_common.registry.records import ENGINE, Left, RegistryEvent, ServiceRecord
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.routes import RouteReply, RouteRequest
from kvbm_common.wire.scores import DEFAULT_WEIGHTS

from kvbm_index.core.candidates import EngineFacts, candidates
from kvbm_index.core.core import IndexCore
from kvbm_index.core.messages import SourceKey
from kvbm_index.core.partition_messages import PartitionRouteRequest, PeerRange, PeersReply
from kvbm_index.core.requests import decoded, encoded, hashes_of
from kvbm_index.core.routes import Prices

TURN_BYTES = 8
RANKS_MAX = 1_024
RANK_DIGITS_MAX = 18
"""The digits of a rank in a registry entry, at most: on the wire a rank is below 2**63."""

_route_request: JsonCodec[RouteRequest] = JsonCodec(RouteRequest)
_partition_request: JsonCodec[PartitionRouteRequest] = JsonCodec(PartitionRouteRequest)


class Routing:
    """The engines in the registry, and the choice of the one that should take a prompt."""

    def __init__(self, core: IndexCore) -> None:
        self._core = core
        self._facts: dict[SourceKey, EngineFacts] = {}
        self._turns = itertools.count()

    def take(self, event: RegistryEvent) -> None:
        """Take note of an engine that joins, changes or leaves."""
        record = event.record
        if record.kind != ENGINE:
            return
        key = SourceKey(record.host, record.instance)
        if isinstance(event, Left):
            self._facts.pop(key, None)
        else:
            self._facts[key] = _facts_of(record)

    async def answer(self, payload: bytes) -> bytes:
        """Answer the verb; raises BadRequest."""
        return self._answer(decoded(_route_request, payload))

    async def answer_partition(self, payload: bytes) -> bytes:
        """Answer the verb for the engines of this partition; raises BadRequest."""
        request = decoded(_partition_request, payload)
        return self._answer(request, request.peers, request.tie)

    async def answer_peers(self, payload: bytes) -> bytes:
        """Answer which ranges of a question the host tiers of this partition have."""
        hashes = hashes_of(decoded(_route_request, payload), NAMING.hasher)
        return encoded(PeersReply(parts=self._core.peers(hashes)))

    def next_tie(self) -> bytes:
        """Return another order of equals: a question without a block has none of its own."""
        return next(self._turns).to_bytes(TURN_BYTES)

    def _answer(
        self, request: RouteRequest, peers: Sequence[PeerRange] | None = None, tie: str = ""
    ) -> bytes:
        hashes = hashes_of(request, NAMING.hasher)
        found, left_out = candidates(request, self._core.engines(), self._facts)
        prices = Prices(
            weights=DEFAULT_WEIGHTS | request.weights,
            peer_weight=request.peer_weight,
            running_blocks=request.running_blocks,
        )
        if tie:
            order = bytes.fromhex(tie)
        else:
            order = hashes[-1] if hashes else self.next_tie()
        engines = self._core.routes(hashes, found, prices, order, peers)
        return encoded(RouteReply(asked=len(hashes), engines=engines, left_out=left_out))


def _facts_of(record: ServiceRecord) -> EngineFacts:
    listed = _listed(record, "ranks")[:RANKS_MAX]
    ranks = {int(rank) for rank in listed if rank.isdecimal() and len(rank) <= RANK_DIGITS_MAX}
    return EngineFacts(sorted(ranks), _listed(record, "namespaces"))


def _listed(record: ServiceRecord, name: str) -> list[str]:
    return [part for part in str(record.info.get(name) or "").split(",") if part]
