"""Direct subscriptions: every message, once, in order, however the bytes come in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import nats.aio.client as library
import nats.errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.nats.direct_client import DirectClient
from kvbm_common.nats.raw_messages import RawMessage

from tests.waiting import wait_until

DIRECT, OTHER = 7, 8
STATUS = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 3\r\n\r\n"
PLAIN = b"NATS/1.0\r\nNats-Msg-Id: a:1:2\r\nTwo:  words \r\n\r\n"

Sent = tuple[int, str, str, bytes, bytes]
"""Subscription, subject, reply, headers and payload."""

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([DIRECT, DIRECT, OTHER]),
        st.sampled_from(["a", "a.b.c"]),
        st.sampled_from(["", "$JS.ACK.S.c.1.2.3.4.5"]),
        st.sampled_from([b"", b"", PLAIN, STATUS]),
        st.sampled_from([b"", b"x", b"\r\n", b"MSG a 7 1\r\nx\r\n", b"PING\r\n", b"y" * 5000]),
    ),
    max_size=12,
)


def as_bytes(sent: Sent) -> bytes:
    """A message as the server writes it."""
    subscription, subject, reply, headers, payload = sent
    words = ["HMSG" if headers else "MSG", subject, str(subscription), *([reply] if reply else [])]
    if headers:
        words.append(str(len(headers)))
    words.append(str(len(headers) + len(payload)))
    return " ".join(words).encode() + b"\r\n" + headers + payload + b"\r\n"


def as_message(sent: Sent) -> RawMessage:
    """What its reader should see."""
    _, subject, reply, block, payload = sent
    return RawMessage(subject, payload, reply, block)


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"", {}),
        (PLAIN, {"Nats-Msg-Id": "a:1:2", "Two": "words"}),
        (STATUS, {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "3"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0\r\nodd\r\nA:b:c\r\n\r\n", {"A": "b:c"}),
        (b"NATS/1.0\r\nA: \xff\r\n\r\n", {"A": "\ufffd"}),
    ],
)
def test_headers_are_read_when_they_are_asked_for(block: bytes, headers: dict[str, str]) -> None:
    assert RawMessage("a", b"", "", block).headers == headers


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.lists(st.integers(1, 6000), max_size=8), st.booleans())
def test_messages_come_whole_and_in_order_however_they_are_cut(
    messages: list[Sent], cuts: list[int], byte_by_byte: bool
) -> None:
    """1. Messages of a direct subscription and of another one, payloads that look like messages.
    2. The bytes come in pieces of any size. 3. Exactly the direct ones arrive, in order."""
    stream = b"".join(map(as_bytes, messages))
    ends = range(len(stream)) if byte_by_byte and len(stream) < 500 else sorted(cuts)
    pieces = [
        stream[begin:end] for begin, end in zip([0, *ends], [*ends, len(stream)], strict=True)
    ]
    arrived: list[RawMessage] = []

    async def read() -> None:
        client = DirectClient()
        client._direct[b"%d" % DIRECT] = arrived.extend
        for piece in pieces:
            await client._ps.parse(piece)
        assert not client._ps.buf, "nothing is left over"

    asyncio.run(read())
    wanted = [as_message(one) for one in messages if one[0] == DIRECT]
    assert arrived == wanted


async def test_a_subscription_that_fails_leaves_nothing() -> None:
    """Goal: the id of one that never was does not catch another one's messages."""
    client = DirectClient()
    with pytest.raises(nats.errors.Error):
        await client.subscribe_direct("no subject", lambda _: None)
    assert not client._direct


def test_who_is_forgotten_hears_nothing_more() -> None:
    arrived: list[RawMessage] = []
    message = as_bytes((DIRECT, "a", "", b"", b"x"))

    async def read() -> None:
        client = DirectClient()
        client._direct[b"%d" % DIRECT] = arrived.extend
        await client._ps.parse(message)
        del client._direct[b"%d" % DIRECT]
        await client._ps.parse(message)

    asyncio.run(read())
    assert len(arrived) == 1


async def test_a_connection_that_talks_is_probed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A silent one is probed each time, and an answer to a probe is no talk. 2. One that talks
    is probed every third time. 3. A caller that waits for the answer always gets one."""
    probes: list[object] = []

    async def probe(_: object, future: object = None) -> None:
        probes.append(future)

    monkeypatch.setattr(library.Client, "_send_ping", probe)
    client, message = DirectClient(), as_bytes((DIRECT, "a", "", b"", b"x"))
    client._direct[b"%d" % DIRECT] = lambda _: None
    for _ in range(2):
        await client._ps.parse(b"PONG\r\n")
        await client._send_ping()
    assert len(probes) == 2
    for _ in range(6):
        await client._ps.parse(message)
        await client._send_ping()
    assert len(probes) == 4
    await client._ps.parse(message)
    answer: asyncio.Future[bool] = asyncio.Future()
    await client._send_ping(answer)
    assert probes[4:] == [answer]


async def test_a_lost_connection_is_no_error_of_who_drains_it() -> None:
    """The library's `close` drains: an error there would leave its sockets and tasks behind."""

    async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        transport: Any = library.TcpTransport()  # type: ignore[attr-defined,no-untyped-call]
        await transport.connect(
            urlsplit(f"nats://127.0.0.1:{port}"), buffer_size=1024, connect_timeout=2
        )
        with contextlib.suppress(ConnectionError):
            assert await transport.readline() == b""
        transport.write(b"PING\r\n")
        await transport.drain()
        await transport.wait_closed()


async def test_two_wait_for_the_end_of_one_connection() -> None:
    """Goal: a wait that ends at its deadline cancels nobody else's; afterwards one more returns."""

    left = asyncio.Event()

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(stay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        transport: Any = library.TcpTransport()  # type: ignore[attr-defined,no-untyped-call]
        await transport.connect(
            urlsplit(f"nats://127.0.0.1:{port}"), buffer_size=1024, connect_timeout=2
        )
        await asyncio.gather(transport.wait_closed(), transport.wait_closed())
        await transport.wait_closed()
        await asyncio.wait_for(left.wait(), 5)


@pytest.mark.parametrize("turns", range(6))
async def test_an_end_that_is_not_waited_for_is_whole(nats_url: str, turns: int) -> None:
    """Goal: who gives up waiting for the end of a connection leaves no task of it behind."""
    before = asyncio.all_tasks()
    client = DirectClient()
    await client.connect(nats_url)
    await client.subscribe("a", cb=_nothing)
    closing = asyncio.create_task(client.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    await asyncio.wait_for(client.close(), 5)
    await wait_until(lambda: asyncio.all_tasks() <= before)


async def _nothing(_: object) -> None: ...
