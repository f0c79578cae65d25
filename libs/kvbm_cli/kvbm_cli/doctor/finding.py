"""What the doctor says of one thing: how it is, and what to change."""

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
