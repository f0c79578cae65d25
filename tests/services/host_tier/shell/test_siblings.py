"""Two host tiers on one host, on real parts: what one has the other's engines may have."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.service.process import serve
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.local import Moved
from kvbm_common.wire.verbs import SnapshotReply, StatsReply, verb_subject
from kvbm_host_tier.core.shard_map import FrontTaken
from kvbm_host_tier.shell import siblings as shell
from kvbm_host_tier.shell.engine_socket import is_deserted, own_endpoint
from kvbm_index.shell.service import serve_index

from tests.services.host_tier.engine import DEADLINE_S, RealEngine
from tests.services.host_tier.helpers import name
from tests.services.host_tier.running import living, wait_ready
from tests.waiting import ask_until, wait_until

OURS, OTHERS = "ada", "dot"
"""Engines that fall to instance 0 and to instance 1."""


async def test_front_that_cannot_be_taken_for_want_of_a_descriptor_is_taken_later() -> None:
    """The host tier serves on meanwhile, and engines find it where it listens."""
    told, tries = list[object](), itertools.count()

    class Engines:
        def take_front(self) -> bool:
            if next(tries) == 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return True

    alone: Any = SimpleNamespace(siblings=dict)
    context, engines = cast(Any, None), cast(Any, Engines())
    looking = asyncio.create_task(shell.Siblings(context, engines, alone, told.append).run())
    await wait_until(lambda: bool(told) or looking.done())
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert [type(one) for one in told] == [FrontTaken]


@dataclass(frozen=True, slots=True)
class Siblings:
    """Engine `ada` at the first, which is the front, and `dot` at the second."""

    bus: Bus
    ada: RealEngine
    dot: RealEngine


def instance_of(settings: Settings, instance: str) -> Settings:
    """Settings of one of several, and of engines that go straight to it."""
    endpoint = own_endpoint(settings.host_tier_endpoint, instance)
    assert endpoint.endswith(f"host-tier-{instance}.sock")
    return dataclasses.replace(settings, instance=instance)


def at(settings: Settings, instance: str) -> Settings:
    """… for an engine that knows where it belongs."""
    endpoint = own_endpoint(settings.host_tier_endpoint, instance)
    return dataclasses.replace(settings, host_tier_endpoint=endpoint)


async def stats(bus: Bus, instance: str) -> StatsReply:
    subject = verb_subject("host-tier", "stats", host="h", instance=instance)
    return msgspec.json.decode(await bus.request(subject, b"{}", deadline_s=5.0), type=StatsReply)


async def held(bus: Bus, instance: str) -> set[int]:
    subject = verb_subject("host-tier", "snapshot", host="h", instance=instance)
    request = msgspec.json.encode({"source": f"host-tier-{instance}"})
    payload = await bus.request(subject, request, deadline_s=5.0)
    snapshot = msgspec.json.decode(payload, type=SnapshotReply)
    return {int(h, 16) for part in snapshot.parts for run in part.runs for h in run.hashes}


async def wait_shards(bus: Bus, count: int, *instances: str) -> None:
    """Until these go by a map of so many."""

    async def agreed() -> bool:
        found = [(await stats(bus, instance)).figures["shards"] for instance in instances]
        return found == [count] * len(instances)

    await ask_until(agreed, deadline_s=DEADLINE_S, despite=KvbmError)


@pytest.fixture
async def siblings(settings: Settings, bus: Bus, tmp_path: Path) -> AsyncIterator[Siblings]:
    """Both, an index, and their engines."""
    settings = dataclasses.replace(settings, state_dir=tmp_path / "state")
    stopping = asyncio.Event()
    index = asyncio.create_task(serve("index", serve_index, settings, stopping))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(living(settings))
        await wait_ready(bus)
        await stack.enter_async_context(living(instance_of(settings, "1")))
        await wait_shards(bus, 2, "0", "1")
        ada = await stack.enter_async_context(RealEngine.living(settings, engine=OURS))
        there = at(settings, "1")
        dot = await stack.enter_async_context(RealEngine.living(there, engine=OTHERS, life=2))
        yield Siblings(bus, ada, dot)
    stopping.set()
    assert await index == 0


@pytest.mark.slow
async def test_a_sibling_s_block_is_pulled_verified_and_admitted_with_its_second_use(
    siblings: Siblings,
) -> None:
    """1. Ada stores at the first host tier, the second's is empty. 2. Dot finds the blocks there,

    from afar, and loads them: byte for byte. 3. The second announces them with their second use.
    """
    bus, ada, dot = siblings.bus, siblings.ada, siblings.dot
    await ada.store(bus, 1, 2, 3)
    assert await held(bus, "1") == set()
    found = await dot.found(1, 2, 3)
    assert found.remote_blocks == [0, 1, 2]
    result = await dot.load(found, 11, 12, 13)
    assert result.intact == (True, True, True)
    assert np.array_equal(dot.memory[11:14], ada.memory[1:4])
    await dot.release(found)
    assert await held(bus, "1") == set()
    again = await dot.look_up(1, 2, 3)
    assert (len(again.slots), again.remote_blocks) == (3, [])
    assert await held(bus, "1") == {1, 2, 3}
    assert (await stats(bus, "1")).figures["peer_pulled_blocks"] == 3
    assert await matched(bus, 1, 2, 3) == {"host-tier-0", "host-tier-1"}


async def matched(bus: Bus, *numbers: int) -> set[str]:
    """Who has all of a chain, as far as the index knows by then."""
    request = MatchRequest(hashes=[name(number).hex() for number in numbers])

    async def both() -> set[str]:
        subject = verb_subject("index", "match")
        payload = await bus.request(subject, msgspec.json.encode(request), deadline_s=5.0)
        matches = msgspec.json.decode(payload, type=MatchReply).matches
        found = {match.source for match in matches if match.blocks == len(numbers)}
        return found if len(found) == 2 else set()

    return await ask_until(both, deadline_s=DEADLINE_S)


@pytest.mark.slow
async def test_the_front_sends_an_engine_on(siblings: Siblings, settings: Settings) -> None:
    """An offer of another's engine is heard by both, and taken by its own alone."""
    stray = RealEngine(settings, engine="fay", life=3)
    await stray.say(stray.hello())
    moved = await stray.hear(Moved)
    assert moved.endpoint == own_endpoint(settings.host_tier_endpoint, "1")
    stray.close()
    await siblings.dot.store(siblings.bus, 7)
    figures = (await stats(siblings.bus, "0")).figures
    assert not [name for name in figures if name.startswith("dropped.offer")]


