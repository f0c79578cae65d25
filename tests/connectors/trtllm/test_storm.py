"""Drawn programs of an engine whose services fail: no wrong byte, no late step, nothing left."""

from __future__ import annotations

import pytest

from tests.connectors.trtllm.storm import SERVICES, TIERS, Storm
from tests.vllm.harness import live_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(10)


def test_an_engine_computes_right_while_its_services_fail() -> None:
    """Promises are kept, and every block comes free, whatever is killed or stands still."""
    promised = 0
    with live_stack(TIERS, SERVICES) as stack:
        for seed in SEEDS:
            storm = Storm(stack, seed)
            storm.run()
            promised += storm.counts["kept_blocks"]
    assert promised > 50
