"""What no answer waits for: hits, explanations, and the pins of leases that engines released."""

from __future__ import annotations

import pytest
from kvbm_host_tier.core.arena import UNSETTLED_MAX
from kvbm_host_tier.core.messages import AskFill, TellHits, Tick

from tests.services.host_tier.helpers import Host, name, numbers, of


@pytest.fixture
def host() -> Host:
    """A host tier of two slots that holds 1 and 2, and behind whose steps other inputs wait."""
    host = Host(slots=2)
    host.store(1, 2)
    host.disk_stored(9)
    host.settles = False
    return host


def pins(host: Host) -> int:
    """How many slots are pinned."""
    return host.core.view.statistics(host.now_ms).slots["active"]


def test_answer_of_a_lookup_leaves_before_its_hits(host: Host) -> None:
    """The engine waits, the disk tier does not; and it is told once."""
    effects = host.look_up(1, 2)
    assert len(host.found(effects).slots) == 2
    assert of(effects, TellHits) == []
    [told] = of(host.core.settle(), TellHits)
    assert numbers(told.hits.hashes) == [1, 2]
    assert list(host.core.settle()) == []


def test_hits_are_not_told_where_there_is_no_lower_tier() -> None:
    """Each lookup would send its names to nobody."""
    host = Host()
    host.store(1)
    assert of(host.look_up(1), TellHits) == []


def test_next_input_settles_what_was_left(host: Host) -> None:
    """Hits of two lookups are told by the first input that follows each."""
    host.look_up(1)
    [told] = of(host.look_up(2), TellHits)
    assert numbers(told.hits.hashes) == [1]
    [told] = of(host.step(Tick()), TellHits)
    assert numbers(told.hits.hashes) == [2]


def test_released_slots_are_unpinned_after_the_next_lookup(host: Host) -> None:
    """A lookup finds blocks of a lease that has just ended; then only its own lease pins them."""
    first = host.found(host.look_up(1, 2))
    host.release(first.lease)
    assert pins(host) == 2
    second = host.found(host.look_up(1))
    assert (len(second.slots), pins(host)) == (1, 2)
    host.core.settle()
    assert pins(host) == 1
    host.release(second.lease)
    host.step(Tick())
    assert pins(host) == 0


def test_released_slots_wait_for_a_lookup_or_a_tick(host: Host) -> None:
    """A lookup follows a release, as a rule, and must not wait. Ticks come soon until then."""
    host.release(host.found(host.look_up(1, 2)).lease)
    host.core.settle()
    assert (pins(host), host.core.view.is_quiet) == (2, False)
    host.step(Tick())
    assert (pins(host), host.core.view.is_quiet) == (0, True)


def test_lookup_that_needs_room_evicts_what_was_released(host: Host) -> None:
    """Both slots belong to a released lease, and 3 is on disk: one of them is filled with it."""
    host.disk_stored(3)
    found = host.found(host.look_up(1, 2))
    host.release(found.lease)
    [fill] = of(host.look_up(3), AskFill)
    assert [slot.hash for slot in fill.request.slots] == [name(3).hex()]
    assert pins(host) == 0


def test_many_released_leases_are_settled_between_lookups(host: Host) -> None:
    """The slots of UNSETTLED_MAX leases and one more are pinned at most."""
    for _ in range(UNSETTLED_MAX):
        host.release(host.found(host.look_up(1, 2)).lease)
    assert pins(host) == 2
    assert len(host.found(host.look_up(1)).slots) == 1
    assert pins(host) == 1


def test_corrupt_block_leaves_with_its_release(host: Host) -> None:
    """The reader of 1 calls it corrupt: its slot is empty at once."""
    found = host.found(host.look_up(1))
    host.release(found.lease, 0)
    assert (host.announced, pins(host)) == ({2}, 0)
    assert host.core.view.statistics(host.now_ms).slots["reset"] == 1
