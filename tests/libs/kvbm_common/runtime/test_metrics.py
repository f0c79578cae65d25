"""A process's metrics: prometheus_client's, what cores have counted, and the form that travels."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.runtime.metrics import (
    Metrics,
    TransferFigures,
    gauge_of,
    metrics_of_counts,
    metrics_of_gauges,
)
from kvbm_common.wire.metrics import Family, MetricsSnapshot, Sample
from prometheus_client import generate_latest


def test_a_series_that_was_never_touched_is_0() -> None:
    metrics = Metrics()
    blocks = metrics.counter("kvbm_blocks_total", "Blocks.", labels=("path",))
    blocks.labels("d2h").inc(3)
    assert metrics.value("kvbm_blocks_total", path="d2h") == 3
    assert metrics.value("kvbm_blocks_total", path="x") == 0


def test_declaring_again_gives_the_same_metric() -> None:
    """A bus for questions and one for events count together; another type or label is a mistake."""
    metrics = Metrics()
    metrics.counter("kvbm_x_total", "X.").inc(2)
    assert metrics.counter("kvbm_x_total", "X.") is metrics.counter("kvbm_x_total", "X.")
    with pytest.raises(AssertionError):
        metrics.gauge("kvbm_x_total", "X.")
    with pytest.raises(AssertionError):
        metrics.counter("kvbm_x_total", "X.", labels=("reason",))


def test_a_histogram_travels_by_bucket() -> None:
    """Its bounds are inclusive; each bucket counts for itself, the last one above all bounds."""
    metrics = Metrics()
    seconds = metrics.histogram("kvbm_seconds", "S.", labels=("path",), bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        seconds.labels("d2h").observe(value)
    seconds.labels("h2d").observe(2.5)
    [family] = metrics.families()
    assert family == Family(
        "kvbm_seconds",
        "histogram",
        "S.",
        [Sample({"path": "d2h"}, 12.0, [2, 1, 1]), Sample({"path": "h2d"}, 2.5, [0, 0, 1])],
        [1.0, 2.0],
    )


def test_bounds_survive_prometheus_own_notation() -> None:
    """It writes 4 MiB as 4.194304e+06."""
    metrics = Metrics()
    TransferFigures(metrics).observe("d2h", 0.5, 4 << 20)
    families = {one.name: one for one in metrics.families()}
    assert families["kvbm_transfer_bytes"].bucket_bounds == [4096.0 * 4**n for n in range(10)]
    assert families["kvbm_transfer_bytes"].samples[0].bucket_counts[5] == 1


def test_snapshot_travels_as_json() -> None:
    metrics = Metrics()
    metrics.counter("kvbm_x_total", "X.", labels=("reason",)).labels("full").inc()
    metrics.gauge("kvbm_depth", "D.").set(7)
    metrics.histogram("kvbm_seconds", "S.").observe(0.2)
    snapshot = MetricsSnapshot("index", "h", "0", 1, metrics.families())
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=MetricsSnapshot)
    assert again == snapshot
    assert [family.kind for family in again.families] == ["counter", "gauge", "histogram"]


def test_a_counter_travels_under_its_name_with_total() -> None:
    """However it was declared."""
    metrics = Metrics()
    metrics.counter("kvbm_x_total", "X.")
    metrics.counter("kvbm_y", "Y.")
    assert [one.name for one in metrics.families()] == ["kvbm_x_total", "kvbm_y_total"]


def test_a_cores_counts_are_counters_by_reason() -> None:
    counts = {"dropped_total.late": 2, "dropped_total.full": 1, "bytes.read": 4096, "lookups": 3}
    found = {
        one.name: {tuple(sample.labels.items()): sample.value for sample in one.samples}
        for one in metrics_of_counts(counts, label_names={"bytes": "direction"})
    }
    assert found == {
        "kvbm_dropped": {(("reason", "late"),): 2, (("reason", "full"),): 1},
        "kvbm_bytes": {(("direction", "read"),): 4096},
        "kvbm_lookups": {(): 3},
    }


def test_what_core_and_shell_count_under_one_name_is_one_metric() -> None:
    """Twice in a page, a metric makes Prometheus refuse all of it."""
    metrics = Metrics()
    metrics.counter("kvbm_dropped_total", "Dropped.", labels=("reason",)).labels("full").inc()
    metrics.include(lambda: metrics_of_counts({"dropped_total.late": 2}))
    metrics.include(lambda: [*metrics_of_gauges({"depth": 1.0}), gauge_of("kvbm_x", "X.", 2)])
    [dropped, depth, x] = metrics.families()
    assert [one.value for one in dropped.samples] == [1, 2]
    assert (depth.name, x.name) == ("kvbm_depth", "kvbm_x")


def test_no_series_says_when_it_was_created() -> None:
    """Metrics gain no names by the library."""
    metrics = Metrics()
    metrics.counter("kvbm_x_total", "X.").inc()
    metrics.histogram("kvbm_seconds", "S.").observe(1)
    assert b"_created" not in generate_latest(metrics.registry)
