"""Consumers: how a reader has the server deliver a part of a stream, from a start on, in order."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from kvbm_common.nats.jetstream import JetStreamError, Link, call_api
from kvbm_common.nats.stream_positions import ConsumerInfo
from kvbm_common.nats.streams import StreamSpec


class Resume(NamedTuple):
    """After a position of a stream that was made at this time."""

    created: datetime
    position: int


Start = Literal["all", "new", "last_per_subject"] | int | datetime | Resume
"""Where to begin: everything kept, what comes from now on, the last message of each subject, a
stream sequence, a time, or where another reader has stopped."""

HEARTBEAT_S = 1.7
"""An idle server says so this often: longer than the pause between heartbeats of services, so that
the registry is not idle, and little more than half of what counts as silence."""
HEARTBEAT_S_MIN = 0.1
"""The server's own least."""
INACTIVE_S = 5.0
"""The server drops a consumer without a listener after this time."""
TOO_MANY_CONSUMERS = 10026
"""The server's error code for a stream that has as many consumers as it may have."""


async def make_consumer(
    link: Link,
    spec: StreamSpec,
    name: str,
    inbox: str,
    subject: str,
    start: dict[str, Any],
    *,
    heartbeat_s: float = HEARTBEAT_S,
) -> ConsumerInfo:
    """Have what is on a subject delivered to an inbox. Raises JetStreamError, and as `Link` does.

    Any client with a credential for reading can use up the consumers of a stream. Then this one is
    made as the server's own readers of streams are, which do not count: else readers of others
    could keep a service from its events.
    """
    config = _consumer_config(name, inbox, subject, heartbeat_s) | start
    try:
        return await _create(link, spec, config)
    except JetStreamError as error:
        if error.server_code != TOO_MANY_CONSUMERS:
            raise
        link.note_refused(spec.name, error)
        return await _create(link, spec, config | {"direct": True})


async def _create(link: Link, spec: StreamSpec, config: dict[str, Any]) -> ConsumerInfo:
    verb = f"CONSUMER.CREATE.{spec.name}.{config['name']}.{config['filter_subject']}"
    request = {"stream_name": spec.name, "config": config}
    return msgspec.json.decode(await call_api(link, verb, request), type=ConsumerInfo)


def _consumer_config(name: str, inbox: str, subject: str, heartbeat_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "deliver_subject": inbox,
        "filter_subject": subject,
        "ack_policy": "none",
        "max_deliver": 1,
        "replay_policy": "instant",
        "flow_control": True,
        "idle_heartbeat": int(heartbeat_s * 1e9),
        "inactive_threshold": int(INACTIVE_S * 1e9),
        "mem_storage": True,
        "num_replicas": 1,
    }


def start_config(start: Start, position: int) -> dict[str, Any]:
    """Return where a consumer begins: after a position that is above 0, else as it was told."""
    if position > 0:
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": position + 1}
    if isinstance(start, int):
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start)}
    if isinstance(start, datetime):
        assert start.tzinfo is not None, "a start time has a time zone"
        return {"deliver_policy": "by_start_time", "opt_start_time": start.isoformat()}
    if start == "last_per_subject":
        return {"deliver_policy": "last_per_subject"}
    # An empty stream read from "new" has position 0, and then everything is new.
    return {"deliver_policy": "all"}
