"""Planted bugs of long runs: numbers that end, and clocks that step."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.leases import Lease, LeaseTable

from tests.sim.plant import ONE_HOST, WRONG_BYTES, Plant
from tests.sim.world import World


def wrap_onto_a_running_lease(patch: pytest.MonkeyPatch) -> None:
    """The number of a lease has three bits, and may be that of a lease that runs."""
    numbers = count()

    def planted(table: LeaseTable) -> int:
        return table._base + next(numbers) % 8 + 1

    patch.setattr(LeaseTable, "_free_id", planted)


def end_leases_by_the_time_of_day(patch: pytest.MonkeyPatch) -> None:
    """A lease's deadline is looked at on a clock that an operator sets."""
    worlds: list[World] = []
    made, expire = World.__init__, LeaseTable.expire

    def make(world: World, *arguments: Any, **plan: Any) -> None:
        made(world, *arguments, **plan)
        worlds.append(world)

    def planted(table: LeaseTable, now_ms: int) -> list[Lease]:
        return expire(table, now_ms + worlds[-1].wall_ahead_us // 1_000)

    patch.setattr(World, "__init__", make)
    patch.setattr(LeaseTable, "expire", planted)


def count_events_in_32_bits(patch: pytest.MonkeyPatch) -> None:
    """The event after number 2^32 - 1 has the number 0."""

    def planted(announcer: Announcer, name: str, value: int) -> None:
        object.__setattr__(announcer, name, value % 2**32 if name == "seq" else value)

    patch.setattr(Announcer, "__setattr__", planted)


PLANTS = (
    Plant(
        "a lease has the number of a running one", wrap_onto_a_running_lease,
        "has the id of another", ONE_HOST,
    ),
    Plant(
        "leases end by the time of day", end_leases_by_the_time_of_day,
        f"leases left|pinned|{WRONG_BYTES}", ONE_HOST, seed=1_014,
    ),
    Plant(
        "events are counted in 32 bits", count_events_in_32_bits,
        "published", ONE_HOST,
    ),
)  # fmt: skip
