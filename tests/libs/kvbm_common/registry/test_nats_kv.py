"""The registry on NATS KV: the contract, and what happens when NATS goes away."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from kvbm_common.errors import DeadlineExceeded, RegistryUnavailable
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import (
    Link,
    PublishAck,
    call_api,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.streams import REGISTRY, StreamSpec
from kvbm_common.registry import nats_entry
from kvbm_common.registry.nats_entry import MISSED_BEATS, PREFIX
from kvbm_common.registry.nats_kv import IDLE_PER_TTL, LATE_PER_TTL, SWEEPS_PER_TTL, NatsRegistry
from kvbm_common.registry.records import ENGINE, Changed, Joined, Left, RegistryEvent
from kvbm_common.registry.services import Registry, ServiceRegistration
from kvbm_common.runtime.pauses import EARLY

from tests.libs.registry_contract import TTL_S, MakeRegistry, RegistryContract
from tests.waiting import wait_until


@pytest.fixture
async def make_nats_registry(nats_url: str) -> AsyncIterator[MakeRegistry]:
    """Connects one more process."""
    opened: list[tuple[NatsRegistry, Bus]] = []

    async def make() -> Registry:
        bus = await Bus.connect(nats_url, "test")
        registry = NatsRegistry(bus, ttl_s=TTL_S)
        opened.append((registry, bus))
        return registry

    yield make
    for registry, bus in opened:
        await registry.close()
        await bus.close()


class TestNatsRegistry(RegistryContract):
    """The contract on NATS KV."""

    @pytest.fixture
    async def make(self, make_nats_registry: MakeRegistry) -> MakeRegistry:
        """A function that connects one more process to the registry, with TTL_S."""
        return make_nats_registry


@pytest.mark.slow
async def test_nobody_dies_of_a_nats_outage(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: an outage longer than the TTL, or a restart, makes nobody leave."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    registration = await ours.register("index", "h", "0")
    await wait_until(lambda: events)
    nats_server.kill()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=2 * TTL_S)
    await nats_server.start()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=2 * TTL_S)
    assert [record.epoch for record in await theirs.list()] == [registration.epoch]


async def test_entries_come_back_after_the_store_is_lost(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: heartbeats make the bucket and the entry anew, and later epochs are larger still."""
    ours = await make_nats_registry()
    registration = await ours.register("index", "h", "0")
    held = await ours.register(ENGINE, "h", "a")
    nats_server.kill()
    shutil.rmtree(nats_server.directory / "jetstream")
    await nats_server.start()
    theirs = await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await wait_until(lambda: len(events) == 2)
    assert {event.record.epoch for event in events} == {registration.epoch, held.epoch}
    assert not registration.lost.is_set()
    later = await theirs.register("index", "h", "1")
    assert later.epoch > registration.epoch


async def test_deleted_bucket_is_made_again(make_nats_registry: MakeRegistry, bus: Bus) -> None:
    """Goal: an administrator's mistake heals by itself."""
    ours = await make_nats_registry()
    await ours.register("index", "h", "0")
    await call_api(bus, f"STREAM.DELETE.{REGISTRY.name}")
    theirs = await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await wait_until(lambda: events)


async def test_of_a_process_one_entry_has_heartbeats(
    make_nats_registry: MakeRegistry, bus: Bus
) -> None:
    """Goal: every reader gets every heartbeat, and most entries are engines."""
    ours = await make_nats_registry()
    for kind, instance in (("consolidator", "0"), (ENGINE, "a"), (ENGINE, "b")):
        await ours.register(kind, "h", instance)
    beats: Counter[str] = Counter()
    async with EventSubscription(bus, REGISTRY, subject=f"{PREFIX}services.>", start="new") as all_:
        async for batch in all_:
            beats.update(message.subject.removeprefix(f"{PREFIX}services.") for message in batch)
            if beats["consolidator.h.0"] >= 4:
                break
    assert list(beats) == ["consolidator.h.0"]


