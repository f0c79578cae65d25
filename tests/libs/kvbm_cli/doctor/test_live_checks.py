"""The doctor of a running system, on drawn figures: what it finds, and what it leaves alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.doctor.live_checks import (
    JOURNAL_DUE_S,
    MISSED_LEAST,
    NEARLY_FULL,
    REACH_S,
    LiveBound,
    LiveService,
    examine_live,
    reasons_of,
    services_of,
)
from kvbm_common.wire.bounds import BOUNDS

HISTORIES = sorted(name for name, bound in BOUNDS.items() if bound.kind == "history")
OTHERS = sorted(BOUNDS.keys() - {*HISTORIES, "journal"})


def service(*bounds: LiveBound, **fields: object) -> LiveService:
    """A service that serves."""
    said = LiveService("host-tier", "gpu-a", "0", True, True, [], list(bounds))
    return msgspec.structs.replace(said, **fields)


def bound(name: str, used: float, *, dropped: float = 0, reach_s: float | None = None) -> LiveBound:
    """A bound of 100."""
    return LiveBound(name, BOUNDS[name].kind, used, 100, dropped, reach_s)


def test_nothing_found_says_what_was_looked_at() -> None:
    (finding,) = examine_live([service(bound("inbox", 1)), service(bound("sights", 100))])
    assert (finding.level, finding.advice) == ("ok", "")
    assert "2 bounds of 2 services on 1 hosts" in finding.found


def test_no_service_is_wrong() -> None:
    assert [one.level for one in examine_live([])] == ["wrong"]


def test_a_history_that_wears_out_names_its_setting() -> None:
    (finding,) = examine_live([service(bound("explanations", 97, dropped=9, reach_s=720))])
    assert finding == Finding(
        "host-tier 0 of gpu-a",
        "better",
        "history of explained lookups: 97% full, reaches back 12 min",
        "Raise KVBM_EXPLAIN_REQUESTS.",
    )


def test_a_stream_too_short_for_an_image_is_wrong() -> None:
    levels = [
        examine_live([service(bound("event_stream", 100, reach_s=seconds))])[0].level
        for seconds in (89, 90, 899, 900)
    ]
    assert levels == ["wrong", "better", "better", "ok"]


def test_a_journal_is_full_before_each_rewrite_and_due_when_none_ends() -> None:
    full = service(bound("journal", 130))
    assert examine_live([full])[0].level == "ok"
    late = msgspec.structs.replace(full, journal_due_s=JOURNAL_DUE_S + 1)
    (finding,) = examine_live([late])
    assert (finding.level, "10 min" in finding.found) == ("wrong", True)


def test_a_service_that_is_away_or_not_ready_is_wrong() -> None:
    away = service(answers=False, ready=False, reasons=["no answer"])
    (finding,) = examine_live([away])
    assert (finding.level, finding.found) == (
        "wrong",
        "does not answer: no answer; its bounds are not known",
    )


@pytest.mark.parametrize(
    ("missed", "unexplained", "level"),
    [(MISSED_LEAST, 60, "wrong"), (MISSED_LEAST, 50, "ok"), (MISSED_LEAST - 1, 900, "ok")],
)
def test_misses_that_are_not_explained(missed: int, unexplained: int, level: str) -> None:
    one = service(bound("inbox", 1), missed_blocks=missed, unexplained_blocks=unexplained)
    (finding,) = examine_live([one])
    assert finding.level == level
    assert ("Raise KVBM_HISTORY_ENTRIES" in finding.advice) == (level == "wrong")


def test_the_histories_that_a_setting_sizes_name_it() -> None:
    named = {name for name, one in BOUNDS.items() if "KVBM_HISTORY_ENTRIES" in one.advice}
    assert named == {"departures", "departures_disk", "departures_object", "first_blocks"}


@given(st.sampled_from(OTHERS), st.floats(0, 200), st.integers(0, 5), st.none() | st.floats(0, 1e6))
def test_queues_and_tables_are_judged_by_fullness_and_drops(
    name: str, used: float, dropped: int, reach_s: float | None
) -> None:
    """A reach says nothing of a queue."""
    (finding,) = examine_live([service(bound(name, used, dropped=dropped, reach_s=reach_s))])
    if used >= 100:
        expected = "wrong"
    else:
        expected = "better" if used / 100 >= NEARLY_FULL or dropped else "ok"
    assert finding.level == expected
    assert bool(finding.advice) == (expected != "ok")
    assert ("dropped" in finding.found) == (dropped > 0)


@given(st.sampled_from(HISTORIES), st.floats(0, 100), st.integers(0), st.none() | st.floats(0, 1e6))
def test_histories_are_judged_by_their_reach_alone(
    name: str, used: float, dropped: int, reach_s: float | None
) -> None:
    (finding,) = examine_live([service(bound(name, used, dropped=dropped, reach_s=reach_s))])
    wanted_s, least_s = REACH_S.get(name, (0, 0))
    short = reach_s is not None and reach_s < wanted_s
    too_short = reach_s is not None and reach_s < least_s
    assert finding.level == ("wrong" if too_short else "better" if short else "ok")


def test_the_worst_comes_first() -> None:
    levels = [
        one.level for one in examine_live([service(bound("offers", 95), bound("lookups", 100))])
    ]
    assert levels == ["wrong", "better"]


@pytest.mark.parametrize(
    "answer",
    [{}, [1], [{"service": "x"}]],
)
def test_another_answer_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="no bounds"):
        services_of(answer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"missed_blocks": None},
        {"unexplained_blocks": -5.0},
        {"bounds": [{"bound": "x", "kind": "queue", "used": 0, "size": 0}]},
        {"bounds": [{"bound": "x", "kind": "queue", "used": -1.0, "size": 9}]},
        {"bounds": [{"bound": "x", "kind": "queue", "used": 1e300, "size": 9}]},
    ],
)
def test_a_service_with_absurd_figures_silences_no_other(wrong: dict[str, object]) -> None:
    absurd = msgspec.to_builtins(service(bound("inbox", 1), instance="9")) | wrong
    full = msgspec.to_builtins(service(bound("inbox", 100)))
    found = {one.check: one.found for one in examine_live(services_of([absurd, full]))}
    assert found.keys() == {"host-tier 9 of gpu-a", "host-tier 0 of gpu-a"}
    assert "its figures make no sense" in found["host-tier 9 of gpu-a"]


def test_a_service_that_is_not_registered_is_wrong() -> None:
    """The index was stopped, so nothing tells its bounds; the status page says that it lacks."""
    reasons = reasons_of({"reasons": ["index: no instance is registered"], "ready": False})
    (finding,) = examine_live([service(bound("inbox", 1))], reasons)
    assert (finding.level, finding.found) == ("wrong", f"not ready: {reasons[0]}")


def test_a_reason_of_a_service_that_tells_it_itself_is_found_once() -> None:
    away = service(answers=False, ready=False, reasons=["no answer"])
    assert len(examine_live([away], ["host-tier.gpu-a.0: no answer"])) == 1


def test_a_status_without_reasons_is_refused() -> None:
    with pytest.raises(ValueError, match="no status"):
        reasons_of({"ready": True})


def test_bounds_that_are_not_known_are_not_well() -> None:
    (finding,) = examine_live([service()])
    assert (finding.level, finding.found) == ("better", "its bounds are not known")


def test_what_is_behind_is_wrong() -> None:
    (finding,) = examine_live([service(bound("inbox", 1), behind=2)])
    assert (finding.level, finding.found.split(":")[0]) == (
        "wrong",
        "2 sources or tiers are behind",
    )


def test_a_bound_of_a_later_release_is_shown() -> None:
    told = [msgspec.to_builtins(service(LiveBound("new_thing", "queue", 100, 100)))]
    (finding,) = examine_live(services_of(told))
    assert (finding.level, finding.found.partition(":")[0]) == ("wrong", "new_thing")


def test_a_ready_service_that_cannot_do_all_is_told() -> None:
    (finding,) = examine_live([service(bound("inbox", 1), reasons=["no blocks are read"])])
    assert (finding.level, finding.found) == ("wrong", "no blocks are read")
