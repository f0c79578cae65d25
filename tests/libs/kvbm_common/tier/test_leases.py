"""Leases: three ends, each exactly once. How they ride on pins is in test_slots."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.leases import COUNT_MAX, PIN, Lease, LeaseTable


def granted(table: LeaseTable, owner: str, deadline_ms: int, *slots: int) -> Lease:
    """A lease for the tests' usual reason."""
    return table.grant(owner, "onboard", slots, deadline_ms=deadline_ms)


def test_a_lease_is_what_was_granted() -> None:
    """The first is number 1; each has its owner, reason, slots and deadline."""
    table = LeaseTable()
    first = table.grant("ada", "onboard", (1, 2), deadline_ms=100)
    second = table.grant("bob", "copy", (2,), deadline_ms=90)
    assert first == Lease(1, "ada", "onboard", (1, 2), 100)
    assert second == Lease(2, "bob", "copy", (2,), 90)
    assert (table.find(1), table.find(2)) == (first, second)


def test_a_lease_ends_by_release_once() -> None:
    """The second release learns that the lease had ended: its copy is worthless."""
    table = LeaseTable()
    lease = granted(table, "ada", 100, 1, 2)
    assert table.find(lease.id) == lease
    assert table.release(lease.id) == lease
    assert table.release(lease.id) is None
    assert table.find(lease.id) is None
    assert len(table) == 0


def test_a_slot_leaves_pins_and_no_other_leases() -> None:
    """2 is in two pins and a reader's lease: it leaves the pins, and the one of 2 alone ends.

    The other pin keeps its number, its deadline and its place among the oldest.
    """
    table = LeaseTable()
    two = table.grant("ada", PIN, (1, 2), deadline_ms=100)
    one = table.grant("bob", PIN, (2,), deadline_ms=90)
    reader = granted(table, "eve", 80, 2)
    assert table.leave([2, 3]) == [2, 2]
    assert table.leave([2]) == []
    assert table.all() == [Lease(two.id, "ada", PIN, (1,), 100), reader]
    assert table.pinned_slots == {1}
    assert table.release(one.id) is None, "it ended with its last block"
    table.check()
    assert [lease.slots for lease in table.expire(100)] == [(2,), (1,)]
    assert table.leave([1]) == []
    table.check()


def test_a_lease_ends_at_its_deadline_and_not_before() -> None:
    """At 99 it runs, at 100 it has ended; the count says so."""
    table = LeaseTable()
    early, late = granted(table, "ada", 100), granted(table, "ada", 101)
    assert table.expire(99) == []
    assert table.expire(100) == [early]
    assert table.expire(100) == []
    assert table.all() == [late]
    assert table.expired_count == 1


def test_a_released_lease_does_not_expire() -> None:
    """Its entry in the queue of deadlines is of no consequence."""
    table = LeaseTable()
    lease = granted(table, "ada", 100)
    table.release(lease.id)
    assert table.expire(1_000) == []
    assert table.expired_count == 0
    table.check()


def test_leases_expire_in_the_order_of_their_deadlines() -> None:
    """Whatever the order in which they were granted."""
    table = LeaseTable()
    third, first, second = (granted(table, "ada", at_ms) for at_ms in (30, 10, 20))
    assert table.expire(30) == [first, second, third]


def test_an_owners_death_ends_what_is_his() -> None:
    """Bob's lease runs on."""
    table = LeaseTable()
    hers = [granted(table, "ada", 100), granted(table, "ada", 200)]
    his = granted(table, "bob", 100)
    assert table.end_owner("ada") == hers
    assert table.end_owner("ada") == []
    assert table.all() == [his]
    table.check()


def test_ids_are_never_reused_and_never_zero() -> None:
    """0 means "no lease" on the wire; an id that comes late must not hit another lease."""
    table = LeaseTable()
    ids: list[int] = []
    for _ in range(5):
        lease = granted(table, "ada", 1)
        ids.append(lease.id)
        table.release(lease.id)
    assert ids == sorted(set(ids))
    assert 0 not in ids
    assert granted(LeaseTable(epoch=7), "ada", 1).id == (7 << 24) + 1
    with pytest.raises(AssertionError):
        LeaseTable(epoch=-1)


@pytest.mark.parametrize("epoch", [0, 1, 2**29 - 1, 2**53 - 1, 2**63 - 1])
def test_ids_are_exact_in_json_for_every_reader(epoch: int) -> None:
    """Goal: no reader rounds an id that it gives back; most have 53 bits for a number."""
    assert 0 < granted(LeaseTable(epoch), "ada", 1).id + COUNT_MAX - 1 < 2**53


ACTS = st.tuples(st.sampled_from(["grant", "release", "tick"]), st.integers(0, 9))


@given(st.lists(ACTS, min_size=20, max_size=60))
def test_a_count_that_begins_again_meets_no_running_lease(acts: list[tuple[str, int]]) -> None:
    """1. The count ends at 3. 2. Leases come, go and run out. 3. As with ids without an end, each
    ends once, at its own deadline or by its own release."""
    with mock.patch("kvbm_common.tier.leases.COUNT_MAX", 3):
        table, running, now_ms = LeaseTable(), dict[int, Lease](), 0
        for act, number in acts:
            if act == "grant" and len(running) < 2:
                lease = granted(table, "ada", now_ms + 1 + number, number)
                assert lease.id not in running
                running[lease.id] = lease
            elif act == "release" and running:
                lease_id = sorted(running)[number % len(running)]
                assert table.release(lease_id) == running.pop(lease_id)
            elif act == "tick":
                now_ms += number
                due = {one.id for one in running.values() if one.deadline_ms <= now_ms}
                assert {one.id for one in table.expire(now_ms)} == due
                running = {one.id: one for one in running.values() if one.id not in due}
            assert {one.id for one in table.all()} == running.keys()
            table.check()
