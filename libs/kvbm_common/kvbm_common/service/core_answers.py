"""Answers of a core to verbs: a question goes in as an input, its answer comes out as an effect."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec

from kvbm_common.errors import DeadlineExceeded, RequestFailed
from kvbm_common.runtime.metrics import Counter
from kvbm_common.wire.verbs import ErrorBody


class CoreAnswers:
    """The questions that wait for an answer of the core, by number."""

    def __init__(self, dropped: Counter) -> None:
        """Begin without questions.

        `dropped` counts answers that no question waits for, as the reason `answer_too_late`.
        """
        self._dropped = dropped
        self._waiting: dict[int, asyncio.Future[msgspec.Struct]] = {}
        self._numbers = itertools.count(1)

    async def ask(
        self, put: Callable[[int], Awaitable[None] | None], *, deadline_s: float
    ) -> bytes:
        """Return the answer in JSON. `put` gives the core the question under a number.

        Raises RequestFailed for an ErrorBody, and DeadlineExceeded.
        """
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Struct] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(deadline_s):
                going = put(number)
                if going is not None:
                    await going
                return msgspec.json.encode(await answer)
        except TimeoutError as error:
            raise DeadlineExceeded("the core did not answer") from error
        finally:
            del self._waiting[number]

    def give(self, number: int, reply: msgspec.Struct) -> None:
        """Hand an answer to the question of this number, if it still waits."""
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            self._dropped.labels(reason="answer_too_late").inc()
        elif isinstance(reply, ErrorBody):
            answer.set_exception(RequestFailed(reply.code, reply.message, reply.field))
        else:
            answer.set_result(reply)
