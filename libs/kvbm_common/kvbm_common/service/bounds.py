"""The bounds of one service process: how full each is, as gauges with a closed set of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metric
from kvbm_common.wire.bounds import BOUNDS, DROPPED, REACH, SIZE, USED, Fill

OUTBOXES = ("outbox", "consolidated_outbox")
"""The bounds of a service's publishers, in the order in which they are declared."""
Fills = Mapping[str, Fill]
"""The bounds of a part of a service, by their names in `BOUNDS`."""


class Bounds:
    """Every bound of this process; each part declares its own."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], Fills]] = []

    def declare(self, fills: Callable[[], Fills]) -> None:
        """Have these bounds shown; they are asked for each time."""
        self._parts.append(fills)

    def declare_queues(self, loop: CoreLoop[Any, Any], *publishers: EventPublisher) -> None:
        """Have the queues of a service's shell shown: before its core and before NATS."""

        def fills() -> Fills:
            own = {"inbox": loop.fill()}
            for name, publisher in zip(OUTBOXES, publishers, strict=False):
                own[name] = publisher.fill()
            if publishers:
                own["outbox_bytes"] = publishers[0].fill_bytes()
            return own

        self.declare(fills)

    def fills(self) -> dict[str, Fill]:
        """Return every bound that has a size now."""
        found: dict[str, Fill] = {}
        for part in self._parts:
            for name, fill in part().items():
                assert name in BOUNDS, f"the bound {name} has no line in BOUNDS"
                assert name not in found, f"two parts declare the bound {name}"
                if fill.size > 0:
                    found[name] = fill
        return found

    def collect(self) -> list[Metric]:
        """Return the gauges and the counter of all bounds."""
        used = Metric(USED, "How much a bounded thing holds.", "gauge")
        size = Metric(SIZE, "How much a bounded thing may hold.", "gauge")
        dropped = Metric(
            DROPPED.removesuffix("_total"), "What a full thing has refused or forgotten.", "counter"
        )
        reach = Metric(REACH, "How far back a history reaches that has forgotten.", "gauge")
        for name, fill in self.fills().items():
            labels = {"bound": name, "kind": BOUNDS[name].kind}
            used.add_sample(USED, labels, fill.used)
            size.add_sample(SIZE, labels, fill.size)
            dropped.add_sample(DROPPED, labels, fill.dropped)
            if fill.reach_s is not None:
                reach.add_sample(REACH, labels, fill.reach_s)
        return [used, size, dropped, reach]
