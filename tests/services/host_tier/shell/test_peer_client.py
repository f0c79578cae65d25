"""What the core hears of other host tiers, and of pulls that cannot begin."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.records import Changed, Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.runtime.metrics import Metrics
from kvbm_host_tier.core.peer_messages import PeerJoined, PeerLeft, PeerPullFailed, PullFromPeer
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
