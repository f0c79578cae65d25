"""Offers: device blocks that the engine holds until the host tier has read them, or gives up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvbm_common.tier.machine import Machine
from kvbm_common.wire.local import Pulled

from kvbm_connectors.core.messages import ConnectorLimits, OfferEnded, OfferRun
from kvbm_connectors.core.offered_lately import OfferedLately
from kvbm_connectors.core.outbox import Outbox


class OfferState(Enum):
    """The one state of an offer: what has ended is forgotten."""

    HELD = "held"


OFFER = Machine(
    "connector's offer",
    {
        (None, "offered"): OfferState.HELD,
        (OfferState.HELD, "pulled"): None,
        (OfferState.HELD, "revoked"): None,
        (OfferState.HELD, "deadline"): None,
        (OfferState.HELD, "host tier gone"): None,
    },
)


@dataclass(slots=True)
class OfferOut:
    """An offer whose blocks the engine holds."""

    state: OfferState
    deadline_ms: int


class Offers:
    """All offers that are out."""

    def __init__(self, outbox: Outbox, limits: ConnectorLimits, counts: Counter[str]) -> None:
        self._outbox, self._limits, self._counts = outbox, limits, counts
        self._offers: dict[int, OfferOut] = {}
        self.lately = OfferedLately(limits.offer_deadline_ms + limits.answer_margin_ms)

    def __len__(self) -> int:
        return len(self._offers)

    def offer(
        self, runs: Sequence[OfferRun], now_ms: int, *, priority: int, namespace: bytes = b""
    ) -> int | None:
        """Offer device blocks; None: too many offers are out, so the engine holds nothing."""
        block_count = sum(len(run.hashes) for run in runs)
        assert all(len(run.hashes) == len(run.blocks) for run in runs), "a block without its hash"
        if len(self._offers) >= self._limits.offers_max:
            self._counts["offers_dropped_busy"] += block_count
            return None
        offer, within_ms = self._outbox.new_id(), self._limits.offer_deadline_ms
        assert offer not in self._offers, f"offer {offer} is out already"
        self._outbox.offer(
            offer, runs, deadline_ms=within_ms, priority=priority, namespace=namespace
        )
        for run in runs:
            self.lately.add(run.hashes)
        self._offers[offer] = OfferOut(OFFER.next(None, "offered"), now_ms + within_ms)
        self._counts["offered_blocks"] += block_count
        assert len(self._offers) <= self._limits.offers_max, len(self._offers)
        return offer

    def pulled(self, pulled: Pulled) -> None:
        """End an offer that the host tier has read; say whether the blocks were held until now."""
        held = pulled.offer in self._offers
        if pulled.confirm:
            self._outbox.confirm(pulled.offer, held=held)
        if held:
            reason = pulled.reason or "pulled"
            self._end(pulled.offer, "pulled", reason, pulled.pulled, complete=not pulled.failed)

    def revoke(self, offer: int, reason: str) -> None:
        """End an offer whose blocks the engine reuses; one that has ended stays ended."""
        assert reason, f"offer {offer} is revoked without a reason"
        if offer in self._offers:
            self._end(offer, "revoked", reason)

    def end_all(self, reason: str) -> None:
        """End every offer: the host tier that may read them is gone."""
        for offer in list(self._offers):
            self._end(offer, "host tier gone", reason)
        assert not self._offers, f"offers outlive their host tier: {reason}"

    def tick(self, now_ms: int) -> None:
        """End the offers whose deadline has passed."""
        self.lately.tick(now_ms)
        for offer in [o for o, out in self._offers.items() if now_ms >= out.deadline_ms]:
            self._end(offer, "deadline", "deadline")

    def _end(
        self, offer: int, event: str, reason: str, stored: int = 0, *, complete: bool = False
    ) -> None:
        assert offer in self._offers, f"offer {offer} is over: {event}"
        assert reason, f"offer {offer} ends without a reason"
        self._move(offer, event)
        self._counts[f"offers_ended.{reason}"] += 1
        self._counts["offload_blocks"] += stored
        self._outbox.offer_ended(OfferEnded(offer, stored, complete))

    def _move(self, offer: int, event: str) -> None:
        """Forget an offer: every event ends it."""
        OFFER.end(self._offers.pop(offer).state, event, f"offer {offer}")

    def check(self) -> None:
        """Assert every invariant of the offers."""
        assert len(self._offers) <= self._limits.offers_max
