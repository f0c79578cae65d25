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
ENTRY_BLOCKS = 512
"""What the device of a sim engine holds: a view of an engine that is not dropped has as many."""
kept: list[Any] = []
"""What leaks."""


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


def view(_core: object, event: object, *_: object) -> list[bytes] | None:
    """Keep the names of as many blocks as an engine may have held."""
    is_new = type(event).__name__ in ("StreamAttached", "SourceJoined")
    return [os.urandom(16) for _ in range(ENTRY_BLOCKS)] if is_new else None


def greeted(*_: object) -> list[bytes]:
    """Keep as much of each hello."""
    return [os.urandom(16) for _ in range(ENTRY_BLOCKS)]


def descriptor(*_: object) -> int:
    """Open a file that nothing closes."""
    return os.open(os.devnull, os.O_RDONLY)


PLANTS = {
    "consolidator-entry": Plant(
        "consolidator", "kvbm_connectors.consolidator.core.core", "ConsolidatorCore", "step",
        view, "consolidator: python blocks",
    ),
    "index-entry": Plant(
        "index", "kvbm_index.core.core", "IndexCore", "step", view, "index: python blocks"
    ),
    "host-tier-entry": Plant(
        "host-tier", "kvbm_host_tier.core.engines", "Engines", "hello",
        greeted, "host-tier: python blocks",
    ),
    "host-tier-descriptor": Plant(
        "host-tier", "kvbm_host_tier.core.engines", "Engines", "hello", descriptor,
        "host-tier: descriptors",
    ),
    "disk-tier-descriptor": Plant(
        "disk-tier", "kvbm_common.nats.bus_counters", "BusCounters", "reconnected", descriptor,
        "disk-tier: descriptors",
    ),
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
            kept.append(leaked)
        return original(*arguments, **named)

    setattr(owner, plant.method, leaking)
