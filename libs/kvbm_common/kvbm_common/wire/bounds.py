"""Bounds: what a service holds so much of and no more, how full each is, and what to change.

A *queue* is empty most of the time, and drops when it is full. A *table* refuses when it is full. A
*history* is full for most of its life: what counts is how far back it reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

BoundKind = Literal["queue", "table", "history"]
USED = "kvbm_bound_used"
SIZE = "kvbm_bound_size"
DROPPED = "kvbm_bound_dropped_total"
REACH = "kvbm_bound_reach_seconds"
"""The names of the gauges and the counter, each with the labels `bound` and `kind`."""


class Usage(NamedTuple):
    """The present use of one bound."""

    used: float
    size: float
    dropped: int = 0
    """Refused or dropped since the service began; of a history: forgotten."""
    reach_s: float | None = None
    """The age of a history's oldest entry, in seconds; None: it has forgotten nothing, or its
    entries have no time."""


class Bound(NamedTuple):
    """One bounded thing: its kind, what it holds, and what an operator changes."""

    kind: BoundKind
    holds: str
    advice: str


_NATS = "Look at NATS: it is away, full or slow; consumers ask for a snapshot by themselves."
_SLOTS = "It follows the tier's slots: a larger tier, or smaller blocks, keep more."
HISTORIES = "Raise KVBM_HISTORY_ENTRIES; without it, they follow the tier's slots."
"""The advice for histories that explain misses."""
_LOAD = "Share the load among more instances, or find what is slow: kvbm_transfer_seconds."
_REPORT = "No setting changes it: report it, with the log."
BOUNDS: Mapping[str, Bound] = {
    "memory": Bound(
        "table", "bytes of anonymous memory", "Its log names the parts. Above the bound: report it."
    ),
    "descriptors": Bound("table", "open descriptors", "Raise LimitNOFILE, or ulimit -n."),
    "inbox": Bound("queue", "inputs that wait for the core", _LOAD),
    "outbox": Bound("queue", "messages that wait for NATS", _NATS),
    "outbox_bytes": Bound("queue", "bytes of messages that wait for NATS", _NATS),
    "consolidated_outbox": Bound("queue", "consolidated messages that wait for NATS", _NATS),
    "departures": Bound("history", "departures of blocks", HISTORIES),
    "departures_disk": Bound("history", "departures from disk", HISTORIES),
    "departures_object": Bound("history", "departures from the bucket", HISTORIES),
    "former_blocks": Bound("history", "blocks that were here once", _SLOTS),
    "first_blocks": Bound("history", "first blocks of prompts", HISTORIES),
    "explanations": Bound("history", "explained lookups", "Raise KVBM_EXPLAIN_REQUESTS."),
    "open_explanations": Bound(
        "queue", "misses that lower tiers are asked about", "Is the disk tier slow? kvbm status."
    ),
    "offers": Bound("queue", "offers of engines", "Raise DYN_KVBM_MAX_CONCURRENT_TRANSFERS."),
    "lookups": Bound("queue", "lookups that wait for blocks", "Lower KVBM_ONBOARD_DEADLINE_MS."),
    "pinned": Bound("table", "bytes that operators have pinned", "kvbm pins; kvbm unpin."),
    "hinted": Bound(
        "table", "bytes that hints of agents pin", "Shorter ttl, or KVBM_HINT_PIN_PERCENT."
    ),
    "awaited_demotions": Bound(
        "queue",
        "blocks that hints demote before they are here",
        "Fewer hints at once: beyond it, blocks leave in their turn.",
    ),
    "known_runs": Bound(
        "history",
        "stretches of prompts that were looked up",
        "No setting changes it: prompts beyond it are looked up block by block.",
    ),
    "diary": Bound("history", "blocks in the stories that a core tells", "No setting changes it."),
    "waiting_writes": Bound(
        "queue",
        "blocks that wait to be written",
        "A faster disk, a larger KVBM_DISK_WRITE_BUDGET_GB_PER_DAY, or the frequency filter.",
    ),
    "waiting_reads": Bound("queue", "fills that wait for the disk", _LOAD),
    "sights": Bound("history", "blocks that the frequency filter has seen", _SLOTS),
    "journal": Bound(
        "table",
        "records of the journal",
        "Its rewrite waits or fails: its log says why.",
    ),
    "sources": Bound("table", "sources of events", _REPORT),
    "buffered_events": Bound("queue", "events after a gap", "Is that source alive? kvbm status."),
    "event_stream": Bound("history", "bytes of the event stream", "Raise KVBM_EVENTS_GB."),
    "streams": Bound("table", "ranks of engines", "Fewer engines on this host."),
    "pending_batches": Bound("queue", "batches after a gap", "Is it alive? kvbm workers."),
    "orphan_blocks": Bound("queue", "blocks that wait for their parent", _REPORT),
    "jobs": Bound("history", "jobs of operators", _REPORT),
    "gone_services": Bound("history", "services that have gone", _REPORT),
}
"""Every bound of every service: the label values of the gauges, so there are no others."""
