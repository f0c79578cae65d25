"""Direct client: nats-py with direct subscriptions, which take messages as they are read.

The library gives every subscription a queue and a task, and its parser copies: that is most of the
cost of a small message. For a *direct* subscription, messages are cut out of the bytes of one read,
and handed over together, at once. Everything else, and each message that is not complete yet, takes
the library's way; a message that came in pieces arrives here again, in its place.

That needs private parts of the library, and this module is the only one that uses any. A client
looks for them when it is made, and sends itself a message before it connects. In a release without
them, subscriptions take the library's public way: slower, but the same messages in the same order.

The hook for the CONNECT message is private, too. There the client checks that the connection is
encrypted, if it has to be, and reads the files with credentials again. A release without that hook
gets no credentials, and the connection is closed (`check_introduced`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from nats.aio import client as library
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import AuthorizationError, Error
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

from kvbm_common.access.nats_access import NatsAccess
from kvbm_common.access.nats_credentials import Credentials
from kvbm_common.errors import KvbmError
from kvbm_common.nats.jetstream import BACKOFF_S
from kvbm_common.nats.raw_messages import LINE_END, RawMessage, cut_front

MESSAGES = (b"MSG ", b"HMSG ")
PONG = b"PONG\r\n"
HELD_BYTES_MAX = 65_536
"""The longest part of a message that is held until its end comes. Each read copies it again, so
longer messages are left to the library's parser."""

library.DEFAULT_BUFFER_SIZE = 131_072
"""Read at once, by every client of this process: the library's 32 KiB are few events."""

CLOSED_WITHIN_S = 0.5


class _Transport(TcpTransport):
    """A connection that closes by a deadline: over TLS its end may never be announced."""

    async def drain(self) -> None:
        """Send what is buffered. The reader reports a lost connection: an error here would end the
        library's `close` in the middle."""
        with contextlib.suppress(ConnectionError):
            await super().drain()  # type: ignore[no-untyped-call]

    async def wait_closed(self) -> None:
        """Wait until the connection is closed; after the deadline cut it off.

        All that wait share one future. A wait that ends early must not cancel it: to the others
        that would look like a cancellation of their own task.
        """
        closed = asyncio.ensure_future(super().wait_closed())  # type: ignore[no-untyped-call]
        closed.add_done_callback(_look_at)
        await asyncio.wait({closed}, timeout=CLOSED_WITHIN_S)
        if not closed.done() and self._io_writer is not None:
            self._io_writer.transport.abort()


def _look_at(closed: asyncio.Future[None]) -> None:
    """Take the error of a closed connection, which asyncio would log otherwise."""
    if not closed.cancelled():
        closed.exception()


library.TcpTransport = _Transport  # type: ignore[attr-defined]


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether a line of asyncio says something.

    The library's streams begin without TLS, and asyncio warns at the end of each encrypted one.
    """
    return "returning true from eof_received()" not in str(record.msg)


# Here, and not where logs are set up: a command has none, and its operator would read the line.
logging.getLogger("asyncio").addFilter(_is_news)

Take = Callable[[list[RawMessage]], None]
"""Takes what was read together. It never raises, and never waits."""

CLIENT_PARTS: dict[str, type] = {"_ps": Parser, "_sid": int}
PARSER_PARTS: dict[str, type] = {"state": int, "needed": int, "buf": bytearray}
BUFFER_PARTS: dict[str, type] = {"_pending": list, "_pending_data_size": int}
PING_PARTS: dict[str, type] = {"_pings_outstanding": int}
"""Private attributes of the library that are used here."""
PROBE = (b"0", b"MSG probe 0 5\r\nhello\r\n")
"""A subscription that no client has, and a message for it."""

PINGS_SPARED = 2
"""Pings in a row that are left out while messages come. The next one goes out: what the server
sends does not prove that it hears us."""

UNKNOWN_CLIENT = ("authorization violation", "authentication expired", "authentication revoked")
"""Errors of a server that does not accept a client's credentials any more."""

log = logging.getLogger(__name__)


class Unintroduced(Error):
    """A server to which this client sends no credentials; the text says why."""


def missing_parts(of: object, parts: Mapping[str, type]) -> list[str]:
    """Return the names of the attributes that an object lacks, or has of another type."""
    return [name for name, kind in parts.items() if not isinstance(getattr(of, name, None), kind)]


