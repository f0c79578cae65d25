"""The operators' verbs as a service serves them: decoded, handed to whoever knows, audited."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvbm_common.audit import Audit
from kvbm_common.bus import VerbHandler
from kvbm_common.wire.admin import (
    BlockRequest,
    DrainRequest,
    LogLevelReply,
    LogLevelRequest,
    PinRequest,
    PinsRequest,
    PolicyRequest,
    RemoveRequest,
    ResizeRequest,
    UnpinRequest,
)
from kvbm_common.wire.codec import JsonCodec

QUESTIONS: Mapping[str, JsonCodec[Any]] = {
    "block": JsonCodec(BlockRequest),
    "pins": JsonCodec(PinsRequest),
}
CHANGES: Mapping[str, JsonCodec[Any]] = {
    "evict": JsonCodec(RemoveRequest),
    "reset": JsonCodec(RemoveRequest),
    "pin": JsonCodec(PinRequest),
    "unpin": JsonCodec(UnpinRequest),
    "drain": JsonCodec(DrainRequest),
    "undrain": JsonCodec(DrainRequest),
    "resize": JsonCodec(ResizeRequest),
    "policy": JsonCodec(PolicyRequest),
}
_log_level: JsonCodec[LogLevelRequest] = JsonCodec(LogLevelRequest)


def tier_verbs(
    ask: Callable[[str, Any], Awaitable[bytes]],
    audit: Audit,
    *,
    further: Mapping[str, JsonCodec[Any]] = MappingProxyType({}),
) -> dict[str, VerbHandler]:
    """The verbs of a tier and its `further` changes; `ask` has its core answer one."""

    def handler(verb: str, codec: JsonCodec[Any]) -> VerbHandler:
        async def handle(payload: bytes) -> bytes:
            return await ask(verb, codec.decode(payload))

        return handle

    asked = {verb: handler(verb, codec) for verb, codec in QUESTIONS.items()}
    changed = {
        verb: audit.audited(verb, handler(verb, codec))
        for verb, codec in (*CHANGES.items(), *further.items())
    }
    return asked | changed


async def answer_log_level(payload: bytes) -> bytes:
    """The verb `log_level` of every service: from now on, until the process ends."""
    request = _log_level.decode(payload)
    root = logging.getLogger()
    was = logging.getLevelName(root.level).lower()
    root.setLevel(request.level.upper())
    return msgspec.json.encode(LogLevelReply(was=was))
