"""Hints of agents, read out of a request: vLLM's `kv_hints` envelope and `cache_control`.

| where | what it becomes |
|---|---|
| `kv.pin` `{"ttl": "5m" or seconds, "session_id"?}` | pin at the request's end |
| `kv.retain` `{"scope"?, "directives"}` | pin of the prefix with a priority above 0; 0: demote |
| `kv.demote` `{"session_id"?}`, `kv.deref` | demote: another session now, its own at the end |
| `kv.prefetch` `{"session_id"?}` | prefetch now |
| `cache_control` `{"type": "ephemeral", "ttl"?: "5m"}` | pin at the request's end |

What cannot be read is left out: a hint never fails its request.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from kvbm_common.wire.session_hint import HINT_TTL_MS_MAX, SESSION_CHARS_MAX, Action

ACTIONS_MAX = 16
"""Actions of one envelope that are read."""
DIRECTIVES_MAX = 128
TTL_DEFAULT_MS = 300_000
"""Without a `ttl`, as for Anthropic's prompt caching."""
ACTION_TYPES = ("kv.pin", "kv.retain", "kv.demote", "kv.deref", "kv.prefetch")
_TTL = re.compile(r"([0-9]{1,9})([smh])")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
TTL_TEXT = 'seconds, or text such as "30s", "5m" or "1h"'


@dataclass(frozen=True, slots=True)
class AgentHint:
    """An agent's wish for a session."""

    action: Action
    session: str
    at_end: bool
    """True if the hint is sent when the request has finished, and so for its own blocks; else when
    it arrives."""
    ttl_ms: int = 0
    tokens: int | None = None
    """The length of the prefix that is meant; None: all of it."""


@dataclass(frozen=True, slots=True)
class BadHint:
    """A part of a request that should be a hint, and cannot be read as one."""

    field: str
    allowed: str
    """A description of the values that the field may have."""

    def __str__(self) -> str:
        return f"{self.field} is not {self.allowed}"


class _Refusal(Exception):
    """Ends the reading of one hint."""

    def __init__(self, field: str, allowed: str) -> None:
        assert field, f"something is not {allowed}"
        super().__init__(field, allowed)
        self.bad = BadHint(field, allowed)


