"""The aggregation core and the Prometheus text, without IO."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.identity import Namespace
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.metrics import Family, Sample
from kvbm_metrics.core import collector, kvbm_totals, series
from kvbm_metrics.core.bounds import bounds_view
from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.kvbm_totals import KVBM_COUNTERS, KVBM_GAUGES, Totals
from kvbm_metrics.core.rates import Rates
from prometheus_client.parser import text_string_to_metric_families

from tests.services.metrics.samples import (
    KINDS,
    PASSING,
    WORKER,
    alive,
    counted,
    page_of,
    record,
    silent,
    snapshot,
    stats,
    tier_stats,
    two_sizes,
)

EVERYBODY = FleetView(instances=[alive(stats(kind)) for kind in KINDS])
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text_of(view: FleetView, totals: Totals | None = None) -> str:
    """The answer of `/metrics`."""
    return page_of(view, totals, version="1.2.3")


def series_of(text: str) -> Series:
    """The text as Prometheus's own client reads it; no series may come twice."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(found) == len(dict(found)), "a series comes twice"
    return dict(found)


def value_of(text: str, name: str, **labels: str) -> float:
    """One series."""
    return series_of(text)[name, frozenset(labels.items())]


# --- KVBM's own ------------------------------------------------------------------------------


def test_kvbms_own_are_there_before_any_traffic() -> None:
    """Exactly KVBM's names and types, no `_total`, no labels, 0, even with nobody there."""
    lines = text_of(FleetView(instances=[])).splitlines()
    for name in KVBM_COUNTERS:
        assert f"# TYPE {name} counter" in lines
        assert f"{name} 0.0" in lines
    for name in KVBM_GAUGES:
        assert f"# TYPE {name} gauge" in lines
        assert f"{name} 0.0" in lines
    assert len(KVBM_COUNTERS + KVBM_GAUGES) == 13


def test_kvbms_own_are_summed_over_tiers_and_stay_labelled_per_instance() -> None:
    """One series for KVBM's dashboard, one per instance for ours."""
    one = counted("kvbm_matched_tokens", 3)
    two = counted("kvbm_matched_tokens", 4, host="b")
    view = FleetView(
        instances=[
            alive(stats("host-tier"), one),
            alive(stats("host-tier", host="b"), two),
        ]
    )
    totals = Totals()
    totals.take([one, two])
    text = text_of(view, totals)
    # Prometheus's Python client would read the name with `_total`, so look at the line itself.
    assert "\nkvbm_matched_tokens 7.0\n" in text
    labels = {"service": "host-tier", "instance": "0"}
    assert value_of(text, "kvbm_matched_tokens_total", host="a", **labels) == 3
    assert value_of(text, "kvbm_matched_tokens_total", host="b", **labels) == 4


def test_hit_rates_are_weighted_by_lookups() -> None:
    """An idle host tier does not drag the rate down; a tier without the figure does not count."""
    view = FleetView(
        instances=[
            alive(stats("host-tier", figures={"host_cache_hit_rate": 0.5, "lookups_windowed": 90})),
            alive(stats("host-tier", figures={"host_cache_hit_rate": 1.0, "lookups_windowed": 10})),
            alive(stats("host-tier", figures={"host_cache_hit_rate": 0.0, "lookups_windowed": 0})),
            alive(stats("disk-tier", figures={"lookups_windowed": 1000})),
        ]
    )
    assert kvbm_totals.hit_rate(view.instances, "host_cache_hit_rate") == pytest.approx(0.55)
    assert kvbm_totals.kvbm_view(view, Totals()).kvbm_disk_cache_hit_rate == 0.0


# --- all other families ----------------------------------------------------------------------


def instance_with(*families: Family) -> FleetView:
    """A host tier with these families."""
    counted_so_far = snapshot(Metrics(), "host-tier")
    counted_so_far.families.extend(families)
    return FleetView(instances=[alive(stats("host-tier"), counted_so_far)])


def test_counters_gauges_and_histograms_are_exposed_with_our_labels() -> None:
    """What a service counts with kvbm_common.runtime.metrics arrives as Prometheus reads it."""
    counters = Metrics()
    counters.counter("kvbm_evictions", "Evictions.", labels=["reason"]).labels("room").inc(2)
    counters.gauge("kvbm_depth", "Depth.").set(1.5)
    seconds = counters.histogram(
        "kvbm_transfer_seconds", "Time.", labels=["path"], bounds=[0.1, 1.0]
    )
    for value in (0.05, 0.1, 0.5, 7.0):
        seconds.labels("d2h").observe(value)
    text = text_of(
        FleetView(instances=[alive(stats("host-tier"), snapshot(counters, "host-tier"))])
    )
    ours = {"service": "host-tier", "host": "a", "instance": "0"}
    assert value_of(text, "kvbm_evictions_total", reason="room", **ours) == 2
    assert value_of(text, "kvbm_depth", **ours) == 1.5
    buckets = {
        le: value_of(text, "kvbm_transfer_seconds_bucket", path="d2h", le=le, **ours)
        for le in ("0.1", "1.0", "+Inf")
    }
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert value_of(text, "kvbm_transfer_seconds_count", path="d2h", **ours) == 4
    assert value_of(text, "kvbm_transfer_seconds_sum", path="d2h", **ours) == pytest.approx(7.65)


