"""A pytest plugin: state machines run last, shorter, and do not look for a smaller example.

Looking for one takes minutes, for each mutant that a state machine notices.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

EXAMPLES = 20


def pytest_sessionstart() -> None:
    """Choose the profile after tests/conftest.py has chosen its own, before a test is imported."""
    settings.register_profile(
        "mutants", deadline=None, database=None, derandomize=True,
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what is quick first: with -x most mutants need nothing else."""
    for item in items:
        case = getattr(item, "cls", None)
        if case is not None and hasattr(case, "settings"):
            case.settings = settings(case.settings, max_examples=EXAMPLES)
    items.sort(key=lambda item: hasattr(getattr(item, "cls", None), "settings"))
