"""A month: thirty days of the simulation's clock, in which most of the time nothing is asked.

    busy ── quiet ── all processes stopped for hours or days, and continued ── busy ── …

While it is busy there are faults as in any seed. The time of day steps by an hour, both ways, when
processes go on, and the monotonic clock stands still now and then. In half of the plans every
counter begins near the end of a type: see `ages.py`.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from tests.sim.ages import age_slots
from tests.sim.simulation import REST_PACE, Simulation

MONTH_MS = 30 * 24 * 3_600_000.0
WINDOWS = 5
BUSY_MS = 2_500.0
QUIET_MS = 2_000.0
"""Most of what was asked for ends in it."""
HOUR_US = 3_600_000_000
STILL_MS = 700.0


class Month(Simulation):
    """The world of one seed over a month."""

    def __init__(self, seed: int, **plan: Any) -> None:
        self._rng = random.Random(f"month of {seed}")
        aged = self._rng.random() < 0.5
        super().__init__(seed, **({"aged": aged} | plan))
        self.requests_end_ms = MONTH_MS
        cuts = sorted(self._rng.random() for _ in range(WINDOWS - 1))
        left_ms = MONTH_MS - WINDOWS * (BUSY_MS + QUIET_MS)
        edges = (0.0, *cuts, 1.0)
        self._pauses_ms = [(end - begin) * left_ms for begin, end in itertools.pairwise(edges)]

    def trouble(self) -> None:
        """Let the month go by."""
        world = self.world
        for pause_ms in self._pauses_ms:
            world.later(self._rng.uniform(0, BUSY_MS), lambda: world.stand_still(STILL_MS))
            world.run_until(world.now + BUSY_MS)
            self.is_quiet, world.pace = True, REST_PACE
            world.run_until(world.now + QUIET_MS)
            while world.bytes_until >= world.now:  # The medium moves them on: no process is asked.
                world.run_until(world.bytes_until + 1)
            world.stop_all(pause_ms)
            self.is_quiet, world.pace = False, 1.0
            ahead_us = self._rng.choice((-HOUR_US, 0, HOUR_US))
            world.wall_ahead_us += ahead_us
            world.marks[f"time of day: {ahead_us // HOUR_US} h"] += 1
            for tier in self.cluster.host_tiers:
                if tier.up:
                    age_slots(tier.core, world)