@pytest.mark.slow
async def test_when_the_front_is_killed_another_one_is_at_its_endpoint(
    settings: Settings, bus: Bus, tmp_path: Path, nats_server: NatsServer
) -> None:
    """1. Two processes; dot is sent to the second. 2. kill -9 of the first: the second takes the

    well-known endpoint, serves every engine, and says so in a later map. 3. Dot is not disturbed:
    its blocks are there. 4. The first lives again, and has its share.
    """
    environ = os.environ | settings.as_environ()
    first, second = (
        ServiceProcess("host-tier", environ=environ | {"KVBM_INSTANCE": instance},
                       restart=False, log_path=tmp_path / f"log-{instance}")
        for instance in "01"
    )  # fmt: skip
    try:
        for process in (first, second):
            process.start()
            await process.wait_ready(deadline_s=DEADLINE_S)
        await wait_shards(bus, 2, "0", "1")
        there = own_endpoint(settings.host_tier_endpoint, "1")
        async with RealEngine.living(at(settings, "1"), engine=OTHERS, life=2) as dot:
            await dot.store(bus, 1, 2)
            os.kill(first.pid, signal.SIGKILL)
            await wait_until(lambda: is_deserted(own_endpoint(settings.host_tier_endpoint, "0")))
            await wait_shards(bus, 1, "1")
            assert (await stats(bus, "1")).figures["front"] == 1
            async with RealEngine.living(settings, engine=OURS) as ada:
                assert len((await ada.found(1, 2)).slots) == 2
                assert len((await dot.found(1, 2)).slots) == 2
                first.start()
                await first.wait_ready(deadline_s=DEADLINE_S)
                await wait_shards(bus, 2, "0", "1")
                assert (await ada.hear(Moved)).endpoint != there
    finally:
        for process in (first, second):
            await process.end(signal.SIGTERM, deadline_s=4.0)
    assert not [path for path in os.listdir(tmp_path) if path.endswith(".sock")]
    assert list(settings.shm_dir.iterdir()) == []