def test_each_family_has_one_header() -> None:
    """Instances of several hosts share a family."""
    view = FleetView(
        instances=[
            alive(stats("host-tier", host=host), counted("kvbm_dropped", 1, host=host))
            for host in ("a", "b")
        ]
    )
    assert text_of(view).count("# TYPE kvbm_dropped_total counter\n") == 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Family("go_threads", "gauge", "Not ours.", [Sample({}, 1)]), "malformed"),
        (Family("kvbm_x\n# TYPE", "gauge", "Injected.", [Sample({}, 1)]), "malformed"),
        (Family("kvbm_x", "gauge", "A label.", [Sample({"a b": "c"}, 1)]), "malformed"),
        (Family("kvbm_x", "gauge", "Reserved.", [Sample({"__name__": "c"}, 1)]), "malformed"),
        (Family("kvbm_x", "histogram", "Short.", [Sample({}, 1, [1])], [0.1]), "malformed"),
        (Family("kvbm_disk_cache_hit_rate", "gauge", "KVBM's.", [Sample({}, 1)]), "malformed"),
        (
            Family("kvbm_disk_cache_hit_rate_total", "counter", "KVBM's.", [Sample({}, 1)]),
            "malformed",
        ),
        (Family("kvbm_matched_tokens", "gauge", "A counter.", [Sample({}, 1)]), "malformed"),
        (Family("kvbm_up", "gauge", "Ours.", [Sample({}, 1)]), "conflict"),
        (Family("kvbm_families_refused", "gauge", "Ours.", [Sample({}, 1)]), "conflict"),
        (Family("kvbm_good", "counter", "Another type.", [Sample({}, 1)]), "conflict"),
    ],
    ids=lambda value: getattr(value, "help", None),
)
def test_what_does_not_fit_is_left_out_and_counted(family: Family, reason: str) -> None:
    """A strange family never breaks the answer for everybody else."""
    good = Family("kvbm_good", "gauge", "Fine.", [Sample({}, 1)])
    text = text_of(instance_with(good, family))
    assert value_of(text, "kvbm_good", service="host-tier", host="a", instance="0") == 1
    assert value_of(text, "kvbm_families_refused", reason=reason) == 1
    assert "kvbm_x" not in text


def test_label_values_are_escaped_and_ours_win() -> None:
    """A value with quotes and line breaks; a label that is called like one of ours."""
    sample = Sample({"host": "theirs", "what": 'a"b\nc\\'}, 1)
    text = text_of(instance_with(Family("kvbm_odd", "gauge", "Odd\nhelp.", [sample])))
    ours = {"service": "host-tier", "host": "a", "instance": "0"}
    assert value_of(text, "kvbm_odd", exported_host="theirs", what='a"b\nc\\', **ours) == 1


