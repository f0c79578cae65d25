"""Lookups that only ask: what can be had is told, and nothing is leased, brought or counted."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm_common.identity import Namespace
from kvbm_host_tier.core.messages import AskFill
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer

from tests.services.host_tier.helpers import LOOKUP_MS, Host, of
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers

OTHER = Namespace(model="test", block_tokens=4, revision="other")


def counted(host: Host) -> Mapping[str, int]:
    """What lookups have counted so far."""
    kinds = ("lookup", "onboard", "missed_blocks", "matched_tokens", "bytes.h2d")
    counts = host.core.view.counts
    return {name: count for name, count in counts.items() if count and name.startswith(kinds)}


def test_blocks_that_are_here_or_below_are_told() -> None:
    """1 and 2 are here, 3 on disk, 4 nowhere: three can be had, and none is touched."""
    host = Host()
    host.store(1, 2)
    host.disk_stored(3)
    effects = host.look_up(1, 2, 3, 4, lookup=9, only_asks=True, request="r")
    found = host.found(effects)
    assert (found.lookup, found.usable, found.slots, found.lease) == (9, 3, [], 0)
    assert not [*of(effects, AskFill), *of(effects, AskHolders)]
    assert host.slots["active"] == host.slots["staged"] == 0
    assert host.core.view.explanations("r") == []
    assert counted(host) == {}
    assert len(host.found(host.look_up(1, 2)).slots) == 2
    assert counted(host)["lookups"] == 1


def test_a_block_of_another_namespace_cannot_be_had() -> None:
    host = Host()
    host.attach(engine="bob", namespace=OTHER)
    host.store_for(1, engine="bob", namespace=OTHER)
    assert host.found(host.look_up(1, only_asks=True)).usable == 0
    assert counted(host) == {}


def test_a_block_that_is_nowhere_is_asked_of_the_index_and_is_no_miss() -> None:
    """1. The index knows of no peer: nothing is found, or counted. 2. A peer has it: it is pulled,
    and leased as by any lookup."""
    host = HostWithPeers()
    [ask] = of(host.look_up(1, only_asks=True, request="r"), AskHolders)
    found = host.found(host.answer(ask))
    assert (found.usable, found.slots, found.reason) == (0, [], "not_stored")
    [ask] = of(host.look_up(2, only_asks=True, request="r"), AskHolders)
    [pull] = of(host.answer(ask, (ANN, 1)), PullFromPeer)
    assert len(host.found(host.came(pull)).slots) == 1
    host.wait(LOOKUP_MS)
    assert counted(host) == {}
    assert host.core.view.explanations("r") == []


def test_a_busy_host_tier_explains_none() -> None:
    host = Host(lookups_max=0)
    found = host.found(host.look_up(1, only_asks=True, request="r"))
    assert found.reason == "busy"
    assert counted(host) == {}
