"""Questions of one connection that wait for an answer, each on an inbox of its own.

The end of an inbox is drawn by chance: who answers one question could otherwise guess where the
next one is answered, and have JetStream answer it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from kvbm_common.errors import KvbmError, RequestFailed
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.wire.codec import JsonCodec, WireError
from kvbm_common.wire.verbs import ErrorReply

NO_CODE = "no_code"
"""The code of a peer's error that has none: each failure has a reason."""
TOKEN_BYTES = 9
TOKENS_DRAWN = 256
"""At once: asking the kernel for each would be most of what a question costs."""

_error_reply: JsonCodec[ErrorReply] = JsonCodec(ErrorReply)


class Answers:
    """The questions that wait, by the last word of their inboxes."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, asyncio.Future[RawMessage]]] = {}
        self._tokens = _tokens()

    @contextmanager
    def asking(self, subject: str) -> Iterator[tuple[str, asyncio.Future[RawMessage]]]:
        """Yield the word and the answer of a question, which waits as long as the block runs."""
        token = next(self._tokens)
        answer: asyncio.Future[RawMessage] = asyncio.get_running_loop().create_future()
        self._waiting[token] = subject, answer
        try:
            yield token, answer
        finally:
            del self._waiting[token]

    def give(self, replies: list[RawMessage]) -> None:
        """Hand answers to the questions that still wait."""
        for reply in replies:
            _, answer = self._waiting.get(reply.subject.rsplit(".", 1)[-1], ("", None))
            if answer is not None and not answer.done():
                answer.set_result(reply)

    def fail(self, error: KvbmError, *, subject: str = "") -> None:
        """Fail all questions that wait, or those on a subject; NATS repeats it in lower case."""
        for asked, answer in self._waiting.values():
            if not answer.done() and subject in ("", asked.lower()):
                answer.set_exception(error)


def _tokens() -> Iterator[str]:
    """Yield words that cannot be guessed."""
    width = 2 * TOKEN_BYTES
    while True:
        drawn = secrets.token_hex(TOKEN_BYTES * TOKENS_DRAWN)
        for at in range(0, len(drawn), width):
            yield drawn[at : at + width]


def request_failed(code: str, payload: bytes) -> RequestFailed:
    """Return the error that a peer has answered with; `code` is that of its header.

    Its code is never empty.
    """
    try:
        error = _error_reply.decode(payload).error
    except WireError:
        return RequestFailed(code or NO_CODE, "no reason was given")
    return RequestFailed(error.code or code or NO_CODE, error.message, error.field)
