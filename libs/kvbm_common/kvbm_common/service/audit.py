"""The audit stream: every change that an operator asks of a service, with its outcome.

The service that carries a change out writes it, so it does not matter on which way it was asked
for. A change that cannot be written stays done, because it is: that is logged and counted.
"""

from __future__ import annotations

import logging
import time

import msgspec

from kvbm_common.errors import KvbmError, NoResponder
from kvbm_common.nats.bus import Bus, VerbHandler
from kvbm_common.nats.jetstream import ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import AUDIT
from kvbm_common.nats.verb_server import Internal
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.admin import Audited, audit_codec, audit_subject
from kvbm_common.wire.codec import UNREADABLE

TEXT_MAX = 4096
"""Characters of a request or reply that are kept: a thousand hashes are not worth more."""
ACTOR_MAX = 128
"""Characters of the name that is kept; a longer one is refused where the verb reads it."""
ENTRY_MAX = AUDIT.message_max - 256
"""Bytes of an entry: beside it a message has one header."""

_log = logging.getLogger(__name__)


class _Actor(msgspec.Struct):
    actor: str = ""


class Audit:
    """Writes the changes of one instance."""

    def __init__(self, bus: Bus, *, kind: str, host: str, instance: str, counters: Metrics) -> None:
        self._bus = bus
        self._kind, self._host, self._instance = kind, host, instance
        self._failures = counters.counter(
            "kvbm_audit_failures_total", "Changes that could not be written to the audit stream."
        )

    def audited(self, verb: str, handler: VerbHandler) -> VerbHandler:
        """Wrap a handler so that each of its calls is written before it is answered."""

        async def handle(payload: bytes) -> bytes:
            try:
                reply = await handler(payload)
            except KvbmError as error:
                await self._write(verb, payload, outcome=error.code, reply=str(error))
                raise
            except Exception as error:  # A mistake of ours, after which part of it may be done.
                kind = type(error).__name__
                await self._write(verb, payload, outcome=Internal.code, reply=kind)
                raise
            await self._write(verb, payload, outcome="ok", reply=_text(reply))
            return reply

        return handle

    async def _write(self, verb: str, payload: bytes, *, outcome: str, reply: str) -> None:
        entry = Audited(
            ts_ms=time.time_ns() // 1_000_000,
            kind=self._kind,
            host=self._host,
            instance=self._instance,
            verb=verb,
            actor=_actor(payload),
            request=_text(payload),
            outcome=outcome,
            reply=reply[:TEXT_MAX],
        )
        _log.info("%s by %s: %s", verb, entry.actor or "an unnamed operator", outcome)
        subject = audit_subject(self._kind, self._host, self._instance)
        try:
            await self._store(subject, encoded(entry))
        except KvbmError as error:
            self._failures.inc()
            _log.error("a change was not written to the audit stream: %s: %s", error, entry)

    async def _store(self, subject: str, payload: bytes) -> None:
        try:
            await publish_acknowledged(self._bus, AUDIT, subject, payload)
        except NoResponder:
            # No stream takes it: it is not there yet, or not any more.
            await ensure_stream(self._bus, AUDIT)
            await publish_acknowledged(self._bus, AUDIT, subject, payload)


def encoded(entry: Audited) -> bytes:
    """Encode an entry. One of characters that JSON escapes is cut until the stream takes it."""
    kept = TEXT_MAX
    while len(payload := audit_codec.encode(entry)) > ENTRY_MAX:
        kept //= 2
        assert kept > 0, "the rest of an entry is short"
        entry = msgspec.structs.replace(
            entry, request=entry.request[:kept], reply=entry.reply[:kept]
        )
    return payload


def _text(payload: bytes) -> str:
    return payload[:TEXT_MAX].decode(errors="replace")


def _actor(payload: bytes) -> str:
    try:
        return msgspec.json.decode(payload, type=_Actor).actor[:ACTOR_MAX]
    except UNREADABLE:
        return ""
