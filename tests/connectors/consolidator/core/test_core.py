"""The whole core of the consolidator: engines, consolidated stream and router streams together."""

from __future__ import annotations

from kvbm_common.wire.consolidator import Attach
from kvbm_common.wire.engine_events import EngineBatch
from kvbm_connectors.consolidator.core.ended_engines import ENDED_MAX
from kvbm_connectors.consolidator.core.messages import (
    EngineBatchesReceived,
    EpochGranted,
    StreamAttached,
    StreamKey,
    Tick,
)

from tests.connectors.consolidator.model import NAMESPACE, Harness, stored


def test_many_engines_that_are_lost_in_one_step_leave_in_order() -> None:
    """Goal: a host that loses all its engines at once, more than are remembered, goes on."""
    core = Harness().whole
    for number in range(ENDED_MAX + 2):
        engine, incarnation = f"sim-{number}", f"{number + 1:016x}"
        endpoint = f"ipc://{engine}"
        attached = Attach(engine=engine, incarnation=incarnation, endpoint=endpoint,
                          replay_endpoint="", rank=0, namespace=NAMESPACE)  # fmt: skip
        core.step(StreamAttached(attached, b"peer"), 0)
        core.step(EpochGranted(engine, number + 1, number + 1), 0)
        batch = EngineBatch(1.0, (stored((1, 2, 3, 4)),), 0)
        core.step(EngineBatchesReceived(StreamKey(engine, incarnation, 0), ((0, batch),), 0), 0)
    core.step(Tick(), 10_000_000)
    core.check()
