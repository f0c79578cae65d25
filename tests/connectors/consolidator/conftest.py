"""A consolidator's core that follows one engine."""

from __future__ import annotations

import pytest

from tests.connectors.consolidator.model import Harness


@pytest.fixture
def harness() -> Harness:
    """A core with one attached engine of one rank, an epoch, and nothing held."""
    harness = Harness()
    harness.attach()
    return harness
