"""The counters of an object store that several parts count with."""

from __future__ import annotations

from kvbm_common.runtime.metrics import Counter, Metrics


def requests_counter(counters: Metrics) -> Counter:
    """Return the counter of requests by kind, which the store bills.

    `get` and `put` are NIXL's, the others boto3's.
    """
    return counters.counter(
        "kvbm_object_requests_total", "Requests to the bucket.", labels=("request", "outcome")
    )


def listed_counter(counters: Metrics) -> Counter:
    """Return the counter of what listings name, and of what a directory leaves out."""
    return counters.counter(
        "kvbm_object_listed_total",
        "Objects named by listings: ours, foreign, or of a wrong size. Left out of a directory, "
        "each time: odd, neither objects nor their folders; unread: they cannot be read.",
        labels=("kind",),
    )
