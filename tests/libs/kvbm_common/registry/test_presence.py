"""Presence: who is gone, and when that is believed."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.registry.presence import Presence
from kvbm_common.registry.records import Changed, Joined, Left, ServiceRecord

TTL_S, GRACE_S = 5.0, 1.0


def record(instance: str, epoch: int = 1) -> ServiceRecord:
    """One service."""
    return ServiceRecord(
        kind="index", host="h", instance=instance, epoch=epoch, pid=1, started_ms=0, ttl_s=TTL_S
    )


def payload(instance: str, epoch: int = 1) -> bytes:
    """Its entry."""
    return msgspec.json.encode(record(instance, epoch))


@pytest.fixture
def presence() -> Presence:
    """In contact since 0; `a` and `b` are there."""
    made = Presence(grace_s=GRACE_S, warn=lambda _kind, _text: None)
    made.contact(0)
    made.put("index.h.a", payload("a"))
    made.put("index.h.b", payload("b"))
    return made


def test_changes_are_told_once(presence: Presence) -> None:
    """Goal: nothing is said of an entry that is written again as it was."""
    assert presence.put("index.h.c", payload("c")) == [Joined(record("c"))]
    assert presence.put("index.h.c", payload("c")) == []
    assert presence.put("index.h.c", payload("c", 2)) == [Changed(record("c"), record("c", 2))]
    assert presence.put("index.h.c", b"") == [Left(record("c", 2), "deleted")]
    assert presence.put("index.h.c", b"") == []
    assert presence.remove("index.h.c", 100) == []


def test_in_quiet_times_a_removal_is_believed_at_once(presence: Presence) -> None:
    """Goal: no delay on top of the lease."""
    assert presence.remove("index.h.a", TTL_S + GRACE_S) == [Left(record("a"), "expired")]
    assert set(presence.records) == {"index.h.b"}


def test_soon_after_contact_the_missing_have_time(presence: Presence) -> None:
    """Goal: who comes back was never away; who does not leaves when its time is up."""
    presence.contact(100)
    assert presence.replace({}, 100) == []
    assert presence.put("index.h.a", payload("a")) == []
    assert presence.sweep(100 + TTL_S + GRACE_S - 0.1) == []
    assert presence.sweep(100 + TTL_S + GRACE_S) == [Left(record("b"), "expired")]
    assert presence.sweep(1000) == []
    assert set(presence.records) == {"index.h.a"}


def test_second_outage_begins_the_time_anew(presence: Presence) -> None:
    """Goal: an unstable registry makes nobody leave."""
    presence.contact(100)
    presence.remove("index.h.a", 101)
    presence.outage()
    assert presence.sweep(1000) == []
    presence.contact(1005)
    assert presence.sweep(1005) == []
    assert presence.sweep(1005 + TTL_S + GRACE_S) == [Left(record("a"), "expired")]


def test_missing_one_may_say_goodbye(presence: Presence) -> None:
    """Goal: a goodbye needs no waiting, and is told once."""
    presence.contact(100)
    presence.remove("index.h.a", 101)
    assert presence.replace({"index.h.a": b"", "index.h.b": payload("b")}, 102) == [
        Left(record("a"), "deleted")
    ]
    assert presence.sweep(1000) == []


def test_an_entry_that_names_another_service_is_no_entry(presence: Presence) -> None:
    """Goal: the owner of one key speaks for no other service."""
    assert presence.put("index.h.c", payload("a", 99)) == []
    assert presence.records["index.h.a"] == record("a")


@pytest.mark.parametrize("rubbish", [b"\xff", b'{"kind":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_bytes_that_no_decoder_reads_are_no_entry(presence: Presence, rubbish: bytes) -> None:
    assert presence.put("index.h.c", rubbish) == []


@pytest.mark.parametrize(("instance", "epoch"), [("c", -1), ("c", 2**63), ("", 1), ("c\n", 1)])
def test_an_entry_out_of_bounds_is_no_entry(presence: Presence, instance: str, epoch: int) -> None:
    """Whoever may write in the registry ends no service with it."""
    assert presence.put(f"index.h.{instance}", payload(instance, epoch)) == []
    assert set(presence.records) == {"index.h.a", "index.h.b"}
