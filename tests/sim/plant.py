"""A planted bug: one small mistake, and how the checkers find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

WRONG_BYTES = "should hold|a checksum was needed"
"""What the checkers of content say."""
ONE_HOST = {"hosts": 1, "host_tiers": 1, "engines": (2,), "below": "disk", "vllm": False}
TWO_HOSTS = {"hosts": 2, "host_tiers": 1, "engines": (1, 1), "vllm": False}
TWO_SHARDS = {"hosts": 1, "host_tiers": 2, "engines": (3,), "vllm": False}
OBJECTS = {**ONE_HOST, "below": "object", "staging": False}
VLLM = {**ONE_HOST, "vllm": True}


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake, and what the checker says that finds it."""

    name: str
    sow: Callable[[pytest.MonkeyPatch], None]
    found_as: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What the world must do often, or the mistake seldom shows."""
    seed: int | None = None
    """One that has shown a mistake which few show: it is tried before all others."""

    def seeds(self, others: Iterable[int]) -> list[int]:
        """Return the seeds in which the mistake is looked for, in order."""
        return [*others] if self.seed is None else [self.seed, *others]
