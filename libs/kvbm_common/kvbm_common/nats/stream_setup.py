"""Stream setup by the role `admin`: creates each stream, and sets how it is protected.

A stream that is there keeps its limits, but for those that a setting names; what its messages and
readers may do is set again. So is what keeps one role from pushing out what others have written.
Larger messages that are there stay.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvbm_common.nats.jetstream import JetStreamError, Link, call_api, ensure_stream
from kvbm_common.nats.streams import StreamSpec

PROTECTIONS = ("allow_rollup_hdrs", "deny_delete", "deny_purge", "allow_direct")
SHARED = ("discard", "max_msg_size")
"""Limits that keep one role from pushing out what others wrote, where a message has a bound."""
READERS = ("max_consumers", "consumer_limits")
_ROOM = "run kvbm nats-config with these settings, or delete streams of other settings"
REMEDIES = {
    10027: _ROOM,
    10047: _ROOM,
    10074: "set KVBM_STREAM_REPLICAS=1, or run a cluster of servers",
}
"""The server's error code → the advice to an operator."""

_log = logging.getLogger(__name__)


class _Described(msgspec.Struct, frozen=True):
    config: dict[str, Any]


async def set_up_streams(link: Link) -> list[str]:
    """Make the streams that are not there; returns the names of those that were changed.

    Raises JetStreamError, BusUnavailable, DeadlineExceeded, and StreamMissing for another role.
    """
    changed: list[str] = []
    failed: list[JetStreamError] = []
    for spec in link.limits.partitioned.streams:
        try:
            changed += [spec.name] if await _set_up(link, spec) else []
        except JetStreamError as error:  # The others are made and protected all the same.
            _log.warning("%s: %s", spec.name, error)
            failed.append(_explained(spec, error))
    if failed:
        raise failed[0]
    return changed


async def _set_up(link: Link, spec: StreamSpec) -> bool:
    await ensure_stream(link, spec)
    described = await call_api(link, f"STREAM.INFO.{spec.name}")
    now = msgspec.json.decode(described, type=_Described).config
    wanted, limits = link.limits.fit(spec).as_config(), link.limits.set_for(spec)
    if "max_age" not in limits and now.get("max_age"):  # Duplicates are known no longer than kept.
        wanted["duplicate_window"] = min(wanted["duplicate_window"], now["max_age"])
    changed = await _set(link, now, wanted, PROTECTIONS)
    changed |= await _set(link, now, wanted, limits)
    if spec.message_max > 0:
        changed |= await _set(link, now, wanted, SHARED)
    for name in READERS:
        try:
            changed |= await _set(link, now, wanted, (name,))
        except JetStreamError as error:  # An older server, or readers that ask for more.
            _log.warning("%s keeps its %s: %s", spec.name, name, error)
    return changed


def _explained(spec: StreamSpec, error: JetStreamError) -> JetStreamError:
    """Return the error with the stream's name, and with what to do where that is known."""
    text = str(error).removesuffix(f" ({error.server_code})")
    remedy = REMEDIES.get(error.server_code)
    shown = f"{spec.name}: {text}; {remedy}" if remedy else f"{spec.name}: {text}"
    return JetStreamError(shown, error.server_code)


async def _set(
    link: Link, now: dict[str, Any], wanted: dict[str, Any], names: tuple[str, ...]
) -> bool:
    """Have a stream's configuration, which is `now`, changed where it is not as wanted."""
    changes = {
        name: wanted.get(name, False)
        for name in names
        if now.get(name, False) != wanted.get(name, False)
    }
    if not changes:
        return False
    stream = wanted["name"]
    _log.info("%s: %s", stream, changes)
    await call_api(link, f"STREAM.UPDATE.{stream}", now | changes)
    now |= changes
    return True
