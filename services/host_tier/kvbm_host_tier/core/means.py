"""The means of a part: the limits, the counters, and the way out for its effects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import Emit

COUNTS_MAX = 512
"""Counters of one host tier: some hundred are known, and a peer may invent reasons."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a part is given beside the other parts that it needs."""

    limits: HostTierLimits
    counts: Counter[str]
    """The counters that metrics show, by key."""
    emit: Emit


def reason_key(counts: Counter[str], family: str, reason: str) -> str:
    """Return the counter of a reason that a peer has given: beyond COUNTS_MAX one for all."""
    key = f"{family}_{reason}"
    return key if key in counts or len(counts) < COUNTS_MAX else f"{family}_other"
