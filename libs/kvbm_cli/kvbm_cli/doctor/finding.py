"""Findings: how the doctor found one thing, and what to change about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "better", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    advice: str = ""
    """What to change; empty when nothing needs to be."""
