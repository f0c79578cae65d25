"""A publisher of events: a bounded outbox in front of a JetStream stream.

```
 publish_event() ──► gathered
                        │ its turn comes, or enough for a message: packed
 publish() ──► | unsent … | in flight (window) | ──► acknowledged, gone
               ▲ room at the end                └─ failure or reconnection: all is unsent again
```

Events that a source publishes before the publisher's task has its turn go into one message
(`wire/packed_events.py`). A packed message is never changed, so that a repeated one is a duplicate.
While a reader of JSON only is present on the bus, each event has a message of its own.

Order is kept because one connection sends in order, and after any failure sending restarts from the
first message that was not acknowledged. The message id (`<source>:<epoch>:<seq>`) lets the server
drop what it already has. When the outbox is full the oldest message is dropped and counted:
consumers see a gap in `seq` and ask for a snapshot. An event whose subject NATS does not take is
dropped and counted at once: it would be sent without end, and block all behind it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, KvbmError, MessageTooLarge
from kvbm_common.nats.event_packer import EventPacker
from kvbm_common.nats.jetstream import Backoff, JetStreamError, Link, ensure_stream, raise_for_error
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.streams import MARK, StreamSpec
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.events import Event, event_codec
from kvbm_common.wire.packed_events import can_pack, json_subject, pack, packed_subject, stamped
from kvbm_common.wire.raw_events import RawRemoved, RawStored, as_json

OUTBOX_MAX = 10_000
"""Messages kept while NATS is away: minutes of events of a busy tier."""
OUTBOX_BYTES_MAX = 64 * 1024 * 1024
"""Bytes kept while NATS is away; whichever limit comes first."""
WINDOW = 256
"""Messages in flight at most: at 1 ms per acknowledgement far more than a source produces."""
ACK_DEADLINE_S = 3.0
"""An acknowledgement that takes longer is taken for lost."""
SUBJECT = re.compile(r"[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*")
"""A subject that every server takes: no empty word, no wildcard, no blank."""
EXCEEDS_MAX_MSG_SIZE = 10054
"""nats-server's error code for a message that an operator's limit of the stream refuses."""
NEW_CONNECTION = "new connection"
"""A reason to start again without an error."""


@dataclass(slots=True)
class _Entry:
    number: int
    subject: str
    payload: bytes
    message_id: str
    source: str
    """The subject without its kind; several engines share a consolidator's outbox."""
    events: int
    """The number of events in the message."""
    acknowledged: bool = False
    sent_s: float = 0.0