def test_too_many_families_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that makes up names cannot flood Prometheus."""
    monkeypatch.setattr(series, "FAMILIES_MAX", 10)
    families = [Family(f"kvbm_f{i}", "gauge", "One.", [Sample({}, 1)]) for i in range(30)]
    text = text_of(instance_with(*families))
    assert value_of(text, "kvbm_families_refused", reason="too_many") >= 20


# --- about instances -------------------------------------------------------------------------


def test_up_ready_build_and_tiers() -> None:
    """What the registry and the stats say."""
    starting = Instance(record=record("index"), up=True, failure="not_ready: starting")
    tier = tier_stats("host-tier", used=3, total=4, leases=2)
    text = text_of(FleetView(instances=[alive(tier), silent("disk-tier"), starting]))
    assert value_of(text, "kvbm_build_info", version="1.2.3") == 1
    for kind, up, ready in (("host-tier", 1, 1), ("disk-tier", 0, 0), ("index", 1, 0)):
        assert value_of(text, "kvbm_up", kind=kind, host="a", instance="0") == up
        assert value_of(text, "kvbm_ready", kind=kind, host="a", instance="0") == ready
    labels = {"tier": "host", "service": "host-tier", "host": "a", "instance": "0"}
    assert value_of(text, "kvbm_tier_slots", state="inactive", **labels) == 3
    assert value_of(text, "kvbm_tier_occupancy_ratio", **labels) == 0.75
    assert value_of(text, "kvbm_tier_slot_bytes", **labels) == 100
    assert value_of(text, "kvbm_tier_leases", **labels) == 2
    assert "kvbm_tier_slabs{" not in text, "a release before has no slabs"


def test_a_lost_instance_is_neither_up_nor_ready() -> None:
    """Goal: `kvbm_ready == 0` finds a tier that is registered no more."""
    view = FleetView(instances=[alive(stats("index"))], lost=[record("disk-tier", host="b")])
    text = text_of(view)
    assert value_of(text, "kvbm_up", kind="disk-tier", host="b", instance="0") == 0
    assert value_of(text, "kvbm_ready", kind="disk-tier", host="b", instance="0") == 0
    assert view.on_host("a").lost == []
    assert view.on_host("b").lost == view.lost


def test_what_each_size_of_slots_has_is_a_gauge() -> None:
    """Bytes and slabs by length, slabs by state, and what no block fills."""
    text = text_of(FleetView(instances=[alive(two_sizes())]))
    labels = {"tier": "host", "service": "host-tier", "host": "a", "instance": "0"}
    assert value_of(text, "kvbm_tier_occupancy_ratio", **labels) == 0.5
    assert value_of(text, "kvbm_tier_slabs", state="cut", **labels) == 3
    assert value_of(text, "kvbm_tier_waste_percent", **labels) == 12.5
    assert value_of(text, "kvbm_tier_size_slabs", slot_bytes="100", **labels) == 2
    assert value_of(text, "kvbm_tier_size_used_bytes", slot_bytes="400", **labels) == 800


# --- views -----------------------------------------------------------------------------------


def test_everybody_ready_is_ready() -> None:
    """No reason against it."""
    assert collector.unready_reasons(EVERYBODY, KINDS) == []


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (FleetView(instances=EVERYBODY.instances, connected=False), "NATS is away"),
        (FleetView(instances=EVERYBODY.instances, registry_error="gone"), "registry: gone"),
        (FleetView(instances=EVERYBODY.instances[1:]), "index: no instance is registered"),
        (
            FleetView(instances=[*EVERYBODY.instances, silent("index", host="b")]),
            "index.b.0: no answer within 0.5 s",
        ),
        (
            FleetView(
                instances=[
                    *EVERYBODY.instances,
                    alive(stats("index", host="b", ready=False, reasons=["catching up", "slow"])),
                ]
            ),
            "index.b.0: catching up; slow",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_is_missing_is_said(view: FleetView, reason: str) -> None:
    """One sentence per fault, with the name of who is at fault."""
    assert collector.unready_reasons(view, KINDS) == [reason]


def test_what_a_ready_service_cannot_do_is_shown_with_it() -> None:
    """A host tier that serves its engines and reads no other host: the system is ready, too."""
    told = alive(stats("host-tier", host="b", reasons=["no blocks are read"]))
    view = FleetView(instances=[*EVERYBODY.instances, told])
    assert [one.reasons for one in collector.service_views(view)][-1] == ["no blocks are read"]
    assert [one.reasons for one in bounds_view(view)][-1] == ["no blocks are read"]
    assert collector.unready_reasons(view, KINDS) == []


def test_a_tier_is_shown_in_bytes_and_a_silent_one_as_down() -> None:
    """Slots become bytes and occupancy; a silent tier is shown as down, not left out."""
    tier = tier_stats("host-tier", used=3, total=4, leases=1, figures={"host_cache_hit_rate": 0.25})
    up, down = collector.tier_views(
        FleetView(instances=[alive(tier), silent("disk-tier")]), Rates()
    )
    assert (up.bytes_total, up.bytes_used, up.occupancy, up.hit_rate) == (400, 300, 0.75, 0.25)
    assert up.slots["reset"] == 1
    assert (down.tier, down.up, down.ready, down.slots) == ("disk", False, False, {})


def test_the_hit_rate_of_a_lower_tier_is_what_the_host_tiers_beside_it_say() -> None:
    figures = {"disk_cache_hit_rate": 0.5, "lookups_windowed": 4}
    others = {"disk_cache_hit_rate": 0.25, "lookups_windowed": 4}
    here = alive(tier_stats("host-tier", used=0, total=1, figures=figures))
    disk = alive(tier_stats("disk-tier", used=0, total=1))
    elsewhere = alive(tier_stats("host-tier", used=0, total=1, host="b", figures=others))
    views = collector.tier_views(FleetView(instances=[here, disk, elsewhere]), Rates())
    assert {(one.host, one.tier): one.hit_rate for one in views}[disk.record.host, "disk"] == 0.5


def test_a_tier_with_two_sizes_of_slots_is_shown_in_bytes() -> None:
    """Used are 7 slots of 100 and 2 of 400 bytes; their blocks have 1,200 of these 1,500 bytes."""
    (tier,) = collector.tier_views(FleetView(instances=[alive(two_sizes())]), Rates())
    assert (tier.bytes_total, tier.bytes_used, tier.occupancy) == (3_000, 1_500, 0.5)
    assert tier.fragmentation == pytest.approx(0.2)
    assert tier.waste_percent == 12.5
    assert (tier.slab_bytes, tier.slabs["cut"]) == (1_000, 3)
    assert [(one.slot_bytes, one.slots_used, one.bytes_used) for one in tier.sizes] == [
        (100, 7, 700), (400, 2, 800)
    ]  # fmt: skip


def test_the_status_has_the_sizes_of_all_instances_together() -> None:
    """Two host tiers: what has one length is one row, the shortest first."""
    view = FleetView(instances=[alive(two_sizes()), alive(two_sizes(host="b"))])
    status = collector.status_view(view, Totals(), Rates(), expected=(), version="1")
    (host,) = status.tiers
    assert (host.occupancy, host.bytes_used) == (0.5, 3_000)
    assert [(one.slot_bytes, one.slabs, one.bytes_used) for one in host.sizes] == [
        (100, 4, 1_400), (400, 2, 1_600)
    ]  # fmt: skip


def test_a_tier_without_slots_yet_is_empty_not_an_error() -> None:
    """Before the first engine has said how large its blocks are."""
    (tier,) = collector.tier_views(
        FleetView(instances=[alive(stats("host-tier", tier="host", slots={"total": 0}))]),
        Rates(),
    )
    assert (tier.occupancy, tier.bytes_total) == (0.0, 0)


def test_the_status_counts_by_kind_and_medium() -> None:
    """Counts by kind and medium, expected kinds first, engines and workers told apart."""
    view = FleetView(
        instances=[
            alive(tier_stats("host-tier", used=1, total=4, workers=[WORKER])),
            alive(tier_stats("host-tier", used=3, total=4, host="b")),
            silent("disk-tier"),
            alive(stats("extra")),
        ]
    )
    status = collector.status_view(
        view, Totals(), Rates(), expected=("host-tier", "index"), version="1"
    )
    assert [one.kind for one in status.services] == ["host-tier", "index", "disk-tier", "extra"]
    by_kind = {one.kind: (one.expected, one.instances, one.up) for one in status.services}
    assert by_kind["host-tier"] == (True, 2, 2)
    assert by_kind["index"] == (True, 0, 0)
    assert by_kind["disk-tier"] == (False, 1, 0)
    host, disk = status.tiers
    assert (host.tier, host.instances, host.slots_used, host.occupancy) == ("host", 2, 4, 0.5)
    assert (disk.tier, disk.bytes_total) == ("disk", 0)
    assert (status.ready, status.engines, status.workers) == (False, 1, 1)
    assert status.passing_through == []


def test_an_engine_that_passes_through_is_no_attached_worker() -> None:
    """Goal: its reason is in the status, and it counts among the engines alone."""
    view = FleetView(
        instances=[
            alive(tier_stats("host-tier", used=1, total=4, workers=[WORKER])),
            alive(stats("consolidator", workers=[PASSING])),
        ]
    )
    status = collector.status_view(view, Totals(), Rates(), expected=(), version="1")
    assert (status.engines, status.workers) == (2, 1)
    assert status.passing_through == ["vllm-1 on a computes without a cache: prefix caching is off"]
    _, passing = collector.worker_views(view)
    assert (passing.host_tier, passing.passes_through) == ("", "prefix caching is off")


def test_worker_and_service_views() -> None:
    """Each worker with its host tier; each service with what it says."""
    view = FleetView(
        instances=[
            alive(tier_stats("host-tier", used=0, total=4, workers=[WORKER])),
            alive(stats("index", positions={"host-tier-0": [7, 9]})),
            silent("disk-tier"),
        ]
    )
    (worker,) = collector.worker_views(view)
    assert (worker.host, worker.host_tier, worker.model) == ("a", "0", "test")
    assert worker.namespace == WORKER.namespace.digest.hex()
    question = msgspec.convert(worker.namespace_fields, Namespace)
    assert question == WORKER.namespace, "a question can have them"
    _, index, down = collector.service_views(view)
    assert index.positions == {"host-tier-0": [7, 9]}
    assert (down.up, down.reasons) == (False, ["no answer within 0.5 s"])
