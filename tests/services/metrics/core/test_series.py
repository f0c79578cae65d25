"""The text of `/metrics`, read by Prometheus's own parser: whatever is in it comes out again."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.runtime.metrics import Metrics, TransferFigures
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.kvbm_totals import Totals
from prometheus_client.parser import text_string_to_metric_families

from tests.services.metrics.samples import (
    alive,
    counted,
    page_of,
    silent,
    snapshot,
    stats,
    tier_stats,
)

GOLDEN = Path(__file__).parents[3] / "golden/metrics/page.txt"
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="no promtool here (Debian: apt-get install prometheus)"
)

# All that UTF-8 can say; to name the codec has Hypothesis try each character of Unicode first.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)
NUMBERS = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 2**60))


def read(counters: Metrics) -> dict[tuple[str, str], float]:
    """What a reader finds of an index that has counted this: by name and the label `what`."""
    view = FleetView(instances=[alive(stats("index"), snapshot(counters, "index"))])
    text = page_of(view)
    return {
        (sample.name, sample.labels.get("what", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.dictionaries(TEXTS, NUMBERS, min_size=1, max_size=5))
def test_labels_and_values_survive(values: dict[str, float]) -> None:
    """Quotes, backslashes, line ends; NaN and infinities."""
    counters = Metrics()
    gauge = counters.gauge("kvbm_odd", "A line\nand a \\.", labels=("what",))
    for what, value in values.items():
        gauge.labels(what).set(value)
    found = read(counters)
    for what, value in values.items():
        other = found["kvbm_odd", what]
        assert other == float(value) or (math.isnan(other) and math.isnan(value))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_a_histogram_is_cumulative(observed: list[float]) -> None:
    """Its buckets grow to its count, and its sum is that of what was observed."""
    counters = Metrics()
    histogram = counters.histogram("kvbm_odd_seconds", "Some.", labels=("what",))
    for value in observed:
        histogram.labels("x").observe(value)
    view = FleetView(instances=[alive(stats("index"), snapshot(counters, "index"))])
    text = page_of(view)
    [family] = [
        one for one in text_string_to_metric_families(text) if one.name == "kvbm_odd_seconds"
    ]
    buckets = [one for one in family.samples if one.name.endswith("_bucket")]
    for bucket in buckets:
        bound = float(bucket.labels["le"])
        assert bucket.value == sum(value <= bound for value in observed)
    assert buckets[-1].labels["le"] == "+Inf"
    assert read(counters)["kvbm_odd_seconds_count", "x"] == len(observed)
    assert math.isclose(read(counters)["kvbm_odd_seconds_sum", "x"], sum(observed))


def small_fleet() -> FleetView:
    """A host tier that has counted one of each type, a starting disk tier, a silent index."""
    counters = Metrics()
    counters.counter("kvbm_evictions", "Evictions.", labels=("reason",)).labels("room").inc(2)
    counters.counter("kvbm_matched_tokens", "Tokens.").inc(64)
    counters.gauge("kvbm_odd", 'A "line"\nand a \\.', labels=("what",)).labels('a"b\\\n').set(1.5)
    TransferFigures(counters).observe("d2h", 0.002, 4 << 20)
    figures = {"host_cache_hit_rate": 0.25, "lookups_windowed": 4}
    host_tier = tier_stats("host-tier", used=3, total=4, figures=figures, leases=1)
    return FleetView(
        instances=[
            alive(tier_stats("disk-tier", used=0, total=0, ready=False)),
            alive(host_tier, snapshot(counters, "host-tier")),
            silent("index"),
        ]
    )


def test_the_page_is_as_it_was() -> None:
    """Names, types, help, labels and their order: dashboards and alerts build on them."""
    view, totals = small_fleet(), Totals()
    totals.take(one.snapshot for one in view.instances if one.snapshot)
    assert page_of(view, totals) == GOLDEN.read_text()


def test_kvbms_counters_are_counters_under_their_very_names() -> None:
    """The library writes `_total` after the name of every counter; KVBM's have none."""
    totals = Totals()
    totals.take([counted("kvbm_matched_tokens", 5)])
    lines = page_of(FleetView(instances=[]), totals).splitlines()
    at = lines.index("kvbm_matched_tokens 5.0")
    assert lines[at - 1] == "# TYPE kvbm_matched_tokens counter"
    assert "untyped" not in "".join(lines)


@needs_promtool
def test_promtool_reads_the_page() -> None:
    """`promtool check metrics` ends with 1 where it cannot read, with 3 where it would rename."""
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page_of(small_fleet()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 3), done.stdout + done.stderr
