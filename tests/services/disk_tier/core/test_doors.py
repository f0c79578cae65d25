"""The view of the disk tier's core: a shell asks its questions, and sees no part behind it."""

from __future__ import annotations

from kvbm_disk_tier.core.view import View

from tests.doors import VIEW, wrong_doors
from tests.test_doors import SHELLS

QUESTIONS = {
    "counts",
    "gauges",
    "statistics",
    "snapshot",
    "snapshot_pages",
    "fates",
    "usages",
    "idle",
    "slot_count",
}


def test_shells_ask_a_view_its_questions_only() -> None:
    """The view holds the parts of the core: the shell has its methods."""
    assert wrong_doors(SHELLS["disk and object tier"], QUESTIONS, VIEW) == []
    assert {name for name in vars(View) if callable(getattr(View, name)) and name[0] != "_"} == (
        QUESTIONS
    )
