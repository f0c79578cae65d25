"""Counters that begin near the end of a type: what a run of weeks has counted to, from the start.

A plan that is aged begins each of them a few steps before one of the ends. Most are Python's own
integers, which have none: a reader in another language has, or a format. The others wrap, as the
table in docs/reliability.md says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import msgspec
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.leases import COUNT_MAX
from kvbm_connectors.core.core import ConnectorCore
from kvbm_disk_tier.core import effects as disk_tier
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.messages import StoreOpened
from kvbm_host_tier.core import messages as host_tier
from kvbm_host_tier.core.core import HostTierCore

from tests.sim.bus import Bus
from tests.sim.invariants import Announced
from tests.sim.world import World

Effect = TypeVar("Effect")
ENDS = (2**31, 2**32, 2**53)
"""Of numbers in C, and of numbers that a reader of JSON has exactly."""
ORDER_END = 2**63
"""The journal's order is unsigned: its upper half is no sign."""
STEPS = 40


def _near(world: World, *ends: int) -> int:
    return world.ages.choice(ends or ENDS) - world.ages.randint(1, STEPS)


def age_bus(bus: Bus, world: World) -> None:
    """Age the registry's epochs, also as leases have them, and the stream's positions."""
    if world.plan.aged:
        bus.registry._epoch = _near(world, 2**32, 2**53)
        bus.stream.first = _near(world)


def _age_announcer(announcer: Announcer, announced: Announced, world: World) -> int:
    """Have the events of a life begin at a large number, and return it."""
    assert announcer.seq == 1, "a life has said its first word"
    announcer.seq = _near(world)
    announced.aged(announcer.source, announcer.epoch, announcer.seq - 1)
    return announcer.seq


def _renumbered(effects: Sequence[Effect], publish: type[Any], seq: int) -> list[Effect]:
    return [
        publish(msgspec.structs.replace(one.event, seq=seq)) if isinstance(one, publish) else one
        for one in effects
    ]


def aged_host_tier(
    core: HostTierCore, announced: Announced, world: World
) -> Sequence[host_tier.Effect]:
    """Start a host tier, and return its first effects."""
    effects: Sequence[host_tier.Effect] = core.start()
    if world.plan.aged:
        parts = core.view._parts
        seq = _age_announcer(parts.announcer, announced, world)
        effects = _renumbered(effects, host_tier.Publish, seq)
        parts.leases.leases._count = _near(world, COUNT_MAX)
        parts.onboard._next_id, parts.fills._next_id = _near(world), _near(world)
        parts.peers._next_id, parts.offload._next_pull = _near(world), _near(world)
        parts.explain._number = _near(world)
    return effects


def age_slots(core: HostTierCore, world: World) -> None:
    """Age the generations of all slots that are there."""
    if world.plan.aged:
        generations = core.view._parts.held.table._generation
        generations[:] = [_near(world) for _ in generations]


def aged_lower_tier(
    core: DiskTierCore, announced: Announced, world: World
) -> Sequence[disk_tier.Effect]:
    """Start a disk tier or an object tier, and return its first effects."""
    effects: Sequence[disk_tier.Effect] = core.start()
    if world.plan.aged:
        seq = _age_announcer(core.inventory.announcer, announced, world)
        effects = _renumbered(effects, disk_tier.Publish, seq)
        core.inventory.leases._count = _near(world, COUNT_MAX)
        core.reads._arrivals = _near(world)
    return effects


def age_store(opened: StoreOpened, world: World) -> StoreOpened:
    """Return an empty store whose journal goes on near the end of its order."""
    if not world.plan.aged:
        return opened
    order = _near(world, ORDER_END)
    return replace(opened, replay=replace(opened.replay, next_order=order))


def age_connector(core: ConnectorCore, world: World) -> int:
    """Age a connector; return the number of its engine's first batch of events."""
    if not world.plan.aged:
        return 0
    core._outbox._ids = count(_near(world))
    return _near(world)
