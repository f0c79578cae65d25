"""Two host tiers, `h` and `g`, on one NATS with an index: what one has the other may have."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import io
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import RequestFailed
from kvbm_common.memory.arena import Arena
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.service.process import serve
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.local import Found
from kvbm_common.wire.verbs import ArenaReply, LeaseReply, LeaseRequest, verb_subject
from kvbm_host_tier.shell import peer_reader
from kvbm_host_tier.shell.peer_reader_messages import ExpectPeer, Opened
from kvbm_host_tier.shell.peer_reader_process import PeerReaderProcess
from kvbm_host_tier.shell.verbs import HostTierVerbs
from kvbm_index.shell.service import serve_index

from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.helpers import name
from tests.services.host_tier.running import (
    ARENA_GB,
    TTL_S,
    ask,
    held,
    living,
    stats_of,
    wait_ready,
    wait_stats,
)
from tests.waiting import ask_until, wait_until


async def test_a_door_that_cannot_be_started_counts_as_one_that_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process or descriptor is left for a moment: it is tried again, and the host tier lives."""
    starts = list[object]()
    environs = list[dict[str, str]]()

    async def fail(*program: object, env: dict[str, str], **_: object) -> None:
        starts.append(program)
        environs.append(env)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    monkeypatch.setattr(peer_reader, "BACKOFF_S", (0.0,))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    door = peer_reader.PeerReader("door")
    door.want("/dev/null")
    running = asyncio.create_task(door.run())
    assert door.problem == ""
    await wait_until(lambda: len(starts) > peer_reader.ENDS_MAX or running.done())
    assert not running.done()
    assert "KVBM_PEER_DEVICES" in door.problem
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert door.life > 1
    assert "PATH" in environs[0]
    assert "AWS_SECRET_ACCESS_KEY" not in environs[0], "others reach the peer reader"


