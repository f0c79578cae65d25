"""Tenants share host memory: each keeps its share, whatever path another's blocks come by.

ada's engine names no tenant, gil's is of tenant gold and cut alike.
"""

from __future__ import annotations

from kvbm_common.identity import of_tenant
from kvbm_common.wire.local import Pulled
from kvbm_host_tier.core.messages import AskFill, StartPull

from tests.services.host_tier.helpers import NAMESPACE, Host, of
from tests.services.host_tier.peer_helpers import HostWithPeers

GOLD = of_tenant(NAMESPACE, "gold")


def joined(host: Host) -> None:
    """gil's engine says hello."""
    host.attach(engine="gil", namespace=GOLD)


def stored_by_gil(host: Host, *wanted: int, offer: int = 900) -> None:
    """gil offers blocks, one by one."""
    for number in wanted:
        for pull in of(
            host.offer(number, engine="gil", namespace=GOLD.digest.hex(), offer=offer + number),
            StartPull,
        ):
            for pulled in of(host.told(host.pulled(pull)), Pulled):
                host.confirm(pulled.offer, engine="gil")


def held(host: Host) -> tuple[int, int]:
    """How many blocks are ada's, and how many gil's."""
    spaces = [block.namespace for block in host.core.view.blocks().values()]
    return spaces.count(NAMESPACE.digest), spaces.count(GOLD.digest)


def stored_by_ada(host: Host, *wanted: int) -> None:
    for number in wanted:
        host.store(number)


def test_offers_of_one_tenant_do_not_evict_what_another_has_within_its_share() -> None:
    """1. gil has two of four slots. 2. ada offers six blocks: gil's stay."""
    host = Host(slots=4)
    joined(host)
    stored_by_gil(host, 1, 2)
    stored_by_ada(host, 11, 12, 13, 14, 15, 16)
    assert held(host) == (2, 2)
    assert host.core.view.counts["evictions.evicted"] == 4
    host.core.check()


def test_a_tenant_may_use_what_others_leave_and_gives_it_back() -> None:
    host = Host(slots=4, tenant_shares="gold=3")
    joined(host)
    stored_by_ada(host, 11, 12, 13, 14)
    assert held(host) == (4, 0)
    stored_by_gil(host, 1, 2, 3, 4, 5)
    assert held(host) == (1, 3)
    host.core.check()


def test_fills_of_one_tenant_do_not_evict_what_another_has_within_its_share() -> None:
    """ada looks up blocks that the disk has: they take ada's slots."""
    host = Host(slots=4)
    joined(host)
    stored_by_gil(host, 1, 2)
    stored_by_ada(host, 11, 12)
    host.disk_stored(21, 22)
    [fill] = of(host.look_up(21, 22), AskFill)
    assert len(host.found(host.filled(fill)).slots) == 2
    assert held(host) == (2, 2)


def test_figures_tell_what_each_tenant_has_by_its_name() -> None:
    host = Host(slots=4)
    stored_by_ada(host, 11)
    assert host.core.view.statistics(host.now_ms).tenants == []  # There is one only.
    joined(host)
    stored_by_gil(host, 1, 2)
    told = {one.name: one for one in host.core.view.statistics(host.now_ms).tenants}
    assert sorted(told) == ["", "gold"]
    assert (told[""].blocks, told["gold"].blocks) == (1, 2)
    assert told["gold"].share_bytes == told[""].share_bytes > told["gold"].bytes / 2


def test_tenants_share_no_block() -> None:
    """ada knows the name of gil's block; it is of another namespace, and a miss."""
    host = Host(slots=4)
    joined(host)
    stored_by_gil(host, 1)
    assert host.found(host.look_up(1)).reason == "other_namespace"


def test_a_guest_of_a_tenant_within_its_share_does_not_leave_for_another_tenant() -> None:
    """ada has a guest and a block of its own, gil the other two slots: gil's next takes gil's."""
    host = HostWithPeers(slots=4)
    joined(host)
    stored_by_ada(host, 11)
    [pull] = host.ask_peers(21)
    host.release(host.found(host.came(pull)).lease)
    stored_by_gil(host, 1, 2, 3, 4, 5)
    assert held(host) == (2, 2)
    assert host.core.view.statistics(host.now_ms).figures["guests"] == 1
    stored_by_ada(host, 12)
    assert held(host) == (2, 2)
    assert host.core.view.statistics(host.now_ms).figures["guests"] == 0
