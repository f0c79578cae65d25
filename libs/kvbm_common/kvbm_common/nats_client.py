"""The NATS client library, with a short way for those who take messages as they are read.

The library gives every subscription a queue and a task, and its parser copies: that is most of what
a small message costs. What a *direct* subscription is sent is cut out of the bytes that were read,
and handed over at once. Everything else, and what is not whole yet, takes the library's way: a
message that came in pieces arrives here again, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from nats.aio.client import Client
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

from kvbm_common.jetstream import RawMessage

LINE_END = b"\r\n"
PLAIN = b"NATS/1.0\r\n"
"""How headers begin when the server has no status to say."""
NO_HEADERS: Mapping[str, str] = {}

Take = Callable[[RawMessage], None]
"""Takes one message. It never raises, and never waits."""


class Headers(Mapping[str, str]):
    """Headers that are read when somebody asks for them: most messages are asked for none."""

    __slots__ = ("_block", "_read")

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._read: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        if self._read is None:
            self._read = Client._parse_header_lines(self._block[len(PLAIN) :])
        return self._read


class DirectClient(Client):
    """A client some of whose subscriptions are direct."""

    def __init__(self) -> None:
        super().__init__()
        self._direct: dict[bytes, Take] = {}
        """By the id of the subscription, as it stands in the protocol."""
        self._ps = _DirectParser(self, self._direct)

    def make_direct(self, subscription_id: int, take: Take) -> None:
        """From now on `take` is called with its messages; the handler it was made with is not."""
        self._direct[b"%d" % subscription_id] = take

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
        parsed = await self._process_headers(headers)
        take(RawMessage(bytes(subject).decode(), data, bytes(reply).decode(), parsed or NO_HEADERS))


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
        if data and (rest := self._take_front(data)):
            await super().parse(rest)

    def _take_front(self, data: bytes) -> bytes:
        """Hand messages over until something else comes; returns it and what is behind it."""
        at, size = 0, len(data)
        while at < size:
            line_end = data.find(LINE_END, at)
            words = data[at:line_end].split() if line_end >= 0 else []
            take = self._direct.get(words[2]) if len(words) > 3 else None
            length = _length(words)
            begin = line_end + len(LINE_END)
            end = begin + length
            if take is None or length < 0 or end + len(LINE_END) > size:
                break
            message = _message(words, data[begin:end])
            if message is None:
                break
            take(message)
            at = end + len(LINE_END)
        return data[at:]


def _length(words: list[bytes]) -> int:
    """How much comes behind the line of a message; negative: it is none, or not for us to read."""
    return int(words[-1]) if words and words[0] in _WORDS and words[-1].isdigit() else -1


_WORDS: Mapping[bytes, int] = {b"MSG": 4, b"HMSG": 5}
"""How many words such a line has, without a subject to reply to."""


def _message(words: list[bytes], content: bytes) -> RawMessage | None:
    """None: it has a status, which the library reads."""
    replying = len(words) > _WORDS[words[0]]
    headers = NO_HEADERS
    if words[0] == b"HMSG":
        if not words[-2].isdigit() or not content.startswith(PLAIN):
            return None
        cut = int(words[-2])
        headers, content = Headers(content[:cut]), content[cut:]
    return RawMessage(words[1].decode(), content, words[3].decode() if replying else "", headers)
