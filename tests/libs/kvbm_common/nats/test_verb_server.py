"""Verbs on a real nats-server: their subjects, their errors, and many requests at once."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import NoResponder, RequestFailed
from kvbm_common.nats.bus import Bus

from tests.libs.kvbm_common.nats.speaking import echo, fail


async def break_down(payload: bytes) -> bytes:
    raise ZeroDivisionError


async def test_request_reaches_a_verb_of_one_instance_and_of_any_replica(bus: Bus) -> None:
    """Goal: both subjects of the contract. Method: a shared verb, asked both ways."""
    await bus.add_verbs("index", "0", "h", {"match": echo}, shared=True)
    assert await bus.request("kvbm.v1.index.match", b"1", deadline_s=2) == b"1"
    assert await bus.request("kvbm.v1.index.h.0.match", b"2", deadline_s=2) == b"2"


async def test_unshared_verb_is_not_served_for_all(bus: Bus) -> None:
    """Goal: a stateful service answers only as itself."""
    await bus.add_verbs("host-tier", "0", "h", {"lookup": echo})
    with pytest.raises(NoResponder):
        await bus.request("kvbm.v1.host-tier.lookup", b"", deadline_s=2)


async def test_typed_error_travels(bus: Bus) -> None:
    """Goal: the requester sees code, message and field of the handler's error."""
    await bus.add_verbs("index", "0", "h", {"match": fail, "broken": break_down})
    with pytest.raises(RequestFailed) as caught:
        await bus.request("kvbm.v1.index.h.0.match", b"", deadline_s=2)
    assert (caught.value.code, caught.value.field) == ("out_of_cheese", "cheese")
    assert caught.value.message == "no\ncheese"
    with pytest.raises(RequestFailed, match="internal"):
        await bus.request("kvbm.v1.index.h.0.broken", b"", deadline_s=2)


async def test_reply_that_is_too_large_is_a_typed_error(bus: Bus) -> None:
    """Goal: the requester learns at once what its deadline would not tell."""

    async def huge(payload: bytes) -> bytes:
        return bytes(9 * 1024 * 1024)

    await bus.add_verbs("index", "0", "h", {"dump": huge})
    with pytest.raises(RequestFailed, match="message_too_large"):
        await bus.request("kvbm.v1.index.h.0.dump", b"", deadline_s=2)


async def test_too_many_requests_are_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a bounded number of requests is served. Method: a limit of one, and two requests."""
    monkeypatch.setattr("kvbm_common.nats.verb_server.CONCURRENT_MAX", 1)
    taken, release = asyncio.Event(), asyncio.Event()

    async def wait(payload: bytes) -> bytes:
        taken.set()
        await release.wait()
        return payload

    await bus.add_verbs("index", "0", "h", {"wait": wait})
    first = asyncio.create_task(bus.request("kvbm.v1.index.h.0.wait", b"1", deadline_s=5))
    await taken.wait()
    with pytest.raises(RequestFailed, match="busy"):
        await bus.request("kvbm.v1.index.h.0.wait", b"2", deadline_s=2)
    release.set()
    assert await first == b"1"


async def test_verbs_are_a_micro_service(bus: Bus) -> None:
    """Goal: `nats micro ls` finds us."""
    await bus.add_verbs("index", "0", "h", {"match": echo})
    assert b'"kvbm-index"' in await bus.request("$SRV.PING", b"", deadline_s=2)


async def test_slow_request_does_not_hold_up_another(bus: Bus) -> None:
    """Goal: requests of one verb run concurrently. Method: the first waits for the second."""
    released = asyncio.Event()

    async def meet(payload: bytes) -> bytes:
        if payload == b"second":
            released.set()
        await released.wait()
        return payload

    await bus.add_verbs("index", "0", "h", {"meet": meet})
    answers = await asyncio.gather(
        bus.request("kvbm.v1.index.h.0.meet", b"first", deadline_s=2),
        bus.request("kvbm.v1.index.h.0.meet", b"second", deadline_s=2),
    )
    assert list(answers) == [b"first", b"second"]