@pytest.mark.slow
async def test_the_next_life_of_a_holder_has_time_to_enter_its_engines(
    make_nats_registry: MakeRegistry,
) -> None:
    """1. A consolidator is killed and starts again. 2. One engine enters again, and never left.
    3. The other one has a time to live for it, and leaves."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    for kind, instance in (("consolidator", "0"), (ENGINE, "a"), (ENGINE, "b")):
        await ours.register(kind, "h", instance)
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 3, deadline_s=2 * TTL_S)
    await ours.close()
    again = await make_nats_registry()
    await again.register("consolidator", "h", "0")
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 4, deadline_s=TTL_S / 3)
    await again.register(ENGINE, "h", "a")
    await wait_until(lambda: len(events) == 6, deadline_s=4 * TTL_S)
    assert [type(event) for event in events[3:]] == [Changed, Changed, Left]
    assert events[5].record.instance == "b"
    assert len(await theirs.list()) == 2


@pytest.mark.parametrize("ttl_s", [5.0, 600.0])
async def test_a_held_entry_is_renewed_before_the_bucket_forgets_it(bus: Bus, ttl_s: float) -> None:
    """Goal: who reads the registry later finds all. `ttl_s` of a held entry is three heartbeats."""
    registry = NatsRegistry(bus, ttl_s=ttl_s)
    await registry.register("consolidator", "h", "0")
    held = await registry.register(ENGINE, "h", "a")
    assert ttl_s < held.record.ttl_s <= REGISTRY.age_max_s
    await registry.close()


async def test_what_a_silent_process_holds_comes_back_with_it(
    make_nats_registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: engines are not gone for longer than their consolidator, whose heartbeats we missed."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    first = await ours.register("consolidator", "h", "0")
    for name in ("a", "b"):
        held = await ours.register(ENGINE, "h", name)
    monkeypatch.setattr(first, "put", _hangs)
    await wait_until(lambda: len(events) == 6, deadline_s=4 * TTL_S)
    assert [event.reason for event in events[3:] if isinstance(event, Left)] == ["expired"] * 3
    monkeypatch.undo()
    await wait_until(lambda: len(events) == 9, deadline_s=4 * TTL_S)
    assert all(isinstance(event, Joined) for event in events[6:])
    await held.revoke()
    await wait_until(lambda: len(events) == 10)
    assert len(await theirs.list()) == 2


async def test_who_leaves_late_takes_no_newer_entry_along(make_nats_registry: MakeRegistry) -> None:
    """Goal: an engine moves to another consolidator, and the first one ends after that."""
    ours, theirs, reader = [await make_nats_registry() for _ in range(3)]
    events: list[RegistryEvent] = []
    reader.watch(events.append)
    await ours.register("consolidator", "h", "0")
    first = await ours.register(ENGINE, "h", "a")
    await theirs.register("consolidator", "h", "1")
    second = await theirs.register(ENGINE, "h", "a")

    def seen() -> set[int]:
        # A reader that begins late sees the second engine alone.
        return {event.record.epoch for event in events}

    await wait_until(lambda: second.epoch in seen())
    await first.revoke()
    # Written later than anything that `first` wrote.
    last = await ours.register("index", "h", "0")
    await wait_until(lambda: last.epoch in seen())
    assert not [event for event in events if isinstance(event, Left)]
    assert [one.epoch for one in await reader.list(ENGINE)] == [second.epoch]


@pytest.mark.slow
async def test_what_is_entered_beside_a_lost_entry_stays(make_nats_registry: MakeRegistry) -> None:
    """Goal: a lost entry has no heartbeats, so that it cannot speak for another one."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    first = await ours.register("consolidator", "h", "0")
    await theirs.register("consolidator", "h", "0")
    async with asyncio.timeout(4 * TTL_S):
        await first.lost.wait()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await ours.register(ENGINE, "h", "a")
    with pytest.raises(TimeoutError):
        await wait_until(
            lambda: any(isinstance(event, Left) for event in events), deadline_s=3 * TTL_S
        )
    assert len(await theirs.list(ENGINE)) == 1


