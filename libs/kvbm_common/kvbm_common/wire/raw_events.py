"""Raw events: `stored` and `removed` with hashes as bytes, as a source has them in memory.

Packed events carry raw hashes as well. A source with many blocks hands raw events to its publisher;
hex digits are written where an event leaves as JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.wire.events import Cleared, Event, Removed, Stored, Tier, run_of

RawRun = tuple[SequenceHash, list[SequenceHash]]
"""A parent, and blocks that follow it one after the other."""


class _RawEnvelope(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of both kinds, under the names that they have in JSON."""

    host: str
    source: str
    tier: Tier
    epoch: int
    seq: int
    ts_ms: int
    rank: int = 0
    group: int = 0
    namespace: str
    """Digest in hex."""


class RawStored(_RawEnvelope, frozen=True, kw_only=True, tag="stored"):
    """`events.Stored` with raw hashes; no run is empty."""

    runs: list[RawRun]
    block_bytes: int = 0


class RawRemoved(_RawEnvelope, frozen=True, kw_only=True, tag="removed"):
    """`events.Removed` with raw hashes, at least one."""

    hashes: list[SequenceHash]
    reason: str = ""


RawEvent = RawStored | RawRemoved | Cleared
"""An event in memory; a `cleared` has no hashes."""


def as_json(event: Event | RawStored | RawRemoved) -> Event:
    """Return an event as it is in JSON."""
    if not isinstance(event, RawStored | RawRemoved):
        return event
    fields: dict[str, Any] = msgspec.structs.asdict(event)
    if isinstance(event, RawStored):
        return Stored(**fields | {"runs": [run_of(*run) for run in event.runs]})
    return Removed(**fields | {"hashes": hashes_to_hex(event.hashes)})
