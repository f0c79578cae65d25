"""The fleet view: all registered instances, and what each has answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbm_common.registry.records import ServiceRecord
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import StatsReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One registered instance and what it has answered."""

    record: ServiceRecord
    stats: StatsReply | None = None
    snapshot: MetricsSnapshot | None = None
    up: bool = False
    """True: the service has answered, if only with an error."""
    failure: str = ""
    """The reason why there are no statistics; empty: there are some."""

    def __post_init__(self) -> None:
        """Assert that the fields tell one story of what was asked."""
        assert self.up or self.stats is None, f"{self.record.key} has figures, and is not up"
        assert not (self.failure and self.stats), f"{self.record.key} has figures: {self.failure}"

    @property
    def ready(self) -> bool:
        """Tell whether the service has answered, and serves."""
        return self.stats is not None and self.stats.ready

    @property
    def reasons(self) -> list[str]:
        """Return why it is not ready, or what it cannot do although it is."""
        if self.stats is not None:
            return list(self.stats.reasons)
        return [self.failure or "no answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """All registered instances at one moment, sorted by kind, host and instance."""

    instances: Sequence[Instance]
    connected: bool = True
    """True: this service reaches NATS."""
    registry_error: str = ""
    """The reason why `instances` may be out of date; empty: it is not."""
    lost: Sequence[ServiceRecord] = ()
    """Services that fell silent and are not registered any more."""

    def __post_init__(self) -> None:
        """Assert that no service is both registered and lost."""
        both = {one.key for one in self.lost} & {one.record.key for one in self.instances}
        assert not both, f"{sorted(both)} are registered, and lost"

    def on_host(self, host: str) -> FleetView:
        """Return the part that is on one host; all of it without a name."""
        here = [one for one in self.instances if host in ("", one.record.host)]
        return replace(self, instances=here, lost=[x for x in self.lost if host in ("", x.host)])
