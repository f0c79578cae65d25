"""The plan of a seed: how large everything is, and what may go wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Transfer = Literal["pull", "load", "read", "write"]
"""Device to arena, arena to device, disk to arena, arena to disk."""
TRANSFERS: tuple[Transfer, ...] = get_args(Transfer)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drawn before the start: sizes, and what may go wrong (each seed another part)."""

    engines: int
    ranks: int
    conversations: int
    """How many an engine goes on with: few share much, many overflow every tier."""
    device_blocks: int
    host_slots: int
    disk_slots: int
    counted: bool
    """The arena's size is a number of blocks: it is made when the first engine says hello."""
    staging: bool
    filtered: bool
    verified: bool
    """Engines compare checksums after each load."""
    lease_ms: int
    loss: float
    duplicates: float
    delay_ms: float
    stalls: float
    """How often a message takes much longer than it should."""
    late: Mapping[Transfer, float]
    """… or a transfer of a kind."""
    outbox_max: int
    stream_max: int
    replay_batches: int
    faults: tuple[str, ...]
    fault_every_ms: float


FAULTS = (
    *("kill host", "kill disk", "kill index", "kill consolidator", "kill engine"),
    *("stop engine", "stop host", "stop disk", "power", "outage", "stream lost", "cut"),
    *("rot disk", "rot arena"),
)


def draw_plan(rng: random.Random) -> Plan:
    """Swarm testing: leaving faults out reaches states that all of them together never would."""
    counted = rng.random() < 0.2
    verified = rng.random() < 0.4
    faults = tuple(f for f in FAULTS if rng.random() < 0.4 and (verified or f != "rot arena"))
    rough = rng.random() < 0.6
    return Plan(
        engines=rng.choice((1, 2, 2)),
        ranks=rng.choice((1, 1, 2)),
        conversations=rng.choice((3, 6, 12)),
        device_blocks=rng.randint(16, 36),
        host_slots=rng.choice((rng.randint(8, 30), rng.randint(30, 80))),
        disk_slots=rng.randint(10, 90),
        counted=counted,
        staging=not counted and rng.random() < 0.2,
        filtered=rng.random() < 0.2,
        verified=verified,
        lease_ms=rng.choice((800, 2_000, 5_000)),
        loss=rng.choice((0.002, 0.02)) if rough else 0.0,
        duplicates=rng.choice((0.0, 0.05)) if rough else 0.0,
        delay_ms=rng.choice((0.5, 3.0, 20.0)),
        stalls=rng.choice((0.0, 0.01, 0.05)) if rough else 0.0,
        late={kind: rng.choice((0.0, 0.05, 0.4)) for kind in TRANSFERS},
        outbox_max=rng.choice((8, 10_000)),
        stream_max=rng.choice((20, 10_000)),
        replay_batches=rng.choice((5, 10_000, 10_000)),
        faults=faults,
        fault_every_ms=rng.choice((700.0, 2_500.0)),
    )
