"""The operators' verbs as a service serves them: decoded, handed to their handler, audited."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvbm_common.nats.bus import VerbHandler
from kvbm_common.service.audit import Audit
from kvbm_common.wire.admin import LogLevelReply, LogLevelRequest
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, SERVICES, OperatorVerb

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
