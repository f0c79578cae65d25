"""Readiness: why an index would not answer as it should, for its /readyz."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.nats.event_subscription import EventSubscription


@dataclass(slots=True)
class Readiness:
    """The progress of an index's first reading, and the subscription by which it reads on."""

    caught_up: bool = False
    registry_read: bool = False
    subscription: EventSubscription | None = None

    def reasons(self) -> list[str]:
        """Return why the index is not ready; empty: it is."""
        refused = self.subscription.refusal if self.subscription is not None else ""
        told = {
            "reading the event stream": not self.caught_up,
            "reading the registry": not self.registry_read,
            f"the event stream is refused: {refused}": refused != "",
        }
        return [reason for reason, holds in told.items() if holds]