@pytest.mark.slow
async def test_a_host_tier_without_a_peer_reader_is_ready_and_says_so(
    nats_server: NatsServer, tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves its own engines. What it cannot do is a reason in its statistics."""
    monkeypatch.setattr(peer_reader, "BACKOFF_S", (0.0,))
    h, g = (settings_of(host, nats_server, tmp_path) for host in "hg")
    h = dataclasses.replace(h, peer_devices="nosuch0")
    async with AsyncExitStack() as stack:
        for settings in (h, g):
            await stack.enter_async_context(living(settings))
            await wait_ready(bus, host=settings.host)
        await stack.enter_async_context(RealEngine.living(h))
        told = await wait_stats(bus, lambda stats: bool(stats.reasons))
        assert told.ready
        assert "KVBM_PEER_DEVICES" in told.reasons[0]


def test_a_peer_reader_rests_until_a_peer_has_added_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand polls a second take 3 % of a core, and most hosts are never read from."""
    told: list[object] = []

    def attend(_: MoverThread, seconds: float, *, if_added: bool = False) -> None:
        told.append((seconds, if_added))

    monkeypatch.setattr(MoverThread, "attend", attend)
    monkeypatch.setattr(MoverThread, "expect_peer", lambda _: told.append("peer"))
    with Arena.create(tmp_path, "arena", 4096) as arena, MoverThread("reader") as mover:
        process = PeerReaderProcess(arena, mover, io.BytesIO())
        process.open()
        assert told == [(math.inf, True)]
        process.take(ExpectPeer())
        assert told[1:] == ["peer"]


async def test_a_host_that_asks_for_the_door_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds the agent next, and each step of the handshake would wait for a poll."""
    expected: list[str] = []
    door = peer_reader.PeerReader("door")
    door.opened = Opened(agent=b"agent", address=4096)
    monkeypatch.setattr(door, "expect_peer", lambda: expected.append("peer"))
    arena = ArenaReply(
        path="/arena", bytes=4 * 4096, slot_bytes=4096, slot_count=4, epoch=1, instance="0"
    )
    view: Any = SimpleNamespace(arena_reply=lambda: arena)
    nothing: Any = None
    verbs = HostTierVerbs(view, nothing, nothing, nothing, door)
    await verbs.handlers()["door"](b'{"any_size": true}')
    assert expected == ["peer"]


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Engine `ada` on host h, engine `bob` on host g."""

    bus: Bus
    ada: RealEngine
    bob: RealEngine


def settings_of(host: str, nats_server: NatsServer, directory: Path) -> Settings:
    """A host of its own, as far as its services can tell."""
    shm, run = directory / f"shm-{host}", directory / f"run-{host}"
    shm.mkdir()
    run.mkdir()
    return Settings.load(
        {},
        {
            "nats_url": nats_server.url,
            "host": host,
            "registry_ttl_s": TTL_S,
            "runtime_dir": str(run),
            "shm_dir": str(shm),
            "cpu_cache_gb": ARENA_GB,
            "state_dir": str(directory / "state"),
        },
    )


@pytest.fixture
async def hosts(nats_server: NatsServer, tmp_path: Path, bus: Bus) -> AsyncIterator[TwoHosts]:
    """Both hosts, their doors open."""
    h, g = (settings_of(host, nats_server, tmp_path) for host in "hg")
    stopping = asyncio.Event()
    index = asyncio.create_task(serve("index", serve_index, h, stopping))
    async with AsyncExitStack() as stack:
        for settings in (h, g):
            await stack.enter_async_context(living(settings))
            await wait_ready(bus, host=settings.host)
        ada = await stack.enter_async_context(RealEngine.living(h))
        bob = await stack.enter_async_context(RealEngine.living(g, engine="bob", life=2))
        yield TwoHosts(bus, ada, bob)
    stopping.set()
    assert await index == 0


async def indexed(hosts: TwoHosts, host: str, *numbers: int) -> bool:
    """Does the index know that this host has all of a chain?"""
    request = MatchRequest(hashes=[name(number).hex() for number in numbers])
    payload = await hosts.bus.request(
        verb_subject("index", "match"), msgspec.json.encode(request), deadline_s=5.0
    )
    matches = msgspec.json.decode(payload, type=MatchReply).matches
    return any(m.host == host and m.blocks == len(numbers) for m in matches)


async def store_on_h(hosts: TwoHosts, *numbers: int) -> None:
    """Until the index knows of it."""
    await hosts.ada.store(hosts.bus, *numbers)
    await ask_until(lambda: indexed(hosts, "h", *numbers))


async def found_by_bob(hosts: TwoHosts, *numbers: int) -> Found:
    """Bob's look-up, as soon as both doors are open."""
    return await hosts.bob.found(*numbers)


@pytest.mark.slow
async def test_a_block_of_another_host_is_onboarded(hosts: TwoHosts) -> None:
    """1. Stored on h, found through the index, pulled to g, loaded into bob's device: equal.

    2. No lease is left on h; g announces nothing, for the blocks were used there once.
    3. With their second use they are blocks of g like any other.
    """
    await store_on_h(hosts, 1, 2, 3)
    found = await found_by_bob(hosts, 1, 2, 3)
    assert found.remote_blocks == [0, 1, 2]
    result = await hosts.bob.load(found, 11, 12, 13)
    assert result.intact == (True, True, True)
    assert np.array_equal(hosts.bob.memory[11:14], hosts.ada.memory[1:4])
    await hosts.bob.release(found)
    await wait_stats(hosts.bus, lambda stats: stats.leases == 0)
    assert await held(hosts.bus, host="g") == set()
    assert (await stats_of(hosts.bus, host="g")).figures["peer_pulled_blocks"] == 3

    again = await hosts.bob.look_up(1, 2, 3)
    assert (len(again.slots), again.remote_blocks) == (3, [])
    assert await held(hosts.bus, host="g") == {1, 2, 3}
    await ask_until(lambda: indexed(hosts, "g", 1, 2, 3))
    assert (await stats_of(hosts.bus, host="g")).figures["peer_pulled_blocks"] == 3


@pytest.mark.slow
async def test_a_door_that_dies_takes_nothing_with_it(hosts: TwoHosts, tmp_path: Path) -> None:
    """1. h's door process is killed: its host tier and blocks stay. 2. g is given another door."""
    await store_on_h(hosts, 1, 2, 3)
    await wait_door(hosts)
    [door] = doors(tmp_path / "shm-h")
    os.kill(door, signal.SIGKILL)
    found = await found_by_bob(hosts, 1, 2, 3)
    assert found.remote_blocks == [0, 1, 2]
    assert doors(tmp_path / "shm-h") != [door]
    result = await hosts.bob.load(found, 11, 12, 13)
    assert np.array_equal(hosts.bob.memory[11:14], hosts.ada.memory[1:4])
    assert result.intact == (True, True, True)
    await hosts.bob.release(found)
    assert await held(hosts.bus) == {1, 2, 3}


@pytest.mark.slow
async def test_bytes_that_have_changed_on_their_host_never_arrive(hosts: TwoHosts) -> None:
    """A byte of block 2 flips in h's memory: bob gets block 1 alone, and the rest is counted."""
    await store_on_h(hosts, 1, 2, 3)
    await wait_door(hosts)
    arena = msgspec.json.decode(await ask(hosts.bus, "arena"), type=ArenaReply)
    request = LeaseRequest(owner="test", epoch=arena.epoch, hashes=[name(2).hex()], lease_ms=5_000)
    lease = msgspec.json.decode(await ask(hosts.bus, "lease", request), type=LeaseReply)
    memory = np.memmap(arena.path, dtype=np.uint8, mode="r+")
    memory[lease.slots[0].slot * arena.slot_bytes + 100] ^= 1
    found = await hosts.bob.look_up(1, 2, 3)
    assert (len(found.slots), found.reason) == (1, "corrupt")
    figures = (await stats_of(hosts.bus, host="g")).figures
    assert figures["dropped.peer_corrupt"] == 1


async def wait_door(hosts: TwoHosts) -> None:
    """Until both hosts can be read."""

    async def opened() -> bool:
        for host in "hg":
            try:
                await ask(hosts.bus, "door", host=host)
            except RequestFailed:
                return False
        return True

    await ask_until(opened)


def doors(directory: Path) -> list[int]:
    """The door processes over an arena in this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().decode(errors="replace")
            if "kvbm_host_tier.shell.peer_reader_process" in line and f"{directory}/" in line:
                found.append(int(entry.parent.name))
    return found
