"""What the role `admin` does on the bus: every stream is there, and protects what it must.

A stream that is there keeps its limits; what its messages may be made to do is set again.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvbm_common.nats.jetstream import Link, call_api, ensure_stream
from kvbm_common.nats.streams import STREAMS, StreamSpec

PROTECTIONS = ("allow_rollup_hdrs", "deny_delete", "deny_purge", "allow_direct")

_log = logging.getLogger(__name__)


class _Described(msgspec.Struct, frozen=True):
    config: dict[str, Any]


async def set_up_streams(link: Link) -> list[str]:
    """Make the streams that are not there; returns the names of those that were changed.

    Raises JetStreamError, BusUnavailable, DeadlineExceeded, and StreamMissing for another role.
    """
    return [spec.name for spec in STREAMS if await _set_up(link, spec)]


async def _set_up(link: Link, spec: StreamSpec) -> bool:
    await ensure_stream(link, spec)
    described = await call_api(link, f"STREAM.INFO.{spec.name}")
    now = msgspec.json.decode(described, type=_Described).config
    wanted = spec.as_config()
    changes = {
        name: wanted.get(name, False)
        for name in PROTECTIONS
        if now.get(name, False) != wanted.get(name, False)
    }
    if not changes:
        return False
    _log.info("%s: %s", spec.name, changes)
    await call_api(link, f"STREAM.UPDATE.{spec.name}", now | changes)
    return True
