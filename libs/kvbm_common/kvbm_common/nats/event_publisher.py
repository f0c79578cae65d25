"""A publisher of events: a bounded outbox in front of a JetStream stream.

```
 publish() ──► | unsent … | in flight (window) | ──► acknowledged, gone
               ▲ room at the end                └─ failure or reconnection: all is unsent again
```

Order is kept because one connection sends in order and after any failure sending restarts from the
first message that was not acknowledged; the message id (`<source>:<epoch>:<seq>`) lets the server
drop what it already has. When the outbox is full the oldest message is dropped and counted:
consumers see a gap in `seq` and ask for a snapshot. An event on no subject of NATS is dropped and
counted at once: it would be sent again and again, and hold up all behind it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, KvbmError, MessageTooLarge
from kvbm_common.nats.jetstream import Backoff, JetStreamError, Link, ensure_stream, raise_for_error
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.streams import MARK, StreamSpec
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics

OUTBOX_MAX = 10_000
"""Messages kept while NATS is away: minutes of events of a busy tier."""
OUTBOX_BYTES_MAX = 64 * 1024 * 1024
"""Bytes kept while NATS is away; whichever limit comes first."""
WINDOW = 256
"""Messages in flight: at 1 ms per acknowledgement far more than a source produces."""
ACK_DEADLINE_S = 3.0
"""An acknowledgement that takes longer is taken for lost."""
SUBJECT = re.compile(r"[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*")
"""A subject that every server takes: no empty word, no wildcard, no blank."""
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
        self._waiting: Counter[str] = Counter()
        """Events in the outbox, by source."""
        self._sent = 0
        """The first so many entries of the outbox are in flight."""
        self._next_number = 0
        self._failure = ""
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inbox = link.new_inbox()
        self._log = OncePerKind(logging.getLogger(__name__))
        self._published = counters.counter(
            "kvbm_events_published_total", "Events that JetStream has acknowledged."
        )
        self._dropped = counters.counter(
            "kvbm_events_dropped_total",
            "Events that were never published; consumers see a gap.",
            labels=("reason",),
        )
        self._depth = counters.gauge(
            "kvbm_events_outbox", "Events that wait for publication or acknowledgement."
        )

    @property
    def pending(self) -> int:
        """Events that are not acknowledged yet."""
        return len(self._outbox)

    def publish(self, subject: str, payload: bytes, *, epoch: int, seq: int) -> None:
        """Put one event in the outbox. Never waits; a full outbox drops its oldest event.

        The last event of each source is kept while there is another to drop: if its source fell
        silent, no reader would see the gap.
        """
        if not SUBJECT.fullmatch(subject):
            self._dropped.labels(reason="invalid_subject").inc()
            self._log.warning("invalid_subject", f"{subject!r} is no subject of an event")
            return
        while self._outbox and (
            len(self._outbox) >= self._outbox_max
            or self._outbox_bytes + len(payload) > OUTBOX_BYTES_MAX
        ):
            self._spare_last_events()
            self._pop_oldest()
            self._dropped.labels(reason="outbox_full").inc()
            self._log.warning("outbox_full", "the oldest events are dropped")
        message_id = f"{self._source}:{epoch}:{seq}"
        self._append(subject, payload, message_id)
        self._depth.set(len(self._outbox))
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
        # Sending before the stream is there would store the later events of a window only.
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
        try:
            async with asyncio.timeout(ACK_DEADLINE_S if self._outbox else None):
                await self._work.wait()
        except TimeoutError:
            if self._sent and time.monotonic() - self._outbox[0].sent_s > ACK_DEADLINE_S:
                self._failure = "no acknowledgement"
        self._work.clear()

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
                self._dropped.labels(reason="too_large").inc()
                self._log.warning("too_large", str(error))
                self._acknowledge(entry.number)

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
            self._fail(str(error))
            return
        if self._acknowledge(int(message.subject.rsplit(".", 1)[-1])):
            self._published.inc()

    def _acknowledge(self, number: int) -> bool:
        """Mark an entry; False if it is gone already (dropped, or acknowledged twice)."""
        index = number - self._outbox[0].number if self._outbox else -1
        if not 0 <= index < len(self._outbox) or self._outbox[index].acknowledged:
            return False
        self._outbox[index].acknowledged = True
        while self._outbox and self._outbox[0].acknowledged:
            self._pop_oldest()
        if self._outbox:
            self._work.set()
        else:
            self._empty.set()
        self._depth.set(len(self._outbox))
        return True

    def _append(self, subject: str, payload: bytes, message_id: str) -> None:
        source = subject.rpartition(".")[0]
        self._outbox.append(_Entry(self._next_number, subject, payload, message_id, source))
        self._outbox_bytes += len(payload)
        self._waiting[source] += 1
        self._next_number += 1

    def _spare_last_events(self) -> None:
        """Have an oldest entry that its source has sent others after, if there is one.

        Entries that are their source's last go to the end: order counts within a source only.
        """
        for _ in range(len(self._waiting)):
            if self._waiting[self._outbox[0].source] > 1:
                return
            last = self._pop_oldest()
            self._append(last.subject, last.payload, last.message_id)

    def _pop_oldest(self) -> _Entry:
        entry = self._outbox.popleft()
        self._outbox_bytes -= len(entry.payload)
        self._sent = max(0, self._sent - 1)
        self._waiting[entry.source] -= 1
        if not self._waiting[entry.source]:
            del self._waiting[entry.source]
        return entry

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._work.set()
