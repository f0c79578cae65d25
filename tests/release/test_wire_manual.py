"""The table of operators' verbs in docs/wire.md."""

from __future__ import annotations

from pathlib import Path

from release import wire_manual

WIRE_MD = Path(__file__).parents[2] / "docs" / "wire.md"


def test_the_table_is_current() -> None:
    """Goal: docs/wire.md has the verbs as they are, with their routes and commands."""
    text = WIRE_MD.read_text()
    assert text == wire_manual.renewed(text)
    assert text.count("`kvbm resize`") == 1
