"""The text of `/metrics`, read by Prometheus's own parser: whatever is in it comes out again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.counters import Counters
from kvbm_metrics import exposition
from kvbm_metrics.collector import FleetView, Totals
from prometheus_client.parser import text_string_to_metric_families

from tests.services.metrics.samples import alive, snapshot, stats

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
NUMBERS = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 2**60))


def read(counters: Counters) -> dict[tuple[str, str], float]:
    """What a reader finds of an index that has counted this: by name and the label `what`."""
    view = FleetView(instances=[alive(stats("index"), snapshot(counters, "index"))])
    text = exposition.render(view, Totals(), version="1").decode()
    return {
        (sample.name, sample.labels.get("what", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.dictionaries(TEXTS, NUMBERS, min_size=1, max_size=5))
def test_labels_and_values_survive(values: dict[str, float]) -> None:
    """Quotes, backslashes, line ends; numbers that are none, or have no end."""
    counters = Counters()
    gauge = counters.gauge("kvbm_odd", "A line\nand a \\.", labels=("what",))
    for what, value in values.items():
        gauge.set(value, what=what)
    found = read(counters)
    for what, value in values.items():
        other = found["kvbm_odd", what]
        assert other == float(value) or (math.isnan(other) and math.isnan(value))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_a_histogram_is_cumulative(observed: list[float]) -> None:
    """Its buckets grow to its count, and its sum is that of what was observed."""
    counters = Counters()
    histogram = counters.histogram("kvbm_odd_seconds", "Some.", labels=("what",))
    for value in observed:
        histogram.observe(value, what="x")
    view = FleetView(instances=[alive(stats("index"), snapshot(counters, "index"))])
    text = exposition.render(view, Totals(), version="1").decode()
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
