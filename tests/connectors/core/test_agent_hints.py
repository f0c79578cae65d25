"""Hints of agents: what each form of an envelope or of cache_control becomes, or why nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.session_hint import SESSION_CHARS_MAX
from kvbm_connectors.core.agent_hints import ACTIONS_MAX, AgentHint, hints_of

HOUR_MS = 3_600_000


def action(kind: Any, payload: Any = None, version: Any = "1.0") -> dict[str, Any]:
    """One action of an envelope."""
    return {"action_id": "a", "action_type": kind, "action_version": version,
            "payload": {} if payload is None else payload}  # fmt: skip


def envelope(*actions: Any) -> dict[str, Any]:
    """An envelope, as vLLM's KvHintsEnvelope."""
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def pin(session: str, ttl_ms: int, tokens: int | None = None) -> AgentHint:
    """What a pin becomes."""
    return AgentHint("pin", session, at_end=True, ttl_ms=ttl_ms, tokens=tokens)


@pytest.mark.parametrize(
    ("one", "hint"),
    [
        (action("kv.pin", {"ttl": "5m"}), pin("s", 300_000)),
        (action("kv.pin", {"ttl": 2.5}), pin("s", 2_500)),
        (action("kv.pin", {"ttl": 0}), pin("s", 0)),
        (action("kv.pin", {"ttl": "9h", "session_id": "t"}), pin("t", HOUR_MS)),
        (action("kv.pin"), pin("s", 300_000)),
        (
            action("kv.retain", {"directives": [{"priority": 9, "end": 64, "duration": 60}]}),
            pin("s", 60_000, 64),
        ),
        (
            action("kv.retain", {"directives": [{"priority": 9, "end": 64}, {"priority": 0}]}),
            pin("s", HOUR_MS, 64),
        ),
        (
            action("kv.retain", {"scope": "t", "directives": [{"priority": 1, "duration": 1}]}),
            pin("t", 1_000),
        ),
        (
            action("kv.retain", {"directives": [{"priority": 0}]}),
            AgentHint("demote", "s", at_end=True),
        ),
        (action("kv.demote", {"session_id": "t"}), AgentHint("demote", "t", at_end=False)),
        (action("kv.demote"), AgentHint("demote", "s", at_end=True)),
        (action("kv.deref"), AgentHint("demote", "s", at_end=True)),
        (action("kv.prefetch"), AgentHint("prefetch", "s", at_end=False)),
        (action("kv.prefetch", {"session_id": "t"}), AgentHint("prefetch", "t", at_end=False)),
    ],
)
def test_each_action_becomes_one_hint(one: dict[str, Any], hint: AgentHint) -> None:
    """The request is of session s; an action may name another."""
    assert hints_of("r", envelope=envelope(one), session="s") == ([hint], [])


@pytest.mark.parametrize(
    ("parameters", "hint"),
    [
        ({"cache_control": {"type": "ephemeral"}}, pin("r", 300_000)),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, pin("r", HOUR_MS)),
        ({"session_id": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
         pin("s", 300_000)),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "30s"}}}, pin("r", 30_000)),
        ({"session_id": "s", "kv_hints": envelope(action("kv.prefetch"))},
         AgentHint("prefetch", "s", at_end=False)),
    ],
)  # fmt: skip
def test_parameters_of_a_request_have_hints(parameters: dict[str, Any], hint: AgentHint) -> None:
    """Without a session a pin is the request's own."""
    assert hints_of("r", parameters=parameters) == ([hint], [])


