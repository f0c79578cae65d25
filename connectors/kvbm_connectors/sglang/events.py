"""Events: where SGLang publishes its KV events, for the consolidator to follow. Pure."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import msgspec

log = logging.getLogger(__name__)


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What an `Attach` says of a stream; without an endpoint there are offers alone."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""


def stream_of(config: str | None, rank: int) -> Stream:
    """Return the stream of one data-parallel rank, from `--kv-events-config`."""
    if not config:
        return Stream()
    try:
        fields: dict[str, Any] = json.loads(config)
        if fields.get("publisher") != "zmq":
            return Stream()
        return Stream(
            endpoint=reachable(fields.get("endpoint") or "tcp://*:5557", rank),
            replay_endpoint=reachable(fields.get("replay_endpoint") or "", rank),
            topic=str(fields.get("topic") or ""),
        )
    except (AttributeError, TypeError, ValueError) as error:
        log.warning("--kv-events-config cannot be read, its events are not followed: %s", error)
        return Stream()


def reachable(endpoint: str, rank: int) -> str:
    """Return an endpoint that SGLang binds as one that a process of this host can connect to.

    With TCP, every rank adds its number to the port. Empty if the endpoint cannot be followed.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint if endpoint.startswith("ipc://") and rank == 0 else ""
    found = re.fullmatch(r"tcp://(.+):(\d+)", endpoint)
    if found is None or found[2] == "0":
        log.warning("KV events at %s cannot be followed: use tcp://*:PORT", endpoint)
        return ""
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(found[1], found[1])
    return f"tcp://{host}:{int(found[2]) + rank}"
