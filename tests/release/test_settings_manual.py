"""The manual page of the settings."""

from __future__ import annotations

from pathlib import Path

from release import settings_manual

MANUAL = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_manual_is_current() -> None:
    """Goal: docs/configuration.md is what `python -m release.settings_manual` prints."""
    assert MANUAL.read_text() == settings_manual.render()
