"""20 drawn programs of SGLang's storage calls bring back no wrong page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.fuzz import site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = 20


def test_drawn_programs_load_no_wrong_page(tmp_path: Path) -> None:
    """Two engines, evictions, rot, kills, new weights: see `fuzz`. Most of it is not vacuous."""
    for made in site(tmp_path):
        for seed in range(PROGRAMS):
            made.run(seed)
        assert made.counts["pages loaded"] > 100
        assert made.counts["pages missed"] > 100