def hints_of(
    request: str,
    *,
    envelope: object = None,
    session: object = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[list[AgentHint], list[BadHint]]:
    """Return the hints of a request, and what of it could not be read.

    `envelope` is vLLM's `Request.kv_hints`, `session` its `session_id`, and `parameters` its
    `kv_transfer_params`, which may have all of them. A pin without a session is the request's.
    """
    assert request, "a request has a name"
    parameters = parameters or {}
    hints, bad = list[AgentHint](), list[BadHint]()
    own = _session_of(session, parameters, bad)
    request = _session_of_request(request)
    for value in (envelope, parameters.get("kv_hints")):
        for action in _actions_of(value, bad):
            try:
                hints += _of_action(action, own, request)
            except _Refusal as refusal:
                bad.append(refusal.bad)
    nvext = parameters.get("nvext")
    inner = nvext.get("cache_control") if isinstance(nvext, Mapping) else None
    for where, value in (("cache_control", parameters.get("cache_control")),
                         ("nvext.cache_control", inner)):  # fmt: skip
        try:
            hints += _of_cache_control(value, where, own or request)
        except _Refusal as refusal:
            bad.append(refusal.bad)
    return hints, bad


def _session_of_request(request: str) -> str:
    """Return the session that stands for a request without one: its name, or the beginning of a
    long one and a digest of all of it. Clients choose names, and sessions are bounded."""
    if len(request) <= SESSION_CHARS_MAX:
        return request
    digest = hashlib.blake2b(request.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    name = f"{request[: SESSION_CHARS_MAX - len(digest) - 1]}~{digest}"
    assert len(name) == SESSION_CHARS_MAX, f"session {name} has {len(name)} characters"
    return name


def _session_of(session: object, parameters: Mapping[str, Any], bad: list[BadHint]) -> str:
    """Return the session of a request; empty: it has none."""
    value = session if session is not None else parameters.get("session_id")
    try:
        return "" if value is None else _session(value, "session_id")
    except _Refusal as refusal:
        bad.append(refusal.bad)
        return ""


def _session(value: object, field: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= SESSION_CHARS_MAX:
        raise _Refusal(field, f"text of 1 to {SESSION_CHARS_MAX} characters")
    return value


def _actions_of(value: object, bad: list[BadHint]) -> Iterator[Mapping[str, Any]]:
    """Yield the actions of an envelope: vLLM's object, or the same as a map."""
    if value is None:
        return
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    actions = value.get("actions") if isinstance(value, Mapping) else None
    if not isinstance(actions, list):
        bad.append(BadHint("kv_hints.actions", "a list of maps"))
        return
    if len(actions) > ACTIONS_MAX:
        bad.append(BadHint("kv_hints.actions", f"a list of at most {ACTIONS_MAX}"))
    for action in actions[:ACTIONS_MAX]:
        if isinstance(action, Mapping):
            yield action
        else:
            bad.append(BadHint("kv_hints.actions", "a list of maps"))


def _of_action(action: Mapping[str, Any], own: str, request: str) -> list[AgentHint]:
    kind, version = action.get("action_type"), action.get("action_version", "1.0")
    payload = action.get("payload", {})
    if kind not in ACTION_TYPES:
        raise _Refusal("action_type", f"one of {', '.join(ACTION_TYPES)}")
    if not isinstance(version, str) or version.partition(".")[0] not in ("0", "1"):
        raise _Refusal(f"{kind}: action_version", '"1.0"')
    if not isinstance(payload, Mapping):
        raise _Refusal(f"{kind}: payload", "a map")
    named = payload.get("scope" if kind == "kv.retain" else "session_id")
    session = own if named is None else _session(named, f"{kind}: session_id")
    match kind:
        case "kv.pin":
            ttl_ms = _ttl_ms(payload.get("ttl"), f"{kind}: ttl")
            return [AgentHint("pin", session or request, at_end=True, ttl_ms=ttl_ms)]
        case "kv.retain":
            return _of_directives(payload.get("directives"), session or request)
        case _:
            if not session:
                raise _Refusal(f"{kind}: session_id", "the name of a session")
            if kind == "kv.prefetch":
                return [AgentHint("prefetch", session, at_end=False)]
            return [AgentHint("demote", session, at_end=session == own)]


def _of_directives(directives: object, session: str) -> list[AgentHint]:
    """Return the one hint of `kv.retain`: blocks are of use with all before them only."""
    if not isinstance(directives, list) or not 0 < len(directives) <= DIRECTIVES_MAX:
        raise _Refusal("kv.retain: directives", f"a list of 1 to {DIRECTIVES_MAX} maps")
    ends, ttl_ms = list[int | None](), 0
    for one in directives:
        if not isinstance(one, Mapping):
            raise _Refusal("kv.retain: directives", "a list of maps")
        priority, end = one.get("priority"), one.get("end")
        if not isinstance(priority, int) or not _is_count(priority) or priority > 100:
            raise _Refusal("kv.retain: priority", "a whole number of 0 to 100")
        if end is not None and not _is_count(end):
            raise _Refusal("kv.retain: end", "a number of tokens, or nothing")
        duration = one.get("duration")
        if priority:
            ends.append(end)
            longest = HINT_TTL_MS_MAX / 1000 if duration is None else duration
            ttl_ms = max(ttl_ms, _ttl_ms(longest, "kv.retain: duration"))
    if not ends:
        return [AgentHint("demote", session, at_end=True)]
    assert 0 <= ttl_ms <= HINT_TTL_MS_MAX, f"session {session} pins for {ttl_ms} ms"
    tokens = None if None in ends else max(end for end in ends if end is not None)
    return [AgentHint("pin", session, at_end=True, ttl_ms=ttl_ms, tokens=tokens)]


def _of_cache_control(value: object, where: str, session: str) -> list[AgentHint]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise _Refusal(where, "a map")
    if value.get("type") != "ephemeral":
        raise _Refusal(f"{where}.type", '"ephemeral"')
    ttl_ms = _ttl_ms(value.get("ttl"), f"{where}.ttl")
    return [AgentHint("pin", session, at_end=True, ttl_ms=ttl_ms)]


def _ttl_ms(value: object, field: str) -> int:
    """Return a time to live, cut to the longest that there is; 0 ends a pin."""
    if value is None:
        return TTL_DEFAULT_MS
    if isinstance(value, str) and (found := _TTL.fullmatch(value)):
        return min(int(found[1]) * _UNIT_MS[found[2]], HINT_TTL_MS_MAX)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _Refusal(field, TTL_TEXT)
    return int(1000 * min(value, HINT_TTL_MS_MAX // 1000))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
