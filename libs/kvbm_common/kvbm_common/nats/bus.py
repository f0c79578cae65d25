"""The bus: NATS as KVBM uses it. The client library is known here and in two modules beside it.

A `Bus` reconnects without end. While NATS is away, core messages are dropped and counted, requests
fail at once with BusUnavailable, and event publishers and subscriptions wait and then go on where
they were. Verbs are NATS micro services, so `nats micro ls` shows them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import nats
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.request import ERROR_CODE_HEADER

from kvbm_common.access.nats_access import NatsAccess, of_url
from kvbm_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvbmError,
    MessageTooLarge,
    NoResponder,
    NotPermitted,
)
from kvbm_common.nats.answers import Answers, request_failed
from kvbm_common.nats.bus_counters import BusCounters, label_of
from kvbm_common.nats.consumers import Start
from kvbm_common.nats.deadline import within
from kvbm_common.nats.direct_client import DirectClient, next_server
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import BACKOFF_S
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.streams import EVENTS, StreamLimits, StreamSpec
from kvbm_common.nats.verb_server import VerbHandler, VerbServer
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics

__all__ = ["Bus", "EventMessage", "EventPublisher", "EventSubscription", "VerbHandler"]

CONNECT_DEADLINE_S = 10.0
"""The time that the first connection may take by default, in seconds."""
PING_S = 3
"""A silent connection is probed this often; after two lost probes it is taken for dead."""
PENDING_MAX = 1_000
"""Messages that wait for one subscriber; the newest are dropped and counted beyond it."""
NO_RESPONDERS = "503"
"""The status header of NATS's own answer when no subscriber listens."""

_REFUSED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)

MessageHandler = Callable[[str, bytes], Awaitable[None] | None]
"""Takes the subject and the payload of a message."""
Unsubscribe = Callable[[], Awaitable[None]]

_logger = logging.getLogger(__name__)


