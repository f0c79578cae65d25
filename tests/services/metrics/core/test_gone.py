"""Services that have gone: what is remembered of them, and for how long."""

from __future__ import annotations

from kvbm_common.registry.records import ENGINE, Changed, Joined, Left, RegistryEvent
from kvbm_metrics.core.collector import status_view
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.gone import (
    GONE_MAX,
    LEFT_AGE_S,
    LOST_AGE_S,
    RESTART_S,
    GoneServices,
    gone_views,
)
from kvbm_metrics.core.kvbm_totals import Totals
from kvbm_metrics.core.rates import Rates

from tests.services.metrics.samples import alive, record, stats

DISK = record("disk-tier")
HOST = record("host-tier")


def gone_after(*events: RegistryEvent, now_s: float = 0.0) -> list[tuple[str, str]]:
    """Return who is remembered, and how it went, when all of this was said at 0 s."""
    services = GoneServices()
    for event in events:
        services.take(event, 0.0)
    return [(one.record.key, one.manner) for one in services.of(now_s)]


def test_a_silent_service_is_lost_and_one_that_says_so_has_left() -> None:
    """The two differ in how long they are remembered."""
    events = (Joined(HOST), Joined(DISK), Left(HOST, "expired"), Left(DISK, "deleted"))
    both = [("disk-tier.a.0", "left"), ("host-tier.a.0", "lost")]
    assert gone_after(*events) == both
    assert gone_after(*events, now_s=LEFT_AGE_S - 1) == both
    assert gone_after(*events, now_s=LEFT_AGE_S) == both[1:]
    assert gone_after(*events, now_s=LOST_AGE_S) == []


def test_a_service_that_is_back_is_not_gone() -> None:
    """Also in another life; what it says later changes nothing."""
    back = record("host-tier", epoch=2)
    assert gone_after(Left(HOST, "expired"), Joined(back)) == []
    assert gone_after(Left(HOST, "expired"), Joined(back), Changed(back, back)) == []
    assert gone_after(Left(HOST, "expired"), Joined(back), Left(back, "expired")) != []


def test_services_that_are_forgotten_are_not_lost_any_more() -> None:
    """What left by itself, another life, and what is not named, is remembered as before."""
    services, again = GoneServices(), record("host-tier", host="again", epoch=2)
    for gone in (HOST, again, record("host-tier", host="other")):
        services.take(Left(gone, "expired"), 0.0)
    services.take(Left(DISK, "deleted"), 0.0)
    named = [HOST, DISK, record("host-tier", host="again", epoch=1)]
    assert (services.forget(named), services.forget(named)) == (1, 0)
    keys = [one.record.key for one in services.of(0.0)]
    assert keys == [DISK.key, again.key, "host-tier.other.0"]


def test_a_tier_that_left_just_now_may_be_starting_again() -> None:
    """Goal: of what holds blocks over a restart. 1. A host tier does not. 2. A disk tier that is
    back, was lost, or has been away for long is not starting."""
    services = GoneServices()
    services.take(Left(HOST, "deleted"), 0.0)
    services.take(Left(record("disk-tier", host="lost"), "expired"), 0.0)
    services.take(Left(DISK, "deleted"), 1.0)
    assert services.restarting(RESTART_S) == [DISK]
    assert services.restarting(RESTART_S + 1) == []
    services.take(Left(DISK, "deleted"), RESTART_S + 2)
    services.take(Joined(record("disk-tier", epoch=2)), RESTART_S + 3)
    assert services.restarting(RESTART_S + 3) == []


def test_of_those_that_are_gone_some_are_lost() -> None:
    """An alert speaks of them for as long as the page does, and not of those that left."""
    services = GoneServices()
    services.take(Left(HOST, "expired"), 0.0)
    services.take(Left(DISK, "deleted"), 0.0)
    assert services.lost(LOST_AGE_S - 1) == [HOST]
    assert services.lost(LOST_AGE_S) == []


def test_engines_are_not_services() -> None:
    """They come and go with the requests of others."""
    assert gone_after(Left(record(ENGINE), "expired")) == []


def test_no_more_are_remembered_than_a_limit() -> None:
    """The first that went are forgotten."""
    events = [Left(record("host-tier", host=f"h{n:05}"), "expired") for n in range(GONE_MAX + 2)]
    found = gone_after(*events)
    assert len(found) == GONE_MAX
    assert found[0][0] == "host-tier.h00002.0"


def test_the_status_says_who_is_gone_and_since_when() -> None:
    """Its host can still be chosen."""
    services = GoneServices()
    services.take(Left(record("host-tier", host="b"), "expired"), 1.0)
    view = FleetView(instances=[alive(stats("index"))])
    said = status_view(
        view, Totals(), Rates(), expected=(), version="1",
        gone=gone_views(services.of(3.5), 3.5),
    )  # fmt: skip
    assert [one.model_dump() for one in said.gone] == [
        {"kind": "host-tier", "host": "b", "instance": "0", "manner": "lost", "gone_ms_ago": 2500}
    ]
    assert said.hosts == ["a", "b"]
