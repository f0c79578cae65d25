"""nats-py without the private parts that direct subscriptions need: everything still works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvbm_common.errors import RequestFailed
from kvbm_common.nats import direct_client
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.direct_client import BUFFER_PARTS, CLIENT_PARTS, PARSER_PARTS, DirectClient
from kvbm_common.nats.embedded_server import NatsServer
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.libs.kvbm_common.nats.speaking import echo, fail, publishing, put, read

EVENTS = 3_000
"""So many that the server asks for flow control."""


class Absent:
    """What no part of the library is."""


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a private part missing, as if the library had another name for it."""
    if name == "_process_msg":  # The library calls a method that is not this one.
        monkeypatch.setattr(DirectClient, "_process_msg", Client._process_msg)
        return
    for parts in (CLIENT_PARTS, PARSER_PARTS, BUFFER_PARTS):
        if name in parts:
            monkeypatch.setitem(parts, name, Absent)


async def test_this_release_has_every_part() -> None:
    """Otherwise events cost several times as much, and only a log line tells."""
    client = DirectClient()
    await client.test_direct()
    assert client.is_direct
    assert not direct_client.missing_parts(client, BUFFER_PARTS)
    assert not client._direct


@pytest.mark.parametrize("name", [*CLIENT_PARTS, *PARSER_PARTS, "_process_msg"])
async def test_a_missing_part_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove(name, monkeypatch)
    client = DirectClient()
    await client.test_direct()
    assert not client.is_direct
    assert "nats-py is another one" in caplog.text


@pytest.mark.parametrize("name", ["_ps", "_process_msg", "_pending"])
async def test_without_a_part_requests_events_and_outages_are_as_before(
    name: str, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer
) -> None:
    """1. A verb answers, and its error travels in a header. 2. Events come once and in order, more
    than flow control lets through at once. 3. NATS is killed: nothing is lost."""
    remove(name, monkeypatch)
    bus = await Bus.connect(nats_server.url, "test")
    try:
        await bus.add_verbs("index", "0", "h", {"match": echo, "broken": fail})
        assert await bus.request("kvbm.v1.index.h.0.match", b"1", deadline_s=2) == b"1"
        with pytest.raises(RequestFailed, match="no"):
            await bus.request("kvbm.v1.index.h.0.broken", b"", deadline_s=2)
        async with publishing(bus) as publisher, bus.event_subscription() as events:
            put(publisher, 1, EVENTS)
            assert await read(events, EVENTS) == list(range(1, EVENTS + 1))
            nats_server.kill()
            put(publisher, EVENTS + 1, EVENTS + 10)
            await nats_server.start()
            seen = await read(events, EVENTS + 10)
            assert list(dict.fromkeys(seen)) == list(range(EVENTS + 1, EVENTS + 11))
    finally:
        await bus.close()


@pytest.mark.parametrize(
    "headers",
    [None, {"Nats-Msg-Id": "a:1:2", "Two": "words"}, {"Status": "503"},
     {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "3"}],
)  # fmt: skip
def test_headers_of_the_library_are_read_like_those_on_the_wire(
    headers: dict[str, str] | None,
) -> None:
    message = Msg(Client(), subject="a", reply="b", data=b"c", headers=headers)
    raw = direct_client._raw(message)
    assert (raw.subject, raw.payload, raw.reply) == ("a", b"c", "b")
    assert raw.headers == (headers or {})


def test_private_parts_of_the_library_are_used_in_one_module() -> None:
    """Goal: another release of the library is another version of one module."""
    folder = Path(direct_client.__file__).parent
    private = re.compile(r"(?<!self)\._(?!_)[a-z]\w*")
    users = {path.name for path in folder.glob("*.py") if private.search(path.read_text())}
    assert users <= {"direct_client.py", "bus.py"}
    assert private.findall((folder / "bus.py").read_text()) == ["._connect"]  # Its own.
