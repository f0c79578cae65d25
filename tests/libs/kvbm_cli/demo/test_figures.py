"""What tiers count during a run: what they had counted before it is not of the run."""

from __future__ import annotations

from kvbm_cli.demo.figures import TierFigures


def test_a_run_counts_what_came_after_its_beginning() -> None:
    before = TierFigures({"host-tier": {"a": 7.0, "b": 1.0}}, {"kvbm_transfer_bytes": {"d2h": 5.0}})
    now = TierFigures(
        {"host-tier": {"a": 9.0, "b": 1.0, "c": 3.0}, "disk-tier": {"d": 2.0}},
        {"kvbm_transfer_bytes": {"d2h": 8.0, "h2disk": 1.0}},
    )
    run = now.since(before)
    assert run.of("host-tier") == {"a": 2.0, "b": 0.0, "c": 3.0}
    assert run.of("disk-tier") == {"d": 2.0}
    assert run.of("object-tier") == {}
    assert run.transfers == {"kvbm_transfer_bytes": {"d2h": 3.0, "h2disk": 1.0}}


def test_a_tier_that_was_started_again_counts_nothing_below_zero() -> None:
    run = TierFigures({"host-tier": {"a": 2.0}}).since(TierFigures({"host-tier": {"a": 7.0}}))
    assert run.of("host-tier") == {"a": 0.0}


def test_rates_are_bytes_over_the_transfers_own_seconds() -> None:
    sums = {
        "kvbm_transfer_seconds": {"d2h": 2.0, "h2disk": 0.0},
        "kvbm_transfer_bytes": {"d2h": 8e9, "h2disk": 1e9, "disk2h": 1e9},
    }
    assert TierFigures({}, sums).gb_per_s() == {"d2h": 4.0}