async def _held_entry(
    make_nats_registry: MakeRegistry,
) -> tuple[ServiceRegistration, Registry, list[RegistryEvent]]:
    """An engine that a consolidator holds, another process's registry, and what that has seen."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await ours.register("consolidator", "h", "0")
    held = await ours.register(ENGINE, "h", "a")
    await wait_until(lambda: len(events) == 2)
    return held, theirs, events


async def test_an_entry_that_has_left_is_freed_without_the_collector(
    make_nats_registry: MakeRegistry,
) -> None:
    """Goal: a consolidator that meets an engine a second grows by none. The collector comes seldom,
    and a cycle through the task of the heartbeats kept all engines until then."""
    ours = await make_nats_registry()
    await ours.register("consolidator", "h", "0")
    held = await ours.register(ENGINE, "h", "a")
    gone = weakref.ref(held)
    gc.disable()
    try:
        await held.revoke()
        del held
        await wait_until(lambda: gone() is None)
    finally:
        gc.enable()


async def test_an_entry_that_leaves_without_nats_leaves_when_it_is_back(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: the heartbeats of its holder do not keep it."""
    held, theirs, events = await _held_entry(make_nats_registry)
    nats_server.kill()
    await held.revoke()
    await nats_server.start()
    await wait_until(lambda: len(events) == 3)
    assert events[2] == Left(held.record, "deleted")
    assert [record.kind for record in await theirs.list()] == ["consolidator"]


@pytest.mark.slow
@pytest.mark.parametrize("is_made_anew", [False, True], ids=["gone", "made anew by another"])
async def test_an_entry_that_leaves_without_its_bucket_has_left(
    make_nats_registry: MakeRegistry, bus: Bus, *, is_made_anew: bool
) -> None:
    """Goal: readers hear of the end, though the entry is not in the bucket. It once stayed with
    them for as long as its holder lived."""
    held, theirs, events = await _held_entry(make_nats_registry)
    await call_api(bus, f"STREAM.DELETE.{REGISTRY.name}")
    if is_made_anew:
        await ensure_stream(bus, REGISTRY)
    await held.revoke()
    await wait_until(lambda: any(isinstance(event, Left) for event in events))
    with pytest.raises(TimeoutError):
        await wait_until(lambda: isinstance(events[-1], Joined), deadline_s=2 * TTL_S)
    assert [record.kind for record in await theirs.list()] == ["consolidator"]


