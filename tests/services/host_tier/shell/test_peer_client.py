"""What the core hears of other host tiers and of the index, and of pulls that cannot begin."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.records import Changed, Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.index_verbs import HolderMatch, MatchReply
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    HoldersTold,
    PeerId,
    PeerJoined,
    PeerLeft,
    PeerPullFailed,
    PullFromPeer,
)
from kvbm_host_tier.core.peers import QUESTION_MS
from kvbm_host_tier.shell.peer_client import PeerClient
from kvbm_host_tier.shell.peer_reader import PeerReader

from tests.services.host_tier.helpers import name
from tests.services.host_tier.peer_helpers import ANN

RECORD = ServiceRecord(
    kind="host-tier", host=ANN.host, instance=ANN.instance, epoch=3, pid=1, started_ms=1, ttl_s=5.0
)
CUT = msgspec.structs.replace(RECORD, info={"cut": True})
RESTARTED = msgspec.structs.replace(RECORD, epoch=4)


class ConnectedBus:
    """NATS is there, and must not be asked."""

    connected = True


def client() -> PeerClient:
    """The client of host `h`, whose peer reader has not started."""
    bus = cast("Bus", cast("Any", ConnectedBus()))
    return PeerClient(bus, PeerReader("door"), host="h", source="host-tier-0", counters=Metrics())


@pytest.mark.parametrize(
    ("event", "heard"),
    [
        (Joined(RECORD), PeerJoined(ANN)),
        (Changed(RECORD, RESTARTED), PeerJoined(ANN)),
        (Changed(RECORD, CUT), None),
        (Left(RECORD, "deleted"), PeerLeft(ANN)),
    ],
)
def test_only_a_new_life_of_a_peer_begins_afresh(
    event: RegistryEvent, heard: PeerJoined | PeerLeft | None
) -> None:
    """`PeerJoined` closes the breaker of a bypassed peer. An entry changes in other cases, too."""
    assert client().changed(ANN, event) == heard


async def test_a_pull_whose_own_reader_is_closed_asks_no_peer() -> None:
    """The reason tells it from a peer's: no peer is bypassed for it."""
    pull = PullFromPeer(1, ANN, (name(1),), (0,), 4096, 1000)
    failed = PeerPullFailed(1, "reader_closed", settled=True)
    assert await client().pull(pull) == failed


def index(host: str) -> ServiceRecord:
    """The entry of a replica of the index."""
    return ServiceRecord(
        kind="index", host=host, instance="0", epoch=1, pid=1, started_ms=1, ttl_s=1.0
    )


async def test_a_replica_of_the_index_that_hangs_does_not_take_lookups_along(bus: Bus) -> None:
    """NATS gives it half of the questions. The other one is asked by name, in time."""
    stopped = asyncio.Event()

    async def hangs(_payload: bytes) -> bytes:
        await stopped.wait()
        return b""

    async def answers(_payload: bytes) -> bytes:
        match = HolderMatch(host="b", source="host-tier-0", tier="host", rank=0, blocks=1)
        return msgspec.json.encode(MatchReply(asked=1, matches=[match]))

    await bus.add_verbs("index", "0", "a", {"match": hangs}, shared=True)
    await bus.add_verbs("index", "0", "b", {"match": answers})
    reader: Any = SimpleNamespace()
    client = PeerClient(bus, reader, host="h", source="host-tier-0", counters=Metrics())
    for host in ("a", "b", "c"):
        client.index_changed(Joined(index(host)))
    client.index_changed(Left(index("c"), "expired"))
    told = await client.holders(AskHolders(1, (name(1),), QUESTION_MS))
    stopped.set()
    assert told == HoldersTold(1, ((PeerId("b", "0"), 1),))