def test_a_request_with_a_long_name_has_a_session_of_its_own() -> None:
    """Goal: a pin without a session arrives at the host tier, whose sessions have bounded names."""
    parameters = {"cache_control": {"type": "ephemeral"}}
    sessions = []
    for name in (256 * "r", 257 * "r", 300 * "r" + "1", 300 * "r" + "2"):
        [hint], bad = hints_of(name, parameters=parameters)
        assert not bad
        sessions.append(hint.session)
    assert sessions[0] == 256 * "r"
    assert [len(one) for one in sessions] == 4 * [SESSION_CHARS_MAX]
    assert len(set(sessions)) == 4
    [hint], _ = hints_of(300 * "r", envelope=envelope(action("kv.pin")))
    assert hint.session[:200] == 200 * "r", "people know it again"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("action_type", envelope(action("kv.fetch"))),
        ("action_type", envelope(action(["kv.pin"]))),
        ("kv.pin: action_version", envelope(action("kv.pin", version="2.0"))),
        ("kv.pin: payload", envelope(action("kv.pin", [1]))),
        ("kv.pin: ttl", envelope(action("kv.pin", {"ttl": "soon"}))),
        ("kv.pin: ttl", envelope(action("kv.pin", {"ttl": -1}))),
        ("kv.pin: ttl", envelope(action("kv.pin", {"ttl": True}))),
        ("kv.pin: ttl", envelope(action("kv.pin", {"ttl": float("nan")}))),
        ("kv.pin: session_id", envelope(action("kv.pin", {"session_id": 257 * "s"}))),
        ("kv.prefetch: session_id", envelope(action("kv.prefetch"))),
        ("kv.demote: session_id", envelope(action("kv.demote", {"session_id": 7}))),
        ("kv.retain: directives", envelope(action("kv.retain"))),
        ("kv.retain: priority", envelope(action("kv.retain", {"directives": [{"priority": 101}]}))),
        ("kv.retain: end",
         envelope(action("kv.retain", {"directives": [{"priority": 1, "end": -1}]}))),
        ("kv_hints.actions", {"actions": "kv.pin"}),
        ("kv_hints.actions", 7),
        ("kv_hints.actions", envelope("kv.pin")),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_and_left_out(field: str, value: object) -> None:
    """The text says what the field may be."""
    hints, [bad] = hints_of("r", envelope=value)
    assert (hints, bad.field) == ([], field)
    assert str(bad).startswith(f"{field} is not ")


def test_a_bad_cache_control_is_named() -> None:
    """Anthropic knows one type; a list is no map."""
    _, [bad] = hints_of("r", parameters={"cache_control": {"type": "permanent"}})
    assert str(bad) == 'cache_control.type is not "ephemeral"'
    _, [bad] = hints_of("r", parameters={"nvext": {"cache_control": []}})
    assert str(bad) == "nvext.cache_control is not a map"
    _, [bad] = hints_of("r", parameters={"session_id": 7})
    assert bad.field == "session_id"


def test_a_bad_action_does_not_hide_a_good_one() -> None:
    """Another consumer's action is stepped over."""
    hints, [bad] = hints_of("r", envelope=envelope(action("kv.fetch"), action("kv.pin")))
    assert (hints, bad.field) == ([pin("r", 300_000)], "action_type")


def test_only_the_first_actions_are_read() -> None:
    """An envelope is no way to make an engine busy."""
    hints, [bad] = hints_of("r", envelope=envelope(*[action("kv.pin")] * (ACTIONS_MAX + 1)))
    assert (len(hints), bad.field) == (ACTIONS_MAX, "kv_hints.actions")


def test_an_envelope_may_be_an_object_of_vllm() -> None:
    """As vLLM's own structs, which are msgspec's."""
    kind = msgspec.defstruct("KvHintsEnvelope", [("actions", list[Any])])
    assert hints_of("r", envelope=kind([action("kv.pin")])) == ([pin("r", 300_000)], [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["kv.pin", "5m", ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["actions", "action_type", "payload", "ttl", "type", "session_id",
                         "cache_control", "nvext", "kv_hints", "directives", "priority"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON, JSON, st.dictionaries(st.sampled_from(["cache_control", "nvext", "kv_hints"]), JSON))
def test_nothing_that_a_client_says_raises(
    value: Any, session: Any, parameters: dict[str, Any]
) -> None:
    """A hint never fails its request."""
    hints, bad = hints_of("r", envelope=value, session=session, parameters=parameters)
    assert all(0 <= hint.ttl_ms <= HOUR_MS and hint.session for hint in hints)
    assert all(str(one) for one in bad)
