"""Marked messages: a guarded stream's readers take only those that a client published to it.

In a fleet with zones also what comes from a zone's stream of the same name. nats-server takes the
mark away there, and writes another header, which it refuses from clients (from 2.15 on).
"""

from __future__ import annotations

import logging

from kvbm_common.nats.jetstream import Link
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.stream_positions import is_event
from kvbm_common.nats.streams import StreamSpec
from kvbm_common.runtime.logs import OncePerKind

UNMARKED = b"\0"
"""Stands for the payload of a message that no client has published: no format of ours begins so."""
_SOURCED = b"\r\nNats-Stream-Source:"

_log = OncePerKind(logging.getLogger(__name__))


def checked(link: Link, spec: StreamSpec, messages: list[RawMessage]) -> list[RawMessage]:
    """Return messages of a stream; on a guarded bus one without its mark has lost its payload.

    It keeps its place: a message that is left out would look like one that was lost.
    """
    if not link.guarded:
        return messages
    first = spec.first_mark
    # Publishers write the mark first, so most batches end here.
    if not [message for message in messages if not message.block.startswith(first)]:
        return messages
    return [
        message
        if spec.is_marked(message.block)
        or not is_event(message)
        or (link.limits.zones and is_sourced(spec, message.block))
        else _emptied(spec, message)
        for message in messages
    ]


def is_sourced(spec: StreamSpec, block: bytes) -> bool:
    """Tell by its headers whether a message comes from a zone's stream of the same name.

    As with the mark, the first such header counts.
    """
    at = block.find(_SOURCED)
    return at >= 0 and block.startswith(f" {spec.name}:".encode(), at + len(_SOURCED))


def _emptied(spec: StreamSpec, message: RawMessage) -> RawMessage:
    text = f"{spec.name}: a message on {message.subject} that no client has published is ignored"
    _log.warning("unmarked", text)
    return RawMessage(message.subject, UNMARKED, message.reply, message.block)
