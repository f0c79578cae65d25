"""The audit stream: each change is written with its outcome, whatever that is."""

from __future__ import annotations

import asyncio

import msgspec
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


@pytest.mark.parametrize("letter", ["a", '"', "\x01", "\u00e9", "\U0001f600"])
async def test_a_large_change_is_written_whatever_is_in_it(bus: Bus, letter: str) -> None:
    """Goal: the stream takes each entry, though JSON may need six bytes for a character.

    The request, its actor and the error's text are long; the entry has the beginning of each.
    """
    text = letter * 20_000

    async def change(_payload: bytes) -> bytes:
        raise RequestFailed("pin_limit", text)

    audit = Audit(bus, kind="host-tier", host="h", instance="0", counters=bus.counters)
    with pytest.raises(RequestFailed):
        await audit.audited("evict", change)(msgspec.json.encode({"actor": text}))
    with pytest.raises(RequestFailed):
        await audit.audited("evict", change)(text.encode())
    assert bus.counters.value("kvbm_audit_failures_total") == 0
    async with asyncio.timeout(DEADLINE_S):
        subscription = bus.event_subscription(start="all", subject=AUDIT.subjects[0], spec=AUDIT)
        async with subscription as batches:
            entry = audit_codec.decode((await anext(batches))[0].payload)
    assert entry.reply.endswith(letter)
    assert len(entry.actor) == 128
    assert len(entry.request) > 800
