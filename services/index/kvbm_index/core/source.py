"""A source as the index knows it: followed by (epoch, seq), and registered or not."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.follow import Followed

from kvbm_index.core.messages import AnyEvent, SourceKey


@dataclass(slots=True)
class Source(Followed[AnyEvent]):
    """One source of events: `follow.py` has the drawing of its states."""

    key: SourceKey
    registered: bool = False
    unregistered_since_ms: int = 0
