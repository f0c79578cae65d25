"""The audit stream: each change is written with its outcome, whatever that is."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import RequestFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import AUDIT
from kvbm_common.service.audit import Audit
from kvbm_common.wire.admin import audit_codec

DEADLINE_S = 10.0


@pytest.mark.parametrize(
    ("error", "outcome", "reply"),
    [
        (None, "ok", "done"),
        (RequestFailed("pin_limit", "half is pinned"), "pin_limit", "pin_limit: half is pinned"),
        (ZeroDivisionError("secret"), "internal", "ZeroDivisionError"),
    ],
)
async def test_a_change_is_written_with_its_outcome(
    bus: Bus, error: Exception | None, outcome: str, reply: str
) -> None:
    """Goal: also one that ends in a mistake of ours, of which the text stays in the log."""

    async def change(_payload: bytes) -> bytes:
        if error is not None:
            raise error
        return b"done"

    audit = Audit(bus, kind="host-tier", host="h", instance="0", counters=bus.counters)
    handle = audit.audited("evict", change)
    if error is None:
        assert await handle(b'{"actor": "ada"}') == b"done"
    else:
        with pytest.raises(type(error)):
            await handle(b'{"actor": "ada"}')
    async with asyncio.timeout(DEADLINE_S):
        subscription = bus.event_subscription(start="all", subject=AUDIT.subjects[0], spec=AUDIT)
        async with subscription as batches:
            [message] = await anext(batches)
    entry = audit_codec.decode(message.payload)
    assert (entry.verb, entry.actor, entry.outcome, entry.reply) == ("evict", "ada", outcome, reply)
