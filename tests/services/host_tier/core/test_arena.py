"""Leases of copiers: their share of the slots, and who gives them back."""

from __future__ import annotations

from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.wire.admin import ResizeRequest
from kvbm_common.wire.verbs import LeaseReply
from kvbm_host_tier.core.messages import AdminAsked

from tests.services.host_tier.core.test_sizes import LARGE_BYTES, attach, store
from tests.services.host_tier.helpers import Host, name

SLOTS = 400
OFFER = 50


def filled() -> Host:
    """Return a host tier of 400 slots that are all full."""
    host = Host(slots=SLOTS)
    for first in range(1, SLOTS, OFFER):
        host.store(*range(first, first + OFFER))
    return host


def test_copier_pins_a_quarter_of_the_slots_at_most() -> None:
    """Whatever it asks for, in one request or several; another owner has its own quarter."""
    host = filled()
    leases = [host.lease(*range(first, first + 75)) for first in (1, 76, 151)]
    assert [len(lease.slots) for lease in leases] == [75, 25, 0]
    assert [len(lease.over_share) for lease in leases] == [0, 50, 75]
    assert leases[1].over_share[0] == name(101).hex()
    assert host.slots["active"] == 100
    assert len(host.lease(*range(301, 311), owner="disk-tier-1").slots) == 10


def test_quarter_is_one_of_the_memory_where_blocks_are_large() -> None:
    """400 slots of ada's blocks have room for 133 of eve's: a copier pins 33 of these, not 100."""
    host = Host(slots=SLOTS, slab_bytes=12 * UNIT_BYTES, copied_least=1)
    attach(host, "eve", LARGE_BYTES)
    for number in range(1, 101):
        store(host, number, engine="eve")
    leases = [host.lease(*range(first, first + 20)) for first in (1, 21, 41)]
    assert [len(lease.slots) for lease in leases] == [20, 13, 0]
    assert host.copied(leases[0].lease)
    assert len(host.lease(*range(41, 101)).slots) == 20


def test_quarter_is_one_of_a_smaller_tier() -> None:
    """An operator leaves 80 of 400 slots in use: a copier pins 20 of these, not all of them."""
    host = Host(slots=SLOTS, copied_least=1)
    host.step(AdminAsked(1, "resize", ResizeRequest(slots=80)))
    host.store(*range(1, 51))
    assert len(host.lease(*range(1, 51)).slots) == 20


def test_copiers_together_pin_half_of_the_memory_at_most() -> None:
    """Four disk tiers would else pin all of it, and no block could come. A fifth still copies."""
    host = Host(slots=SLOTS, copied_least=8)
    host.store(*range(1, 201))
    host.store(*range(201, SLOTS + 1))
    owners = [f"disk-tier-{place}" for place in range(5)]
    asked = [range(1 + 80 * place, 81 + 80 * place) for place in range(5)]
    leases = [host.lease(*asked[place], owner=owner) for place, owner in enumerate(owners)]
    assert [len(lease.slots) for lease in leases] == [80, 80, 40, 8, 8]
    host.store(1_001)
    assert 1_001 in host.announced
    assert host.copied(leases[0].lease)
    assert len(host.lease(*asked[4], owner=owners[4]).slots) == 64


def test_block_that_is_named_twice_is_lent_once_or_later_once() -> None:
    host = filled()
    lease = host.lease(*range(1, 101), 1, 101, 101)
    assert len(lease.slots) == len({slot.slot for slot in lease.slots}) == 100
    assert lease.over_share == [name(101).hex()]


def test_what_a_copier_gives_back_it_may_lease_again() -> None:
    """By release, and by its deadline."""
    host = filled()
    first = host.lease(*range(1, 101))
    assert not host.lease(201).slots
    assert host.copied(first.lease)
    host.lease(*range(1, 101), lease_ms=10)
    host.wait(10)
    assert host.slots["active"] == 0
    assert len(host.lease(*range(1, 101)).slots) == 100


def test_small_arena_leases_what_a_disk_tier_has_in_flight() -> None:
    """A quarter of four slots would keep a staging arena from being written."""
    host = Host()
    host.store(1, 2, 3)
    assert len(host.lease(1, 2, 3).slots) == 3


def test_only_its_owner_gives_a_lease_back() -> None:
    """Its number can be guessed; the token cannot. What is refused stays pinned."""
    host = Host()
    host.store(1)
    lease = host.lease(1, token="mine")
    assert isinstance(lease, LeaseReply)
    for token in ("", "yours"):
        assert not host.copied(lease.lease, token)
        assert host.slots["active"] == 1
    assert host.copied(lease.lease, "mine")
    assert host.slots["active"] == 0


def test_asker_without_a_token_gives_back_without_one() -> None:
    """As releases did before there were tokens."""
    host = Host()
    host.store(1)
    lease = host.lease(1)
    assert not host.copied(lease.lease, "guessed")
    assert host.copied(lease.lease)
