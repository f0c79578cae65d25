"""The bounds of one service process: how full each is, as gauges with a closed set of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metric
from kvbm_common.wire.bounds import BOUNDS, DROPPED, REACH, SIZE, USED, Usage

OUTBOXES = ("outbox", "consolidated_outbox")
"""The bounds of a service's publishers, in the order in which they are declared."""
Usages = Mapping[str, Usage]
"""The bounds of a part of a service, by their names in `BOUNDS`."""


class Bounds:
    """Every bound of this process; each part declares its own."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], Usages]] = []

    def declare(self, usages: Callable[[], Usages]) -> None:
        """Have these bounds shown; they are asked for each time."""
        self._parts.append(usages)

    def declare_queues(self, loop: CoreLoop[Any, Any], *publishers: EventPublisher) -> None:
        """Have the queues of a service's shell shown: before its core and before NATS."""

        def usages() -> Usages:
            own = {"inbox": loop.usage()}
            for name, publisher in zip(OUTBOXES, publishers, strict=False):
                own[name] = publisher.usage()
            if publishers:
                own["outbox_bytes"] = publishers[0].bytes_usage()
            return own

        self.declare(usages)

    def usages(self) -> dict[str, Usage]:
        """Return every bound that has a size now."""
        found: dict[str, Usage] = {}
        for part in self._parts:
            for name, usage in part().items():
                assert name in BOUNDS, f"the bound {name} has no line in BOUNDS"
                assert name not in found, f"two parts declare the bound {name}"
                if usage.size > 0:
                    found[name] = usage
        return found

    def collect(self) -> list[Metric]:
        """Return the gauges and the counter of all bounds."""
        used = Metric(USED, "How much a bounded thing holds.", "gauge")
        size = Metric(SIZE, "How much a bounded thing may hold.", "gauge")
        dropped = Metric(
            DROPPED.removesuffix("_total"), "What a full thing has refused or forgotten.", "counter"
        )
        reach = Metric(REACH, "How far back a history reaches that has forgotten.", "gauge")
        for name, usage in self.usages().items():
            labels = {"bound": name, "kind": BOUNDS[name].kind}
            used.add_sample(USED, labels, usage.used)
            size.add_sample(SIZE, labels, usage.size)
            dropped.add_sample(DROPPED, labels, usage.dropped)
            if usage.reach_s is not None:
                reach.add_sample(REACH, labels, usage.reach_s)
        return [used, size, dropped, reach]
