"""The embedded nats-server: starts, keeps its data, stops, and dies with its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kvbm_common.errors import ServiceFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import EVENTS
from kvbm_common.runtime.processes import LockTaken, free_port

from tests.waiting import lives, wait_until

PARENT = """
import asyncio, sys
from pathlib import Path
from kvbm_common.nats.embedded_server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_data_survive_kill_and_restart_on_the_same_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    url = server.url
    bus = await Bus.connect(url, "test")
    await ensure_stream(bus, EVENTS)
    await publish_acknowledged(bus, EVENTS, "kvbm.v1.events.h.s.stored", b"1")
    await bus.close()
    server.kill()
    assert not server.running
    await server.start()
    assert server.url == url
    bus = await Bus.connect(url, "test")
    assert (await ensure_stream(bus, EVENTS)).state.last_seq == 1
    await bus.close()
    await server.stop()
    assert server.pid == 0


async def test_port_in_use_is_a_typed_error(nats_server: NatsServer, tmp_path: Path) -> None:
    """Goal: a second server on the port fails, quoting its log; it is not taken for the first."""
    second = NatsServer(tmp_path / "second", port=nats_server.port)
    with pytest.raises(ServiceFailed, match="address already in use"):
        await second.start()
    assert not second.running


@pytest.mark.slow
async def test_a_second_server_on_a_directory_is_refused_before_it_writes(tmp_path: Path) -> None:
    """Goal: two servers on one store lose events. Method: the first one's files stay as they were;
    when it has stopped, the other starts."""
    second = NatsServer(tmp_path)
    async with NatsServer(tmp_path):
        before = (tmp_path / "nats-server.conf").read_text()
        with pytest.raises(LockTaken) as refused:
            await second.start()
        assert refused.value.holder == str(os.getpid())
        assert not second.running
        assert (tmp_path / "nats-server.conf").read_text() == before
    async with second:
        assert second.running


async def test_streams_of_earlier_settings_leave_room_for_those_of_now(tmp_path: Path) -> None:
    """Goal: a start with fewer partitions, or smaller streams, than before. Method: a stream that
    was made by a large server has reserved more than the next one's settings need."""
    large = replace(EVENTS, name="KVBM_EVENTS_2_0", subjects=("large",), bytes_max=5 << 30)
    for store_bytes, spec in ((8 << 30, large), (0, EVENTS)):
        async with NatsServer(tmp_path, store_bytes=store_bytes) as server:
            bus = await Bus.connect(server.url, "test")
            await ensure_stream(bus, spec)
            await bus.close()


NAMES = ("jörg", "日本", "a b", 'say "hi"', "back\\slash", "$HOME", "#1 {x}")


@pytest.mark.parametrize("name", NAMES)
async def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Goal: a home with a letter beyond ASCII starts; the store is where it was asked to be."""
    async with NatsServer(tmp_path / name) as server:
        assert (tmp_path / name / "jetstream").is_dir()
        assert server.running


async def test_it_listens_on_ipv6(tmp_path: Path) -> None:
    """Goal: `KVBM_NATS_URL=nats://[::1]:4222`; an address with colons needs brackets."""
    async with NatsServer(tmp_path, address="::1", port=free_port()) as server:
        assert server.url == f"nats://[::1]:{server.port}"
        bus = await Bus.connect(server.url, "test")
        assert bus.connected
        await bus.close()


async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """Goal: no orphan. Method: a process that starts one is killed with SIGKILL."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert lives(pid)
    parent.kill()
    await parent.wait()
    await wait_until(lambda: not lives(pid))
