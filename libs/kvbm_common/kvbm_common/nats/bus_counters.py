"""Bus counters: what a connection to NATS has dropped, was refused, and how often it came back."""

from __future__ import annotations

from kvbm_common.runtime.metrics import Metrics


class BusCounters:
    """The counters of one connection."""

    def __init__(self, counters: Metrics) -> None:
        self._dropped = counters.counter(
            "kvbm_bus_dropped_total", "Messages dropped at the bus.", labels=("reason", "subject")
        )
        self._refused = counters.counter(
            "kvbm_bus_readers_refused_total",
            "Times that NATS refused to let this process read a stream.",
            labels=("stream", "code"),
        )
        self._reconnections = counters.counter(
            "kvbm_bus_reconnects_total", "Times that NATS came back."
        )

    def dropped(self, reason: str, subject: str) -> None:
        """Count a message on a subject, or on what `label_of` has made of one."""
        self._dropped.labels(reason=reason, subject=label_of(subject)).inc()

    def refused(self, stream: str, code: str) -> None:
        """Count a reader of a stream."""
        self._refused.labels(stream=stream, code=code).inc()

    def reconnected(self) -> None:
        """Count that NATS came back."""
        self._reconnections.inc()


def label_of(subject: str) -> str:
    """Return a subject as a label with few values: inboxes are all one."""
    return "_INBOX" if subject.startswith("_INBOX") else subject
