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
    GoneLost,
    ListingBegun,
    ListingEnded,
    ListingStalled,
    ObjectInput,
    ObjectsListed,
    RangeListed,
    SlotsCompared,
)

FIRST_LISTING_MS = 60_000
"""Writes wait no longer for a first look at what is stored: a large store takes hours."""


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
        self.listing = Listing(ttl_ms=ttl_ms, inventory=self.inventory, counts=self.counts)
        self.view = replace(self.view, extra=self._figures)
        self._first_begun_ms: int | None = None

    def _figures(self) -> dict[str, float]:
        return {
            "listing": float(self.listing.is_running),
            "listing_doubted_blocks": float(self.listing.doubted_count),
        }

    def step(self, event: Input | ObjectInput, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        if isinstance(event, ObjectInput):
            self._take_of_listing(event, now_ms)
            event = Tick()  # Carries out what the listing has made possible.
        if isinstance(event, Tick) and self._first_begun_ms is not None:
            begun_ms = self._first_begun_ms
            assert begun_ms <= now_ms, f"a listing began at {begun_ms} ms, it is {now_ms} ms"
            self.writes.may_begin |= now_ms >= self._first_begun_ms + FIRST_LISTING_MS
        return super().step(event, now_ms)

    def _take_of_listing(self, event: ObjectInput, now_ms: int) -> None:
        if self.inventory.stopped:
            return
        match event:
            case ListingBegun():
                if self._first_begun_ms is None:
                    self._first_begun_ms = now_ms
                self.listing.begun(event)
            case ObjectsListed(objects, number):
                self.listing.listed(objects, number, now_ms)
                self.pending.found(found.block.hash for found in objects)
            case RangeListed(number, is_whole):
                self.listing.range_listed(number, now_ms, is_whole=is_whole)
            case SlotsCompared(first, count):
                self.listing.compared(first, count)
            case ListingEnded():
                self.listing.ended()
                # What the store has is not put again.
                self.writes.may_begin = True
            case GoneLost(first, count):
                self.listing.lose_gone(first, count, now_ms)
            case ListingStalled():
                self.counts["listings_failed"] += 1
                self.writes.may_begin = True  # Without a listing we do not wait longer.
            case _:
                assert_never(event)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        super().check()
        self.listing.check()
