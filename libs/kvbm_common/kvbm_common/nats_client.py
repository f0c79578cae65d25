"""The NATS client library, with a short way for those who take messages as they are read.

The library gives every subscription a queue and a task, and its parser copies: that is most of what
a small message costs. What a *direct* subscription is sent is cut out of the bytes that were read,
and what was read together is handed over together, at once. Everything else, and what is not whole
yet, takes the library's way: a message that came in pieces arrives here again, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nats.aio import client as library
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

from kvbm_common.raw_messages import LINE_END, RawMessage, cut_front

MESSAGES = (b"MSG ", b"HMSG ")
HELD_BYTES_MAX = 65_536
"""What has come of a message waits for its end here, unless it is long: then it would be copied
again with everything that is read."""

library.DEFAULT_BUFFER_SIZE = 131_072
"""Read at once, by every client of this process: the library's 32 KiB are few events."""

Take = Callable[[list[RawMessage]], None]
"""Takes what was read together. It never raises, and never waits."""


class DirectClient(Client):
    """A client some of whose subscriptions are direct."""

    def __init__(self) -> None:
        super().__init__()
        self._direct: dict[bytes, Take] = {}
        """By the id of the subscription, as it stands in the protocol."""
        self._ps = _DirectParser(self, self._direct)

    async def subscribe_direct(self, subject: str, take: Take) -> Subscription:
        """From now on `take` is called with the messages of a new subscription."""
        subscription_id = self._sid + 1
        self._direct[b"%d" % subscription_id] = take
        try:
            subscription = await self.subscribe(subject, cb=_never)
        except BaseException:
            self.forget(subscription_id)  # Else the next one with this id would be taken for it.
            raise
        assert subscription._id == subscription_id, "nothing waits before it has its id"
        return subscription

    def forget(self, subscription_id: int) -> None:
        """It is none any more."""
        self._direct.pop(b"%d" % subscription_id, None)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        """Called by the library's parser for each message that it has put together."""
        take = self._direct.get(b"%d" % sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        message = RawMessage(bytes(subject).decode(), data, bytes(reply).decode(), headers or b"")
        take([message])


async def _never(_: object) -> None:
    raise AssertionError("a message of a direct subscription in the library's queue")


class _DirectParser(Parser):
    """Takes whole messages of direct subscriptions from the front of what has been read."""

    def __init__(self, client: DirectClient, direct: Mapping[bytes, Take]) -> None:
        super().__init__(client)
        self._direct = direct

    async def parse(self, data: bytes = b"") -> None:
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
        """Whether a message begins here that is all here, so that it is not ours."""
        return bool(cut_front(data, 0)[1])

    def _take_front(self, data: bytes) -> bytes:
        """Hand messages over until something else comes; returns it and what is behind it."""
        at = 0
        while True:
            subscription, messages, end = cut_front(data, at)
            take = self._direct.get(subscription)
            if take is None or not messages:
                return data[at:]
            take(messages)
            at = end
