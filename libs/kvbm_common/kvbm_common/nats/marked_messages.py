"""What a reader of a guarded stream takes: messages that a client has published to it."""

from __future__ import annotations

import logging

from kvbm_common.nats.jetstream import Link
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.stream_positions import is_event
from kvbm_common.nats.streams import StreamSpec
from kvbm_common.runtime.logs import OncePerKind

UNMARKED = b"\0"
"""Stands for the payload of a message that no client has published: no format of ours begins so."""

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
        if spec.is_marked(message.block) or not is_event(message)
        else _emptied(spec, message)
        for message in messages
    ]


def _emptied(spec: StreamSpec, message: RawMessage) -> RawMessage:
    text = f"{spec.name}: a message on {message.subject} that no client has published is ignored"
    _log.warning("unmarked", text)
    return RawMessage(message.subject, UNMARKED, message.reply, message.block)