class EventPublisher:
    """Publishes the events of one source, in order. `run` does the work and must be running."""

    def __init__(
        self,
        link: Link,
        spec: StreamSpec,
        *,
        source: str,
        counters: Metrics,
        metrics_prefix: str = "kvbm",
        outbox_max: int = OUTBOX_MAX,
        window: int = WINDOW,
    ) -> None:
        assert window > 0
        assert outbox_max > 0
        self._link = link
        self._spec = spec
        self._source = source
        self._outbox_max = outbox_max
        self._window = window
        self._outbox: deque[_Entry] = deque()
        self._outbox_bytes = 0
        self._prefix = spec.subjects[0].removesuffix(".>")
        self._packer = EventPacker()
        self._waiting: Counter[str] = Counter()
        """Messages in the outbox, by source."""
        self._pending = 0
        """Events in the outbox."""
        self._sent = 0
        """The first so many entries of the outbox are in flight."""
        self._moved_s = 0.0
        """When the first message was acknowledged last: a slow server answers in order."""
        self._next_number = 0
        self._failure = ""
        self._dropped_count = 0
        """Events that were dropped because the outbox was full."""
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inbox = link.new_inbox()
        self._log = OncePerKind(logging.getLogger(__name__))
        self._published = counters.counter(
            f"{metrics_prefix}_events_published_total", "Events that JetStream has acknowledged."
        )
        self._messages = counters.counter(
            f"{metrics_prefix}_event_messages_total", "Messages in which these events were."
        )
        self._dropped = counters.counter(
            f"{metrics_prefix}_events_dropped_total",
            "Events that were never published; consumers see a gap.",
            labels=("reason",),
        )
        for reason in ("outbox_full", "too_large", "invalid_subject"):
            self._dropped.labels(reason=reason)  # An alert sees no first loss in a late series.
        self._depth = counters.gauge(
            f"{metrics_prefix}_events_outbox",
            "Events that wait for publication or acknowledgement.",
        )

    @property
    def pending(self) -> int:
        """Events that are not acknowledged yet."""
        return self._pending + self._packer.event_count

    def publish_event(self, event: Event | RawStored | RawRemoved) -> None:
        """Publish an event, with others of its source in one message if more come before the turn
        of `run`. Never waits. An event without a time stamp gets that of its message.
        """
        if not (self._link.packs_events() and can_pack(event)):
            self._put_gathered()
            event = stamped(as_json(event), _now_ms())
            subject, payload = json_subject(self._prefix, event), event_codec.encode(event)
            self._put(subject, payload, epoch=event.epoch, seq=event.seq, events=1)
            return
        self._packer.add(event)
        if self._packer.is_full:
            self._put_gathered()
        self._depth.set(self.pending)
        self._empty.clear()
        self._work.set()

    def usage(self) -> Usage:
        """Return how full the outbox is, in messages; what was dropped, in events."""
        return Usage(len(self._outbox), self._outbox_max, self._dropped_count)

    def bytes_usage(self) -> Usage:
        """Return how full the outbox is, by the bytes of its messages."""
        return Usage(self._outbox_bytes, OUTBOX_BYTES_MAX)

    def publish(self, subject: str, payload: bytes, *, epoch: int, seq: int) -> None:
        """Put the message of one event in the outbox, after all that was gathered."""
        self._put_gathered()
        self._put(subject, payload, epoch=epoch, seq=seq, events=1)

    def _put_gathered(self) -> None:
        for events in self._packer.take(_now_ms()):
            first, subject = events[0], packed_subject(self._prefix, events[0])
            self._put(subject, pack(events), epoch=first.epoch, seq=first.seq, events=len(events))

    def _put(self, subject: str, payload: bytes, *, epoch: int, seq: int, events: int) -> None:
        """Put one message in the outbox. A full outbox drops its oldest message.

        The last message of each source is kept while there is another to drop: if its source fell
        silent, no reader would see the gap.
        """
        if not SUBJECT.fullmatch(subject):
            self._dropped.labels(reason="invalid_subject").inc(events)
            self._log.warning("invalid_subject", f"{subject!r} is no subject of an event")
            self._note_rest()
            return
        while self._outbox and (
            len(self._outbox) >= self._outbox_max
            or self._outbox_bytes + len(payload) > OUTBOX_BYTES_MAX
        ):
            self._spare_last_events()
            gone = self._pop_oldest()
            self._dropped_count += gone.events
            self._dropped.labels(reason="outbox_full").inc(gone.events)
            self._log.warning("outbox_full", "the outbox is full: its oldest events are dropped")
        message_id = f"{self._source}:{epoch}:{seq}"
        self._append(subject, payload, message_id, events)
        self._depth.set(self.pending)
        self._empty.clear()
        self._work.set()

    async def flush(self, *, deadline_s: float) -> None:
        """Wait until every event is acknowledged; raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError as error:
            text = f"{self.pending} events not acknowledged after {deadline_s} s"
            raise DeadlineExceeded(text) from error

    async def run(self) -> None:
        """Send and watch acknowledgements until cancelled."""
        forget = self._link.on_reconnect(lambda: self._fail(NEW_CONNECTION))
        # A stream that is made while a window is sent would have the later events only.
        self._fail(NEW_CONNECTION)
        unsubscribe = await self._subscribe()
        backoff = Backoff()
        try:
            while True:
                await self._wait_work()
                if self._failure:
                    await self._recover(backoff)
                else:
                    await self._send_window()
                    backoff.reset()
        finally:
            forget()
            await unsubscribe()

    async def _subscribe(self) -> Callable[[], Awaitable[None]]:
        while True:
            await self._link.wait_connected()
            try:
                return await self._link.subscribe_raw(f"{self._inbox}.*", self._on_acks)
            except BusUnavailable:
                continue

    async def _wait_work(self) -> None:
        """Wait for something to send or a failure; an overdue acknowledgement is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ACK_DEADLINE_S if self._outbox else None):
                await self._work.wait()
        self._work.clear()
        if self._is_overdue():
            self._failure = self._failure or "no acknowledgement"

    def _is_overdue(self) -> bool:
        """Tell whether the first message has waited too long, also after those before it."""
        if not self._sent:
            return False
        since_s = max(self._outbox[0].sent_s, self._moved_s)
        return time.monotonic() - since_s > ACK_DEADLINE_S

    async def _recover(self, backoff: Backoff) -> None:
        """Wait for NATS and the stream after a failure, then start again from the first entry."""
        reason, self._failure = self._failure, ""
        await self._link.wait_connected()
        self._sent = 0
        if reason != NEW_CONNECTION:
            self._log.warning("publish_failed", f"{reason}; sending again from the first event")
            await backoff.sleep()
        try:
            await ensure_stream(self._link, self._spec)
        except KvbmError as error:
            self._fail(str(error))
        self._work.set()

    async def _send_window(self) -> None:
        if self._sent < self._window:  # With a full window more are gathered, for fewer messages.
            self._put_gathered()
        while self._sent < min(len(self._outbox), self._window) and not self._failure:
            entry = self._outbox[self._sent]
            self._sent += 1
            if entry.acknowledged:
                continue
            entry.sent_s = time.monotonic()
            try:
                await self._link.publish_raw(
                    entry.subject,
                    entry.payload,
                    reply=f"{self._inbox}.{entry.number}",
                    headers={MARK: self._spec.name, "Nats-Msg-Id": entry.message_id},
                )
            except BusUnavailable as error:
                self._fail(str(error))
            except MessageTooLarge as error:
                self._drop_too_large(entry.number, str(error))

    def _on_acks(self, messages: list[RawMessage]) -> None:
        for message in messages:
            self._on_ack(message)

    def _on_ack(self, message: RawMessage) -> None:
        if message.headers.get("Status") == "503":
            self._fail(f"no stream takes {self._spec.subjects[0]}")
            return
        try:
            raise_for_error(message.payload)
        except JetStreamError as error:
            if error.server_code == EXCEEDS_MAX_MSG_SIZE:
                self._drop_too_large(_number_of(message), str(error))
            else:
                self._fail(str(error))
            return
        if events := self._acknowledge(_number_of(message)):
            self._published.inc(events)
            self._messages.inc()

    def _drop_too_large(self, number: int, text: str) -> None:
        """Drop an entry that the server always refuses: others wait behind it."""
        self._dropped.labels(reason="too_large").inc(self._acknowledge(number))
        self._log.warning("too_large", text)

    def _acknowledge(self, number: int) -> int:
        """Mark an entry and return how many events it has; 0 if it is gone already (dropped, or
        acknowledged twice)."""
        index = number - self._outbox[0].number if self._outbox else -1
        if not 0 <= index < len(self._outbox) or self._outbox[index].acknowledged:
            return 0
        entry = self._outbox[index]
        entry.acknowledged = True
        while self._outbox and self._outbox[0].acknowledged:
            self._pop_oldest()
            self._moved_s = time.monotonic()
        self._note_rest()
        return entry.events

    def _note_rest(self) -> None:
        """Wake the sender, or those who wait for an empty outbox, after an entry has gone."""
        if self._outbox or self._packer.event_count:
            self._work.set()
        else:
            self._empty.set()
        self._depth.set(self.pending)

    def _append(self, subject: str, payload: bytes, message_id: str, events: int) -> None:
        source = subject.rpartition(".")[0]
        entry = _Entry(self._next_number, subject, payload, message_id, source, events)
        self._outbox.append(entry)
        self._pending += events
        self._outbox_bytes += len(payload)
        self._waiting[source] += 1
        self._next_number += 1

    def _spare_last_events(self) -> None:
        """Move entries that are their source's last from the front of the outbox to its end.

        Then the oldest entry may be dropped. Order counts within a source only.
        """
        for _ in range(len(self._waiting)):
            if self._waiting[self._outbox[0].source] > 1:
                return
            last = self._pop_oldest()
            self._append(last.subject, last.payload, last.message_id, last.events)

    def _pop_oldest(self) -> _Entry:
        entry = self._outbox.popleft()
        self._outbox_bytes -= len(entry.payload)
        self._pending -= entry.events
        self._sent = max(0, self._sent - 1)
        self._waiting[entry.source] -= 1
        if not self._waiting[entry.source]:
            del self._waiting[entry.source]
        return entry

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._work.set()


def _number_of(ack: RawMessage) -> int:
    """Return the number of the entry that an acknowledgement is for."""
    return int(ack.subject.rsplit(".", 1)[-1])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
