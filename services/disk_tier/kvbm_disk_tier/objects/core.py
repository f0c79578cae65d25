"""The object tier's core (G4): the disk tier's, over a store that others fill, too."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.wire.verbs import StatsReply

from kvbm_disk_tier.core import DiskTierCore
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.messages import Effect, Input, Tick
from kvbm_disk_tier.objects.listing import Listing
from kvbm_disk_tier.objects.messages import (
    ListingBegun,
    ListingEnded,
    ObjectInput,
    ObjectsListed,
)
from kvbm_disk_tier.tier import OBJECT, Limits


class ObjectTierCore(DiskTierCore):
    """One object tier instance in one life."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        frequency_filter: FrequencyFilter | None = None,
        limits: Limits | None = None,
        policy: str = "lru",
        ttl_ms: int = 0,
    ) -> None:
        super().__init__(
            host=host,
            instance=instance,
            epoch=epoch,
            frequency_filter=frequency_filter,
            limits=limits,
            policy=policy,
            kind=OBJECT,
        )
        self.listing = Listing(self.tier, ttl_ms=ttl_ms)

    def step(self, event: Input | ObjectInput, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        match event:
            case ListingBegun():
                self.listing.begun(now_ms)
            case ObjectsListed(objects):
                if self.listing.is_running and not self.tier.stopping:
                    self.listing.listed(objects, now_ms)
                    self.writes.found(found.block.hash for found in objects)
            case ListingEnded(complete):
                if self.listing.is_running and not self.tier.stopping:
                    self.listing.ended(complete=complete, now_ms=now_ms)
                    # What the bucket has is not put again; without a listing we do not wait longer.
                    self.tier.may_write = True
            case _:
                return super().step(event, now_ms)
        return super().step(Tick(), now_ms)  # Carries out what the listing has made possible.

    def statistics(self) -> StatsReply:
        """Figures for metrics and admin API."""
        stats = super().statistics()
        stats.figures["listing"] = float(self.listing.is_running)
        return stats

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        super().check()
        self.listing.check()
