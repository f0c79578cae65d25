"""Verbs as a service serves them: decoded, handed to their handler or the core, audited."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvbm_common.errors import DeadlineExceeded, RequestFailed
from kvbm_common.nats.bus import VerbHandler
from kvbm_common.runtime.metrics import Counter
from kvbm_common.service.audit import Audit
from kvbm_common.wire.admin import (
    STEP_BLOCKS_MAX,
    LogLevelReply,
    LogLevelRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, SERVICES, OperatorVerb
from kvbm_common.wire.verbs import ErrorBody

TURN_S = 0.5
"""The time in which the core takes step after step of a removal or a resize for one request."""

_log_level: JsonCodec[LogLevelRequest] = JsonCodec(LogLevelRequest)
_remove_reply: JsonCodec[RemoveReply] = JsonCodec(RemoveReply)
_resize_reply: JsonCodec[ResizeReply] = JsonCodec(ResizeReply)

Ask = Callable[[str, Any], Awaitable[bytes]]


def tier_verbs(kind: str, ask: Ask, audit: Audit) -> dict[str, VerbHandler]:
    """Return the verbs that a tier of this kind answers; `ask` has its core answer one."""

    def handler_of(verb: OperatorVerb) -> VerbHandler:
        codec: JsonCodec[Any] = JsonCodec(verb.request)

        async def handle(payload: bytes) -> bytes:
            request = codec.decode(payload)
            if isinstance(request, RemoveRequest):
                return await _remove(ask, verb.name, request)
            if isinstance(request, ResizeRequest):
                return await _resize(ask, verb.name, request)
            return await ask(verb.name, request)

        return audit.audited(verb.name, handle) if verb.is_change else handle

    # What every service answers is no business of a tier's core.
    return {
        verb.name: handler_of(verb)
        for verb in OPERATOR_VERBS
        if kind in verb.answered_by and verb.answered_by != SERVICES
    }


async def _remove(ask: Ask, verb: str, request: RemoveRequest) -> bytes:
    """Have the core take steps of a removal, between which it serves others, as one change."""
    until_s, removed = time.monotonic() + TURN_S, 0
    while True:
        try:
            reply = _remove_reply.decode(await ask(verb, request))
        except RequestFailed:
            if not removed:
                raise
            reply = RemoveReply(removed=0, more=True)  # The next request has the refusal.
        removed += reply.removed
        if not reply.more or removed >= STEP_BLOCKS_MAX or time.monotonic() >= until_s:
            return msgspec.json.encode(msgspec.structs.replace(reply, removed=removed))


async def _resize(ask: Ask, verb: str, request: ResizeRequest) -> bytes:
    """Have the core take steps of a resize, as of a removal; the audit stream has one entry."""
    until_s, evicted = time.monotonic() + TURN_S, 0
    first: ResizeReply | None = None
    while True:
        reply = _resize_reply.decode(await ask(verb, request))
        first = first or reply
        evicted += reply.evicted
        if not reply.more or evicted >= STEP_BLOCKS_MAX or time.monotonic() >= until_s:
            whole = msgspec.structs.replace(reply, evicted=evicted, was=first.was)
            return msgspec.json.encode(whole)
        request = msgspec.structs.replace(request, goes_on=True)


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
