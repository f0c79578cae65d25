"""Harmless: the form of the tables of arguments and variables that change no KV bytes."""

from __future__ import annotations

from collections.abc import Mapping

Reasons = Mapping[str, str]
"""Names, separated by spaces, by the reason why they are harmless."""


def names_of(reasons: Reasons, prefix: str = "") -> frozenset[str]:
    """Return all names of a table, each below a prefix."""
    return frozenset(prefix + name for names in reasons.values() for name in names.split())
