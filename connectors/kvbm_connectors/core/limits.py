"""Limits of the connector's core, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvbm_common.config.settings import Settings


@dataclass(frozen=True, slots=True)
class ConnectorLimits:
    """Every bound of the core."""

    lease_ms: int = 5_000
    onboard_deadline_ms: int = 2_000
    answer_margin_ms: int = 500
    """How long after its deadline an answer may still be on its way."""
    offer_deadline_ms: int = 5_000
    offers_max: int = 256
    """Offers in flight; further blocks are not offered, and counted."""
    avoid_ms: int = 60_000
    avoid_max: int = 65_536

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what the configuration bounds; the rest by default."""
        return cls(
            lease_ms=settings.lease_ms,
            onboard_deadline_ms=settings.onboard_deadline_ms,
            offer_deadline_ms=settings.offer_deadline_ms,
        )