class Bus:
    """One connection to NATS. Make it with `Bus.connect`, end it with `close`."""

    def __init__(self, access: NatsAccess, name: str, counters: Metrics) -> None:
        self.name = name
        self.counters = counters
        self.access = access
        self.limits: StreamLimits = access.streams
        """The limits of streams that an operator has set."""
        self.closed_by_server = asyncio.Event()
        """Set when the server ends the connection for good, because it finds the protocol broken.
        One that refuses the credentials is asked again: the file may have changed by then."""
        self._client = DirectClient(access)
        self._generation = 0
        self._connected = asyncio.Event()
        self._closing = False
        self._callbacks: list[Callable[[], None]] = []
        self._server = VerbServer(self._client, counters, guarded=access.guarded)
        self._patterns: dict[Subscription, str] = {}
        self._inbox = ""
        self._answers = Answers()
        self.packs_events: Callable[[], bool] = lambda: True
        """Tells whether every reader that is present reads packed events."""
        self.trouble = ""
        """The last complaint of the server or the library; empty: none."""
        self._log = OncePerKind(_logger)
        self._counts = BusCounters(counters)

    # ---- the connection ----------------------------------------------------------------------

    @classmethod
    async def connect(
        cls,
        where: NatsAccess | str,
        name: str,
        *,
        counters: Metrics | None = None,
        deadline_s: float = CONNECT_DEADLINE_S,
    ) -> Bus:
        """Connect; raises BusUnavailable when NATS does not answer before the deadline.

        `where` is an access, or a URL, in which there may be a user and a password.
        """
        access = of_url(where) if isinstance(where, str) else where
        bus = cls(access, name, counters or Metrics())
        try:
            await within(bus._connect(), deadline_s)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await bus.close()
            why = bus.trouble or str(error)
            text = f"no answer from {access.shown} within {deadline_s} s{': ' * bool(why)}{why}"
            raise BusUnavailable(text) from error
        return bus

    async def _connect(self) -> None:
        await self._client.test_direct()
        await self._client.connect(
            list(self.access.servers),
            name=self.name,
            inbox_prefix=self.access.inbox,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=BACKOFF_S[0],  # type: ignore[arg-type]  # The library sleeps it.
            reconnect_to_server_handler=next_server,
            ping_interval=PING_S,
        )
        self._client.check_introduced()
        self._inbox = self.new_inbox()
        await self.subscribe_raw(f"{self._inbox}.*", self._answers.give)
        self._connected.set()

    @property
    def connected(self) -> bool:
        """Tell whether NATS answers now."""
        return self._connected.is_set() and self._client.is_connected

    @property
    def guarded(self) -> bool:
        """Tell whether the server knows who connects, and so what each client may do."""
        return self.access.guarded

    @property
    def generation(self) -> int:
        """Grows with every reconnection: what was in flight before may be lost."""
        return self._generation

    async def wait_connected(self) -> None:
        """Wait, as long as it takes, until NATS answers."""
        await self._connected.wait()

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every reconnection; returns the function that ends it."""
        self._callbacks.append(callback)

        def forget() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return forget

    async def close(self) -> None:
        """End the connection. What is not sent yet is sent, if NATS is there."""
        self._closing = True
        await self._server.close()
        self._connected.clear()
        await self._client.close()

    # ---- messages ----------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Send to all subscribers. False: NATS is away; the message is dropped and counted."""
        try:
            await self.publish_raw(subject, payload)
        except (BusUnavailable, MessageTooLarge) as error:
            self._counts.dropped(error.code, subject)
            self._log.warning(f"publish_{error.code}", str(error))
            return False
        return True

    async def request(self, subject: str, payload: bytes, *, deadline_s: float) -> bytes:
        """Ask and wait for the answer.

        Raises RequestFailed (the peer's typed error), NoResponder, BusUnavailable and
        DeadlineExceeded.
        """
        reply = await self.request_raw(subject, payload, deadline_s=deadline_s)
        if ERROR_CODE_HEADER in reply.headers:
            raise request_failed(reply.headers[ERROR_CODE_HEADER], reply.payload)
        return reply.payload

    async def subscribe(
        self, subject: str, handler: MessageHandler, *, pending_max: int = PENDING_MAX
    ) -> Unsubscribe:
        """Call `handler` for every message, one after the other; returns what ends it.

        Beyond `pending_max` waiting messages the newest are dropped and counted. A KvbmError of
        the handler is counted and logged once per kind. On a guarded bus a message with a reply or
        headers is dropped: none of ours has them, what JetStream sends has.
        """

        async def on_message(message: Msg) -> None:
            if self.guarded and (message.reply or message.headers):
                self._counts.dropped("unexpected", subject)
                return
            try:
                outcome = handler(message.subject, message.data)
                if outcome is not None:
                    await outcome
            except Exception as error:
                self._server.count_failure(subject, error)

        begin = self._client.subscribe(subject, cb=on_message, pending_msgs_limit=pending_max)
        return await self._subscribed(subject, begin)

    async def add_verbs(
        self,
        kind: str,
        instance: str,
        host: str,
        verbs: Mapping[str, VerbHandler],
        *,
        shared: bool = False,
    ) -> None:
        """Serve verbs on `kvbm.v1.<kind>.<host>.<instance>.<verb>`.

        With `shared`, also on `kvbm.v1.<kind>.<verb>`, where one of all replicas answers. Requests
        of one verb are served concurrently.
        """
        await self._server.add_verbs(kind, instance, host, verbs, shared=shared)
        await self._client.flush()

    # ---- events ------------------------------------------------------------------------------

    def event_publisher(self, source: str, *, spec: StreamSpec = EVENTS) -> EventPublisher:
        """Make a publisher of the events of one source; its `run` must be running."""
        return EventPublisher(self, spec, source=source, counters=self.counters)

    def event_subscription(
        self,
        *,
        start: Start = "all",
        subject: str = EVENTS.subjects[0],
        spec: StreamSpec = EVENTS,
        on_stream_lost: Callable[[], None] | None = None,
    ) -> EventSubscription:
        """Make a subscription to events, in batches, that survives everything."""
        return EventSubscription(
            self, spec, subject=subject, start=start, on_stream_lost=on_stream_lost
        )

    # ---- Link: what JetStream needs ----------------------------------------------------------

    def note_refused(self, stream: str, error: KvbmError) -> None:
        """Count and log that the server has refused to let this connection read a stream."""
        self._counts.refused(stream, error.code)
        self._log.warning("refused", f"{stream} cannot be read as usual: {error}")

    def new_inbox(self) -> str:
        """Return a subject on which no other client listens."""
        return self._client.new_inbox()

    async def publish_raw(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send; raises BusUnavailable, MessageTooLarge."""
        if not self.connected:
            raise BusUnavailable("NATS is away")
        try:
            await self._client.publish(
                subject, payload, reply=reply, headers=dict(headers) if headers else None
            )
        except nats.errors.MaxPayloadError as error:
            text = f"{len(payload)} bytes on {subject}, the server takes {self._client.max_payload}"
            raise MessageTooLarge(text) from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"NATS is away: {error}") from error

    async def request_raw(
        self,
        subject: str,
        payload: bytes,
        *,
        deadline_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> RawMessage:
        """Send and wait for one reply.

        Raises BusUnavailable, NoResponder, NotPermitted, DeadlineExceeded.
        """
        with self._answers.asking(subject) as (token, answer):
            try:
                async with asyncio.timeout(deadline_s):
                    inbox = f"{self._inbox}.{token}"
                    await self.publish_raw(subject, payload, reply=inbox, headers=headers)
                    reply = await answer
            except TimeoutError as error:
                raise DeadlineExceeded(f"no answer on {subject} within {deadline_s} s") from error
        if reply.headers.get("Status") == NO_RESPONDERS:
            raise NoResponder(f"no service answers on {subject}")
        return reply

    async def subscribe_raw(
        self, subject: str, callback: Callable[[list[RawMessage]], None]
    ) -> Unsubscribe:
        """Call back with messages, as they are read; returns the function that ends it.

        Nothing waits between the socket and the callback: the reader bounds what is in flight, by
        flow control or a window.
        """

        def take(messages: list[RawMessage]) -> None:
            try:
                callback(messages)
            except Exception as error:
                self._log.warning("nats", f"{type(error).__name__} {error}")

        return await self._subscribed(subject, self._client.subscribe_direct(subject, take))

    # ---- inside ------------------------------------------------------------------------------

    async def _subscribed(self, subject: str, begin: Awaitable[Subscription]) -> Unsubscribe:
        try:
            subscription = await begin
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot subscribe to {subject}: {error}") from error
        self._patterns[subscription] = label_of(subject)

        async def unsubscribe() -> None:
            self._patterns.pop(subscription, None)
            self._client.forget(subscription)
            try:
                await subscription.unsubscribe()
            except nats.errors.Error as error:
                _logger.debug("unsubscribing %s: %s", subject, error)

        return unsubscribe

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            label = self._patterns.get(error.sub, "other")
            self._counts.dropped("slow_consumer", label)
            self._log.warning("slow_consumer", f"messages of {label} are dropped")
            return
        said = str(error) or type(error).__name__
        # The server that refuses a client ends the connection, too: its words say more.
        if not (self.trouble and isinstance(error, ConnectionError)):
            self.trouble = said
        if refused := _REFUSED.search(said):
            text = f"{self.name}: NATS does not let this role publish on {refused[1]}"
            self._answers.fail(NotPermitted(text), subject=refused[1].lower())
            self._log.warning("not_permitted", text)
        elif self._inbox:  # Before, the error of `connect` says it.
            self._log.warning("nats", f"{type(error).__name__} {error}")

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        # The library would send what it has buffered before its users learn that NATS is back, and
        # thus ahead of the older events that a publisher sends again.
        self._client.drop_unsent()
        self._answers.fail(BusUnavailable("NATS went away before it answered"))
        if not self._closing:
            _logger.warning("NATS is away")

    async def _on_reconnected(self) -> None:
        self._generation += 1
        self._counts.reconnected()
        self._connected.set()
        _logger.info("NATS is back")
        for callback in list(self._callbacks):
            callback()

    async def _on_closed(self) -> None:
        self._connected.clear()
        if not self._closing:
            _logger.error("NATS ended the connection: %s", self._client.last_error)
            self.closed_by_server.set()
