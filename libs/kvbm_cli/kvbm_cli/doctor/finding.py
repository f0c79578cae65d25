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
    """Advice on what to change; empty: nothing needs to be changed."""
