"""The manual page of the settings."""

from __future__ import annotations

from pathlib import Path

from kvbm_common.config import manual

MANUAL = Path(__file__).parents[4] / "docs" / "configuration.md"


def test_manual_is_current() -> None:
    """Goal: docs/configuration.md is what `python -m kvbm_common.config.manual` prints."""
    assert MANUAL.read_text() == manual.render()
