"""Event subscription: delivers every message of a stream in order, through reconnections.

It owns an ephemeral push consumer without acknowledgements. Messages carry two numbers: their
position in the stream, and their number in the consumer. A new consumer continues after the last
position delivered

- when a consumer number is missing: a message was lost on the way,
- in silence, without message or heartbeat: the consumer is gone,
- after every reconnection.

If the stream was replaced (deleted, or NATS lost its store), delivery restarts from its beginning:
readers know their events by (source, epoch, seq) and drop those that they have seen. Messages that
were lost with the old stream need not show as a gap, so `on_stream_lost` tells the reader. A start
at a position beyond the stream's end is one of a lost stream, too: the server would deliver nothing
until the new stream gets there.

The same callback reports messages that the stream dropped before a slow reader took them. A
subscription to the whole stream sees a gap in the positions; the callback runs when everything
before the gap was delivered. A subscription to a part has gaps anyway. There a watch compares,
every `CHECK_S`, the oldest message of the stream with the position up to which delivery is known to
be complete (`stream_positions`), and the callback runs a little later.

Flow control bounds the messages in flight: the server pauses until we answer its request, and we
answer when the reader has taken everything before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import islice, repeat, takewhile

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, KvbmError
from kvbm_common.nats.consumers import (
    HEARTBEAT_S,
    HEARTBEAT_S_MIN,
    Resume,
    Start,
    make_consumer,
    start_config,
)
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import (
    Backoff,
    Link,
    StreamInfo,
    StreamState,
    ensure_stream,
)
from kvbm_common.nats.marked_messages import checked
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.stream_positions import (
    Horizon,
    columns_of,
    columns_of_alike,
    is_event,
    positions_of,
    read_ends,
    read_stream,
)
from kvbm_common.nats.streams import StreamSpec

SILENCE_S = 3.0
"""After so long without a message or heartbeat the consumer is taken for lost."""
CHECK_S = 5.0
"""The interval at which a subscription to a part of a stream looks for dropped messages."""
BATCH_MAX = 128
"""Messages per batch: enough to amortise a wake-up, few enough to keep the event loop alive."""
CONTROL = "100"
"""The status header of heartbeats and flow control requests."""

_log = logging.getLogger(__name__)


class EventSubscription:
    """An async iterator over batches (lists) of messages. Close it, or use it in `async with`."""

    def __init__(
        self,
        link: Link,
        spec: StreamSpec,
        *,
        subject: str,
        start: Start,
        on_stream_lost: Callable[[], None] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        assert HEARTBEAT_S_MIN <= heartbeat_s < SILENCE_S, heartbeat_s
        self._heartbeat_s = heartbeat_s
        self.heard_s = time.monotonic()
        """When the last message or heartbeat came."""
        self._on_stream_lost = on_stream_lost or (lambda: None)
        self._whole = spec.is_all(subject) and start != "last_per_subject"
        """True: every message of the stream is wanted, so that a gap in positions is a loss."""
        self._watched = on_stream_lost is not None and not self._whole
        self._horizon = Horizon()
        self._consumer_name = ""
        self._watch: asyncio.Task[None] | None = None
        self._link = link
        self._spec = spec
        self._subject = subject
        self._start = start
        self._arrived: deque[RawMessage] = deque()
        self._arrival = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._position = 0
        self._consumer_position = 0
        self._stream: StreamInfo | None = None
        self._generation = -1
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._forget_reconnect = link.on_reconnect(self._arrival.set)
        self._closed = False
        self.refusal = ""
        """Why no consumer could be made the last time; empty: there is one, or none was tried."""

    @property
    def live(self) -> bool:
        """Tell whether a consumer is in place, so that silence means that nothing happens."""
        return self._unsubscribe is not None and self._generation == self._link.generation

    @property
    def created(self) -> datetime | None:
        """When the stream of the last batch was made."""
        return self._stream.created if self._stream is not None else None

    async def wait_caught_up(self, *, deadline_s: float) -> None:
        """Wait until everything that was kept at the start was delivered; needs a reader.

        Raises DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._caught_up.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._spec.name} not read within {deadline_s} s") from error

    async def __aenter__(self) -> EventSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> EventSubscription:
        return self

    async def __anext__(self) -> list[EventMessage]:
        if self._watched and self._watch is None:
            self._watch = asyncio.create_task(self._keep_watch(), name=f"watch {self._subject}")
        while not self._closed:
            self._arrival.clear()
            if not self.live:
                await self._make_consumer()
            if batch := await self._take():
                return batch
            await self._wait_arrival()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the subscription; a reader that waits sees the end of the iteration."""
        if not self._closed:
            self._closed = True
            self._forget_reconnect()
            if self._watch is not None:
                self._watch.cancel()
            await self._drop_consumer()
            self._arrival.set()

    async def _wait_arrival(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._arrival.wait()
        except TimeoutError:
            if self._link.connected:
                _log.info(
                    "%s: silence on %s; making a new consumer", self._spec.name, self._subject
                )
                await self._drop_consumer()

    async def _take(self) -> list[EventMessage]:
        batch: list[EventMessage] = []
        while self._arrived and len(batch) < BATCH_MAX:
            message = self._arrived[0]
            # The reply subject of an event has its position, so its headers are not read.
            if not is_event(message):
                self._arrived.popleft()
                # Any other status means that the consumer has ended.
                is_control = message.headers.get("Status") == CONTROL
                intact = is_control and await self._take_control(message)
            elif self._take_several(batch):
                continue
            else:
                place = positions_of(message.reply)
                if batch and self._whole and 0 < self._position < place[0] - 1:
                    break  # The loss is reported between two batches.
                self._arrived.popleft()
                intact = self._take_message(message, place, batch)
            if not intact:
                _log.info(
                    "%s: messages were lost on the way; making a new consumer", self._spec.name
                )
                await self._drop_consumer()
        return batch

    def _take_several(self, batch: list[EventMessage]) -> bool:
        """Take several messages at once, if no number is missing; False: none was taken."""
        arrived = list(islice(self._arrived, BATCH_MAX - len(batch)))
        placed = columns_of_alike([message.reply for message in arrived])
        if placed is None:
            arrived = list(takewhile(is_event, arrived))
            replies = [message.reply for message in arrived]
            placed = columns_of(replies) if len(replies) > 1 else None
        count = len(arrived)
        if placed is None:
            return False
        positions, consumer_positions, pending = placed
        taken = self._consumer_position
        if consumer_positions != list(range(taken + 1, taken + 1 + count)):
            return False
        before = self._position or positions[0] - 1
        if self._whole and positions != list(range(before + 1, before + 1 + count)):
            return False
        subjects, payloads, _, _ = zip(*arrived, strict=True)
        columns = zip(subjects, payloads, positions, strict=True)
        batch += map(tuple.__new__, repeat(EventMessage), columns)
        self._consumer_position = taken + count
        self._position = positions[-1]
        if 0 in pending:
            self._caught_up.set()
        for _ in arrived:
            self._arrived.popleft()
        return True

    def _take_message(
        self, message: RawMessage, place: tuple[int, int, int], batch: list[EventMessage]
    ) -> bool:
        stream_position, consumer_position, pending = place
        if consumer_position != self._consumer_position + 1:
            return False
        if self._whole and 0 < self._position < stream_position - 1:
            _log.warning("%s has dropped messages before they were read", self._spec.name)
            self._on_stream_lost()
        self._consumer_position = consumer_position
        self._position = stream_position
        batch.append(EventMessage(message.subject, message.payload, stream_position))
        if pending == 0:
            self._caught_up.set()
        return True

    async def _take_control(self, message: RawMessage) -> bool:
        """Answer flow control; check a heartbeat against what has arrived."""
        reply = message.reply or message.headers.get("Nats-Consumer-Stalled", "")
        if reply:
            try:
                await self._link.publish_raw(reply, b"")
            except KvbmError:
                return False
        if message.reply:
            return True
        return int(message.headers.get("Nats-Last-Consumer", "0")) == self._consumer_position

    async def _keep_watch(self) -> None:
        """Watch a part of a stream for messages that were dropped before they were delivered."""
        while True:
            await asyncio.sleep(CHECK_S)
            if not self.live:
                continue
            name, stream, position = self._consumer_name, self._stream, self._position
            try:
                if self._horizon.has_all((await read_stream(self._link, self._spec.name)).state):
                    continue
                consumer, now = await read_ends(self._link, self._spec.name, name)
            except KvbmError as error:
                _log.debug("%s: the stream's position cannot be read: %s", self._spec.name, error)
                continue
            if name != self._consumer_name or stream is None or now.created != stream.created:
                continue  # `_place_start` of the next consumer has compared.
            taken = self._consumer_position
            if self._horizon.advance(consumer, now.state, position=position, taken=taken):
                _log.warning("%s may have dropped messages of %s", self._spec.name, self._subject)
                self._on_stream_lost()

    async def _make_consumer(self) -> None:
        """Try until a consumer is in place (or the subscription is closed)."""
        backoff = Backoff()
        while not self._closed:
            if not self._link.connected:
                self._arrival.clear()
                await self._wait_arrival()
                backoff.reset()
                continue
            try:
                await self._try_consumer()
                self.refusal = ""
                return
            except KvbmError as error:
                self._refused(error)
                await self._drop_consumer()
                await backoff.sleep()

    def _refused(self, error: KvbmError) -> None:
        """Remember why there is no consumer; count and log a refusal by the server."""
        self.refusal = str(error)
        if isinstance(error, (BusUnavailable, DeadlineExceeded)):
            _log.debug("%s: no consumer yet: %s", self._spec.name, error)
            return
        self._link.note_refused(self._spec.name, error)

    async def _try_consumer(self) -> None:
        await self._drop_consumer()
        self._generation = self._link.generation
        stream = await ensure_stream(self._link, self._spec)
        self._place_start(stream)
        inbox = self._link.new_inbox()
        self._unsubscribe = await self._link.subscribe_raw(inbox, self._on_messages)
        self._consumer_name = name = inbox.rsplit(".", 1)[-1]
        start = start_config(self._start, self._position)
        info = await make_consumer(
            self._link, self._spec, name, inbox, self._subject, start,
            heartbeat_s=self._heartbeat_s,
        )  # fmt: skip
        if info.num_pending == 0:
            self._caught_up.set()

    def _place_start(self, stream: StreamInfo) -> None:
        """Decide where to continue, now that the stream's life and end are known."""
        created = self._stream.created if self._stream is not None else None
        self._stream = stream
        if created is None:
            if self._start == "new":
                # By number, so that a second consumer misses nothing that came meanwhile.
                self._position = stream.state.last_seq
            if isinstance(self._start, Resume):
                created, self._position = self._start
                self._horizon.begin(self._position, stream.state)
            elif not self._is_beyond(stream.state):
                self._horizon.begin(self._unwanted(stream.state), stream.state)
                return
        another = stream.created != created or stream.state.last_seq < self._position
        if another:
            _log.warning(
                "the stream %s was replaced; reading it from the beginning", self._spec.name
            )
            self._position = 0
            self._horizon.begin(stream.state.first_seq - 1, stream.state)
            self._on_stream_lost()
            if self._start != "last_per_subject":
                self._start = "all"
        elif 0 < self._position < stream.state.first_seq - 1:
            self._skip_dropped(stream.state)

    def _is_beyond(self, state: StreamState) -> bool:
        """Return whether the start is a position that this stream has not come to."""
        return isinstance(self._start, int) and self._start > state.last_seq + 1

    def _unwanted(self, state: StreamState) -> int:
        """Return the position up to which a new reader wants nothing: a drop there is no loss."""
        # A reader of the last message of each subject gets the rest elsewhere.
        from_now = self._start in ("new", "last_per_subject")
        return state.last_seq if from_now else state.first_seq - 1

    def _skip_dropped(self, state: StreamState) -> None:
        """Skip messages after our position that are gone.

        In a subscription to a part of the stream they may all be of other subjects.
        """
        self._position = state.first_seq - 1
        if self._watched and self._horizon.certain >= self._position:
            return
        _log.warning("%s has dropped messages that were not read", self._spec.name)
        self._horizon.begin(self._position, state)
        self._on_stream_lost()

    async def _drop_consumer(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        self._arrived.clear()
        self._consumer_position = 0
        if unsubscribe is not None:
            await unsubscribe()

    def _on_messages(self, messages: list[RawMessage]) -> None:
        self.heard_s = time.monotonic()
        self._arrived.extend(checked(self._link, self._spec, messages))
        self._arrival.set()
