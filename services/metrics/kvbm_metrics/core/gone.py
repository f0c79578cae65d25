"""Gone services: registered before and not any more; pages still show them in their place.

Pure: registry events go in with the time. A service that went silent is lost, and stays for a day
or until one of its name is back. One that left by itself stays ten minutes: it was scaled away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from kvbm_common.registry.records import ENGINE, Left, RegistryEvent, ServiceRecord
from kvbm_common.wire.bounds import Usage

from kvbm_metrics.core.recent_models import GoneView

GONE_MAX = 1024
"""Services that are remembered; the one gone for longest is forgotten first."""
LOST_AGE_S = 24 * 3600.0
LEFT_AGE_S = 600.0

RESTART_S = 30.0
"""A service that left by itself no longer ago may be starting again."""
KEEPS = ("disk-tier", "object-tier")
"""The services whose next life has the blocks of the one before."""

Manner = Literal["lost", "left"]
AGES_S: dict[Manner, float] = {"lost": LOST_AGE_S, "left": LEFT_AGE_S}


@dataclass(frozen=True, slots=True)
class Gone:
    """A service that is gone: how it went, and when."""

    record: ServiceRecord
    manner: Manner
    at_s: float


def gone_views(gone: Iterable[Gone], now_s: float) -> list[GoneView]:
    """Return the services that are gone, and for how long."""
    return [
        GoneView(
            kind=one.record.kind,
            host=one.record.host,
            instance=one.record.instance,
            manner=one.manner,
            gone_ms_ago=round(1000 * (now_s - one.at_s)),
        )
        for one in gone
    ]


class GoneServices:
    """The services that are gone, in the order in which they went."""

    def __init__(self) -> None:
        self._gone: dict[str, Gone] = {}

    def take(self, event: RegistryEvent, now_s: float) -> None:
        """Take an event of the registry: a service is back, or has gone."""
        record = event.record
        if record.kind == ENGINE:
            return
        self._gone.pop(record.key, None)
        if isinstance(event, Left):
            manner: Manner = "left" if event.reason == "deleted" else "lost"
            self._gone[record.key] = Gone(record, manner, now_s)
        else:
            assert record.key not in self._gone, f"{record.key} is there, and remembered as gone"
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._expire(now_s)

    def usage(self) -> Usage:
        """Return how full this history is."""
        assert len(self._gone) <= GONE_MAX, f"{len(self._gone)} services are remembered"
        return Usage(len(self._gone), GONE_MAX)

    def of(self, now_s: float) -> list[Gone]:
        """Return the services that are gone, sorted as the present ones are."""
        self._expire(now_s)
        return sorted(
            self._gone.values(),
            key=lambda one: (one.record.kind, one.record.host, one.record.instance),
        )

    def lost(self, now_s: float) -> list[ServiceRecord]:
        """Return the services that went silent and are not back, without those that left."""
        return [one.record for one in self.of(now_s) if one.manner == "lost"]

    def restarting(self, now_s: float) -> list[ServiceRecord]:
        """Return the tiers that left just now, and may come back with what they held."""
        return [one.record for one in self.of(now_s)
                if one.manner == "left" and one.record.kind in KEEPS
                and now_s - one.at_s < RESTART_S]  # fmt: skip

    def forget(self, lost: Collection[ServiceRecord]) -> int:
        """Forget these lives of services that went silent; return how many were still lost."""
        found = [one.record.key for one in self._gone.values()
                 if one.manner == "lost" and one.record in lost]  # fmt: skip
        for key in found:
            del self._gone[key]
        return len(found)

    def _expire(self, now_s: float) -> None:
        for key, one in list(self._gone.items()):
            assert one.at_s <= now_s, f"{key} went at {one.at_s} s, after {now_s} s"
            if now_s - one.at_s >= AGES_S[one.manner]:
                del self._gone[key]
