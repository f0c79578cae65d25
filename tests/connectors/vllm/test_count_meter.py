"""The count meter: what it tells, and when."""

from __future__ import annotations

from collections import Counter

from kvbm_connectors.vllm.count_meter import BUSY_EVERY_S, CountMeter


class Engine:
    """Counters, requests and a clock."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reads = 0
        self.is_busy = False
        self.now_s = 1.0
        self.meter = CountMeter(self.read, is_busy=lambda: self.is_busy, clock_s=lambda: self.now_s)

    def read(self) -> Counter[str]:
        self.reads += 1
        return self.counts


def test_what_was_added_is_told_once() -> None:
    engine = Engine()
    assert engine.meter.take() is None
    engine.counts["loads"] += 2
    engine.counts["lookups"] += 0
    assert engine.meter.take() == {"loads": 2}
    assert engine.meter.take() is None
    engine.counts["loads"] += 1
    assert engine.meter.take() == {"loads": 1}


def test_a_busy_engine_reads_its_counters_ten_times_a_second() -> None:
    engine = Engine()
    engine.is_busy = True
    engine.meter.take()
    engine.counts["loads"] += 1
    engine.now_s += BUSY_EVERY_S / 2
    assert (engine.meter.take(), engine.reads) == (None, 1)
    engine.now_s += BUSY_EVERY_S
    assert (engine.meter.take(), engine.reads) == ({"loads": 1}, 2)


def test_an_engine_that_becomes_idle_tells_at_once() -> None:
    """Goal: no step may follow that would tell the rest."""
    engine = Engine()
    engine.is_busy = True
    engine.meter.take()
    engine.counts["loads"] += 1
    engine.is_busy = False
    assert engine.meter.take() == {"loads": 1}
