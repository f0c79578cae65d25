"""Plants: leaks that a soak must find, put into services by replacing methods of the product.

Only KVBM_SOAK_PLANT says which; the product does not know that variable.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE = "KVBM_SOAK_PLANT"
kept: list[Any] = []
"""What leaks: one entry for each engine, or one descriptor for each return of NATS."""
KEPT = f"{__name__}.kept"


@dataclass(frozen=True)
class Plant:
    """One leak: what a method of a service's class keeps of each call."""

    service: str
    module: str
    owner: str
    method: str
    leak: Callable[..., Any]
    """Called with the method's arguments; what it returns is kept."""
    red: str
    """What a soak must call red."""
    attribute: str = ""
    """Where the method's object keeps it, as a core would; a global of ours, if nowhere."""


def joined(_core: object, event: object, *_: object) -> bytes | None:
    """Keep a name for each engine whose events are followed."""
    is_new = type(event).__name__ in ("StreamAttached", "SourceJoined")
    return os.urandom(16) if is_new else None


def greeted(*_: object) -> bytes:
    """Keep a name for each hello."""
    return os.urandom(16)


def registered(_gone: object, event: Any, *_: object) -> bytes | None:
    """Keep a name for each engine that registers."""
    is_new = type(event).__name__ == "Joined" and event.record.kind == "engine"
    return os.urandom(16) if is_new else None


def descriptor(*_: object) -> int:
    """Open a file that nothing closes."""
    return os.open(os.devnull, os.O_RDONLY)


PLANTS = {
    "consolidator-entry": Plant(
        "consolidator", "kvbm_connectors.consolidator.core.core", "ConsolidatorCore", "step",
        joined, f"consolidator {KEPT}: entries",
    ),
    "index-entry": Plant(
        "index", "kvbm_index.core.core", "IndexCore", "step", joined, f"index {KEPT}: entries"
    ),
    "index-core-entry": Plant(
        "index", "kvbm_index.core.core", "IndexCore", "step", joined,
        "index IndexCore.planted: entries", attribute="planted",
    ),
    "host-tier-entry": Plant(
        "host-tier", "kvbm_host_tier.core.engines", "Engines", "hello",
        greeted, f"host-tier {KEPT}: entries",
    ),
    "metrics-entry": Plant(
        "metrics", "kvbm_metrics.core.gone", "GoneServices", "take",
        registered, f"metrics {KEPT}: entries",
    ),
    "host-tier-descriptor": Plant(
        "host-tier", "kvbm_host_tier.core.engines", "Engines", "hello", descriptor,
        "host-tier: descriptors",
    ),
    **{
        f"{service}-descriptor": Plant(
            service, "kvbm_common.nats.bus_counters", "BusCounters", "reconnected", descriptor,
            f"{service}: descriptors by NATS's returns",
        )
        for service in ("disk-tier", "object-tier")
    },
}  # fmt: skip


def plant_service(kind: str) -> None:
    """Put the leak that the environment names into this process, if it is of that service."""
    plant = PLANTS.get(os.environ.get(VARIABLE, ""))
    if plant is None or plant.service != kind:
        return
    owner = getattr(importlib.import_module(plant.module), plant.owner)
    original = getattr(owner, plant.method)

    def leaking(*arguments: Any, **named: Any) -> Any:
        leaked = plant.leak(*arguments)
        if leaked is not None:
            where = vars(arguments[0]).setdefault(plant.attribute, []) if plant.attribute else kept
            where.append(leaked)
        return original(*arguments, **named)

    setattr(owner, plant.method, leaking)