@pytest.mark.slow
async def test_nobody_dies_while_nats_stands_still(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: while a server holds its connections and sends nothing, no service is declared dead.

    Hosts beat at different moments, so that some were heard long before NATS stood still.
    """
    hosts = [await make_nats_registry() for _ in range(4)]
    for number, registry in enumerate(hosts):
        await registry.register("index", f"host-{number}", "0")
    events: list[RegistryEvent] = []
    theirs = await make_nats_registry()
    theirs.watch(events.append)
    await wait_until(lambda: len(events) == len(hosts))
    for _ in range(3):
        os.kill(nats_server.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await wait_until(lambda: len(events) > len(hosts), deadline_s=2.5 * TTL_S)
        os.kill(nats_server.pid, signal.SIGCONT)
        with pytest.raises(TimeoutError):
            await wait_until(lambda: len(events) > len(hosts), deadline_s=TTL_S)
    assert len(await theirs.list()) == len(hosts)


def test_no_pause_of_a_reader_adds_up_to_a_time_to_live() -> None:
    """Goal: an entry that was heard a heartbeat ago, a reader that looks again as late as it may,
    and one that hears as late as it may that the stream is idle: none makes an entry old."""
    heartbeat = (1 + EARLY) / MISSED_BEATS
    assert heartbeat + 1 / SWEEPS_PER_TTL + LATE_PER_TTL < 0.9
    assert heartbeat + IDLE_PER_TTL + LATE_PER_TTL < 0.9


async def test_an_entry_leaves_though_a_write_of_its_own_was_not_acknowledged(
    make_nats_registry: MakeRegistry, nats_url: str
) -> None:
    """Goal: the registry has a later revision than the entry knows, and it is its own."""
    held, theirs, events = await _held_entry(make_nats_registry)
    bus = await Bus.connect(nats_url, "test")
    payload = msgspec.json.encode(held.record)
    await publish_acknowledged(bus, REGISTRY, f"{PREFIX}services.{held.record.key}", payload)
    await held.revoke()
    await wait_until(lambda: len(events) == 3)
    assert events[2] == Left(held.record, "deleted")
    assert [record.kind for record in await theirs.list()] == ["consolidator"]
    await bus.close()


async def test_an_entry_that_was_refused_is_not_kept(
    make_nats_registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An engine's entry is written, and the acknowledgement is lost. 2. `register` fails, and no
    heartbeat keeps the entry. It once stayed for as long as its consolidator."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await ours.register("consolidator", "h", "0")

    async def unacknowledged(
        link: Link, spec: StreamSpec, subject: str, *said: Any, **headers: Any
    ) -> PublishAck:
        acknowledged = await publish_acknowledged(link, spec, subject, *said, **headers)
        if f".{ENGINE}." in subject:
            raise DeadlineExceeded("the acknowledgement was lost")
        return acknowledged

    monkeypatch.setattr(nats_entry, "publish_acknowledged", unacknowledged)
    with pytest.raises(RegistryUnavailable):
        await ours.register(ENGINE, "h", "a")
    monkeypatch.undo()
    await wait_until(lambda: len(events) == 3, deadline_s=4 * TTL_S)
    assert isinstance(events[2], Left)
    assert [record.kind for record in await theirs.list()] == ["consolidator"]


async def test_what_could_not_be_said_is_said_with_the_next_heartbeat(
    make_nats_registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: not with that of a held entry, which may be minutes away."""
    held, _, events = await _held_entry(make_nats_registry)
    monkeypatch.setattr(held, "put", _hangs)
    with pytest.raises(RegistryUnavailable):
        await held.update({"ranks": "0,1"})
    monkeypatch.undo()
    await wait_until(lambda: len(events) == 3, deadline_s=4 * TTL_S)
    assert events[2].record.info == {"ranks": "0,1"}


async def test_readers_agree_whatever_their_own_time_to_live(
    make_nats_registry: MakeRegistry, bus: Bus
) -> None:
    """Goal: what a dead process held leaves after the time to live of that process."""
    ours, patient = await make_nats_registry(), NatsRegistry(bus, ttl_s=1000 * TTL_S)
    events: list[RegistryEvent] = []
    patient.watch(events.append)
    await ours.register("consolidator", "h", "0")
    await ours.register(ENGINE, "h", "a")
    await wait_until(lambda: len(events) == 2)
    await ours.close()
    await wait_until(lambda: len(events) == 4, deadline_s=4 * TTL_S)
    assert [event.reason for event in events[2:] if isinstance(event, Left)] == ["expired"] * 2
    await patient.close()


@pytest.mark.slow
async def test_a_reader_that_did_not_run_declares_no_one_dead(
    make_nats_registry: MakeRegistry, nats_url: str
) -> None:
    """Goal: a process that was stopped, or was busy for longer than the TTL, has heard nothing:
    that is no silence of others."""
    reader = await make_nats_registry()
    events: list[RegistryEvent] = []
    reader.watch(events.append)
    with _another_process(nats_url):
        await wait_until(lambda: len(events) == 2)
        for _ in range(3):
            threading.Event().wait(2 * TTL_S)  # The event loop stands still.
            with pytest.raises(TimeoutError):
                await wait_until(lambda: len(events) > 2, deadline_s=TTL_S)
    await wait_until(lambda: len(events) == 4, deadline_s=4 * TTL_S)


@contextmanager
def _another_process(nats_url: str) -> Iterator[None]:
    """Have a process beside this one that has a consolidator and an engine in the registry."""
    loop = asyncio.new_event_loop()

    async def enter() -> Bus:
        bus = await Bus.connect(nats_url, "test")
        registry = NatsRegistry(bus, ttl_s=TTL_S)
        for kind in ("consolidator", ENGINE):
            await registry.register(kind, "h", "0")
        closing.append(registry)
        return bus

    async def leave(bus: Bus) -> None:
        await closing[0].close()
        await bus.close()

    closing: list[NatsRegistry] = []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bus = asyncio.run_coroutine_threadsafe(enter(), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(leave(bus), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _hangs(**_: bool) -> None:
    raise DeadlineExceeded("as without NATS")


RUBBISH = [b'{"kind": 7}', b"\xff", b'{"kind":"\xff"}', b'{"x":' + b"[" * 100_000]
"""Another type, no JSON, no text, and deeper than any decoder goes."""


@pytest.mark.parametrize("rubbish", RUBBISH, ids=["type", "bytes", "text", "deep"])
async def test_bad_record_is_ignored(
    make_nats_registry: MakeRegistry, bus: Bus, rubbish: bytes
) -> None:
    """Goal: rubbish under a key neither crashes nor hides the others."""
    registry = await make_nats_registry()
    await registry.register("index", "h", "0")
    await bus.publish("$KV.kvbm-registry.services.index.h.1", rubbish)
    await registry.register("index", "h", "2")
    assert {record.instance for record in await registry.list()} == {"0", "2"}


async def test_without_nats_it_is_unavailable(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: a typed error."""
    registry = await make_nats_registry()
    nats_server.kill()
    with pytest.raises(RegistryUnavailable):
        await registry.register("index", "h", "0")


async def _entry_of(bus: Bus, key: str) -> bytes:
    """What the bucket has under a key; empty: nothing, or a delete marker."""
    subject = f"$JS.API.DIRECT.GET.{REGISTRY.name}.{PREFIX}services.{key}"
    return (await bus.request_raw(subject, b"", deadline_s=1.0)).payload


@pytest.mark.parametrize("beside", ["host-tier h 1", "host-tier other 1", "disk-tier h 1"])
async def test_the_entry_of_a_killed_sibling_is_removed(
    make_nats_registry: MakeRegistry, bus: Bus, beside: str
) -> None:
    """1. A host tier is killed. 2. A sibling removes its entry, so that later readers do not take
    it for alive at first. No other service does: it has no right to."""
    ours, theirs, reader = [await make_nats_registry() for _ in range(3)]
    await ours.register("host-tier", "h", "0")
    kind, host, instance = beside.split()
    await theirs.register(kind, host, instance)
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    reader.watch(events.append)
    await ours.close()
    await wait_until(
        lambda: sum(isinstance(event, Left) for event in events) == 2, deadline_s=4 * TTL_S
    )
    await theirs.register("metrics", "h", "0")  # Written later than a removal that had begun.
    found = await _entry_of(bus, "host-tier.h.0")
    assert bool(found) == (beside != "host-tier h 1")


async def test_a_sibling_that_was_silent_enters_again(
    make_nats_registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a process that stood still is back with its next heartbeat, in the same life."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    silent = await ours.register("host-tier", "h", "0")
    await theirs.register("host-tier", "h", "1")
    monkeypatch.setattr(silent, "put", _hangs)
    await wait_until(lambda: isinstance(events[-1], Left), deadline_s=4 * TTL_S)
    monkeypatch.undo()
    await wait_until(lambda: isinstance(events[-1], Joined), deadline_s=4 * TTL_S)
    assert events[-1].record == silent.record
    assert not silent.lost.is_set()
