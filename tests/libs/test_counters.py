"""Counters, gauges, histograms, and the snapshot that travels."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.counters import Counters, MetricsSnapshot


def test_counter_counts_per_label_set() -> None:
    counters = Counters()
    blocks = counters.counter("kvbm_blocks_total", "Blocks.", labels=("path",))
    blocks.add(path="d2h")
    blocks.add(2, path="d2h")
    blocks.add(path="h2d")
    assert (blocks.value(path="d2h"), blocks.value(path="x"), blocks.total()) == (3, 0, 4)


def test_declaring_again_gives_the_same_metric() -> None:
    counters = Counters()
    counters.counter("kvbm_x_total", "X.").add(2)
    assert counters.counter("kvbm_x_total", "X.").value() == 2
    with pytest.raises(AssertionError):
        counters.gauge("kvbm_x_total", "X.")


def test_histogram_buckets_are_inclusive_above() -> None:
    seconds = Counters().histogram("kvbm_seconds", "S.", bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        seconds.observe(value)
    (sample,) = seconds.family().samples
    assert (sample.bucket_counts, sample.value, seconds.count()) == ([2, 1, 1], 12.0, 4)


def test_snapshot_travels_as_json() -> None:
    counters = Counters()
    counters.counter("kvbm_x_total", "X.", labels=("reason",)).add(reason="full")
    counters.gauge("kvbm_depth", "D.").set(7)
    counters.histogram("kvbm_seconds", "S.").observe(0.2)
    snapshot = MetricsSnapshot("index", "h", "0", 1, counters.families())
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=MetricsSnapshot)
    assert again == snapshot
    assert [family.kind for family in again.families] == ["counter", "gauge", "histogram"]
