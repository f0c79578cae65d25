"""The object tier's core (G4): the disk tier's, over a store that others fill, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import Effect
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import OBJECT, DiskTierLimits
from kvbm_disk_tier.core.messages import Input, Tick
from kvbm_disk_tier.objects.core.listing import Listing
from kvbm_disk_tier.objects.core.messages import (
    ListingBegun,
    ListingEnded,
    ObjectInput,
    ObjectsListed,
)


class ObjectTierCore(DiskTierCore):
    """One object tier instance in one life."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        frequency_filter: FrequencyFilter | None = None,
        limits: DiskTierLimits | None = None,
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
        self.listing = Listing(
            ttl_ms=ttl_ms, inventory=self.inventory, journal=self.journal, counts=self.counts
        )
        self.view = replace(self.view, extra=lambda: {"listing": float(self.listing.is_running)})

    def step(self, event: Input | ObjectInput, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        if isinstance(event, ListingBegun | ObjectsListed | ListingEnded):
            self.inventory.now_ms = now_ms
            self._take_of_listing(event, now_ms)
            event = Tick()  # Carries out what the listing has made possible.
        return super().step(event, now_ms)

    def _take_of_listing(self, event: ObjectInput, now_ms: int) -> None:
        counts = self.listing.is_running and not self.announcements.stopped
        match event:
            case ListingBegun():
                self.listing.begun(now_ms)
            case ObjectsListed(objects):
                if counts:
                    self.listing.listed(objects, now_ms)
                    self.writes.pending.found(found.block.hash for found in objects)
            case ListingEnded(complete):
                if counts:
                    self.listing.ended(complete=complete, now_ms=now_ms)
                    # What the bucket has is not put again; without a listing we do not wait longer.
                    self.writes.may_begin = True
            case _:
                assert_never(event)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        super().check()
        self.listing.check()
