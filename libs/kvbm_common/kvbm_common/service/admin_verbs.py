"""Verbs as a service serves them: decoded, handed to their handler or the core, audited."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvbm_common.errors import DeadlineExceeded, RequestFailed
from kvbm_common.nats.bus import VerbHandler
from kvbm_common.runtime.metrics import Counter
from kvbm_common.service.audit import Audit
from kvbm_common.wire.admin import LogLevelReply, LogLevelRequest
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, SERVICES, OperatorVerb
from kvbm_common.wire.verbs import ErrorBody

_log_level: JsonCodec[LogLevelRequest] = JsonCodec(LogLevelRequest)


def tier_verbs(
    kind: str, ask: Callable[[str, Any], Awaitable[bytes]], audit: Audit
) -> dict[str, VerbHandler]:
    """Return the verbs that a tier of this kind answers; `ask` has its core answer one."""

    def handler_of(verb: OperatorVerb) -> VerbHandler:
        codec: JsonCodec[Any] = JsonCodec(verb.request)

        async def handle(payload: bytes) -> bytes:
            return await ask(verb.name, codec.decode(payload))

        return audit.audited(verb.name, handle) if verb.is_change else handle

    # What every service answers is no business of a tier's core.
    return {
        verb.name: handler_of(verb)
        for verb in OPERATOR_VERBS
        if kind in verb.answered_by and verb.answered_by != SERVICES
    }


async def answer_log_level(payload: bytes) -> bytes:
    """Answer the verb `log_level` of every service: it holds until the process ends."""
    request = _log_level.decode(payload)
    root = logging.getLogger()
    was = logging.getLevelName(root.level).lower()
    root.setLevel(request.level.upper())
    return msgspec.json.encode(LogLevelReply(was=was))


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