def next_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """Return the least tried server and the pause before, longer each time, with some jitter."""
    server = min(servers, key=lambda candidate: candidate.reconnects)
    pause_s = BACKOFF_S[min(server.reconnects, len(BACKOFF_S) - 1)]
    return server, pause_s * random.uniform(0.5, 1.0)


def reply_of(request: Any) -> str:
    """Return where the library would send the answer to a request of a micro service."""
    reply = getattr(getattr(request, "_msg", None), "reply", "")
    return reply if isinstance(reply, str) else ""


class DirectClient(Client):
    """A client some of whose subscriptions are direct."""

    def __init__(self, access: NatsAccess | None = None) -> None:
        super().__init__()
        self._access = access
        self._introduced = False
        self._ending: asyncio.Task[None] | None = None
        self._direct: dict[bytes, Take] = {}
        """By the id of the subscription, as it stands in the protocol."""
        self._ids: dict[Subscription, bytes] = {}
        self._has_heard = False
        """True: some bytes came since the last probe of the connection."""
        self._pings_spared = 0
        missing = missing_parts(self, CLIENT_PARTS) or missing_parts(self._ps, PARSER_PARTS)
        self.is_direct = not missing
        """False: subscriptions take the library's public way."""
        if missing:
            self._fall_back(f"it has no {', '.join(missing)}")
        else:
            self._ps = _DirectParser(self, self._direct)

    async def test_direct(self) -> None:
        """Take a message whole, in two pieces, and by the library's parser, as a long one comes.

        Unless it arrives three times, fall back.
        """
        if not self.is_direct:
            return
        subscription, message = PROBE
        arrived: list[RawMessage] = []
        self._direct[subscription] = arrived.extend
        try:
            for piece in (message, message[:9], message[9:]):
                await self._ps.parse(piece)
            await Parser.parse(self._ps, message)
            text = f"{len(arrived)} of 3 messages arrived"
        except Exception as error:  # Whatever another release does, its public way is left.
            arrived.clear()
            text = repr(error)
        finally:
            del self._direct[subscription]
        if [one.payload for one in arrived] != [b"hello"] * 3:
            self._ps = Parser(self)
            self._fall_back(text)

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The context of the next connection, from what is in the files now."""
        if self._access is None or not self._access.tls:
            return super().ssl_context
        try:
            return self._access.tls.context()
        except KvbmError as error:
            raise Unintroduced(str(error)) from error

    def check_introduced(self) -> None:
        """Raise Unintroduced unless the connection is what the access asks for."""
        if self._access is not None and not self._introduced:
            raise Unintroduced("nats-py is another one than this was made for: it cannot be used")

    async def close(self) -> None:
        """End the connection, whether or not the caller goes on waiting.

        The library calls a client closed when it begins to close it: half an end would leave tasks
        and a socket behind, and a second call would do nothing.
        """
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(super().close(), name="end of a NATS connection")
        await asyncio.shield(self._ending)

    async def _process_connect_init(self) -> None:
        """Connect to a server as a client; close the connection if that fails.

        The library would leave the connection open, at every try.
        """
        try:
            await super()._process_connect_init()
        except BaseException:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
            raise

    def _connect_command(self) -> bytes:
        """Return the CONNECT message, once credentials may be sent."""
        if self._access is not None:
            self._introduce(self._access)
        return super()._connect_command()

    def _introduce(self, access: NatsAccess) -> None:
        """Take the credentials that the files have now; require TLS if the access wants it."""
        if access.wants_tls and self._transport_fact("ssl_object") is None:
            raise Unintroduced("the server speaks no TLS, and nothing else will do")
        try:
            found = access.credentials() or Credentials()
        except KvbmError as error:
            raise Unintroduced(str(error)) from error
        self.options["user"] = found.user or None
        self.options["password"] = found.password or None
        self._signature_cb = found.sign if found.seed else None
        self._user_jwt_cb = found.jwt.encode if found.jwt else None
        self._public_nkey = found.public_key if found.seed and not found.jwt else None
        self._auth_configured = access.guarded
        self._introduced = True

    def _transport_fact(self, name: str) -> object:
        writer = getattr(self._transport, "_io_writer", None)
        return writer.get_extra_info(name) if writer is not None else None

    async def _process_err(self, err_msg: str) -> None:
        """Connect again when a server no longer accepts our credentials and closed the connection.

        The library would not retry, but the file may have other credentials by now.
        """
        if any(text in err_msg for text in UNKNOWN_CLIENT):
            await self._process_op_err(AuthorizationError())
        else:
            await super()._process_err(err_msg)

    def _fall_back(self, why: str) -> None:
        self.is_direct = False
        log.warning("nats-py is another one than this was made for (%s): messages cost more", why)

    async def subscribe_direct(self, subject: str, take: Take) -> Subscription:
        """Call `take` with the messages of a new subscription, as they are read."""
        if not self.is_direct:
            return await self._subscribe_publicly(subject, take)
        number = self._sid + 1
        subscription_id = b"%d" % number
        self._direct[subscription_id] = take
        try:
            subscription = await self.subscribe(subject, cb=_never)
        except BaseException:
            del self._direct[subscription_id]  # The id may be used again.
            raise
        if self._sid != number:
            del self._direct[subscription_id]
            await subscription.unsubscribe()
            self._fall_back(f"subscription {self._sid} instead of {number}")
            return await self._subscribe_publicly(subject, take)
        self._ids[subscription] = subscription_id
        return subscription

    async def _subscribe_publicly(self, subject: str, take: Take) -> Subscription:
        async def on_message(message: Msg) -> None:
            take([_raw(message)])

        # Without limits: the reader bounds what is in flight.
        return await self.subscribe(
            subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )

    def forget(self, subscription: Subscription) -> None:
        """Stop treating a subscription as direct."""
        self._direct.pop(self._ids.pop(subscription, b""), None)

    def heard(self) -> None:
        """Note that the connection lives: bytes came that are no answer to a probe."""
        self._has_heard = True

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """Send a probe, unless the connection has just shown that it lives: each one wakes the
        process twice. A caller that waits for the answer (`flush`) always gets one."""
        heard, self._has_heard = self._has_heard, False
        has_waiter = future is not None
        is_due = has_waiter or not heard or self._pings_spared >= PINGS_SPARED
        if not is_due and not missing_parts(self, PING_PARTS):
            self._pings_spared += 1
            self._pings_outstanding = 0
            return
        self._pings_spared = 0
        await super()._send_ping(future)

    def drop_unsent(self) -> None:
        """Drop what waits to be sent; without the private parts it is sent after a reconnection."""
        if not missing_parts(self, BUFFER_PARTS):
            self._pending = []
            self._pending_data_size = 0

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        """Take each message that the library's parser has put together."""
        take = self._direct.get(b"%d" % sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        message = RawMessage(bytes(subject).decode(), data, bytes(reply).decode(), headers or b"")
        take([message])


async def _never(_: object) -> None:
    raise AssertionError("a message of a direct subscription in the library's queue")


def _raw(message: Msg) -> RawMessage:
    """Return a message of the library as one that was read."""
    headers = dict(message.headers or {})
    if not headers:
        return RawMessage(message.subject, message.data, message.reply)
    status = f"{headers.pop('Status', '')} {headers.pop('Description', '')}".strip()
    lines = [f"NATS/1.0 {status}".rstrip(), *(f"{key}: {text}" for key, text in headers.items())]
    block = "\r\n".join([*lines, "", ""]).encode()
    return RawMessage(message.subject, message.data, message.reply, block)


class _DirectParser(Parser):
    """A parser that takes complete messages of direct subscriptions from the front of a read."""

    def __init__(self, client: DirectClient, direct: Mapping[bytes, Take]) -> None:
        super().__init__(client)
        self._client = client
        self._direct = direct

    async def parse(self, data: bytes = b"") -> None:
        if data != PONG:
            self._client.heard()
        if self.state == AWAITING_MSG_PAYLOAD:
            missing = self.needed + len(LINE_END) - len(self.buf)
            await super().parse(data[:missing])
            data = data[missing:]
        elif self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        rest = self._take_front(data) if data else b""
        if len(rest) < HELD_BYTES_MAX and rest.startswith(MESSAGES) and not self._is_whole(rest):
            self.buf.extend(rest)
        elif rest:
            await super().parse(rest)

    def _is_whole(self, data: bytes) -> bool:
        """Return whether a message begins here that is all here, so that it is not ours."""
        return bool(cut_front(data, 0)[1])

    def _take_front(self, data: bytes) -> bytes:
        """Hand over the leading messages of direct subscriptions; return the remaining bytes."""
        at = 0
        while True:
            subscription, messages, end = cut_front(data, at)
            take = self._direct.get(subscription)
            if take is None or not messages:
                return data[at:]
            take(messages)
            at = end
