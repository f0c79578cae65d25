"""The frequency filter on a load of agents that pause: what they come back to is on disk."""

from __future__ import annotations

import pytest
from kvbm_disk_tier.core.frequency_filter import DECAY_STEP_MS

from benchmarks.admission import replay, timed
from benchmarks.eviction_loads import pausing_agents

MINUTE_MS = 60_000


@pytest.mark.slow
def test_agents_that_pause_for_half_an_hour_hit_their_blocks() -> None:
    """Goal: 1.5 times the hits of KVBM's ten minutes, a quarter of what no filter writes."""
    load = timed(pausing_agents(3, seed=1, pause_s=30 * 60, burst=0))
    ours, kvbm, unfiltered = (
        replay(load, step_ms, host=2_000, disk=20_000)
        for step_ms in (DECAY_STEP_MS, 10 * MINUTE_MS, None)
    )
    assert ours.hits > 1.5 * kvbm.hits
    assert ours.written < unfiltered.written / 4
