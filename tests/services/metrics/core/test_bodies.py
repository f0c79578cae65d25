"""The bodies of operators' routes: what they take follows from the tables that they are made of."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from kvbm_common.wire.admin import (
    FilterRequest,
    PinRequest,
    RemoveRequest,
    ResizeRequest,
)
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, OperatorVerb
from kvbm_metrics.core.bodies import BODIES, contradiction, request_of
from pydantic import ValidationError

VERBS = {verb.name: verb for verb in OPERATOR_VERBS}
A, B = "a" * 32, "b" * 32

ADDED = """
from kvbm_common import eviction
eviction.POLICIES["fifo"] = lambda _slot_count: eviction.Lru()
from kvbm_common.config.settings import Settings
from kvbm_common.wire.admin import PolicyRequest
from kvbm_common.wire.operator_verbs import OperatorVerb
from kvbm_metrics.core.bodies import BODIES
print(Settings.load(environ={"KVBM_EVICTION_POLICY": "fifo"}).eviction_policy)
print(BODIES[PolicyRequest](tier="host", policy="fifo").policy)
"""


def test_a_policy_is_listed_once() -> None:
    """An entry of `POLICIES` is all that settings and the HTTP API need: see CONTRIBUTING.md."""
    command = [sys.executable, "-c", ADDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fifo", "fifo"], done.stderr


@pytest.mark.parametrize(
    ("verb", "body", "request_"),
    [
        ("resize", {"tier": "host", "slots": 3}, ResizeRequest(slots=3, actor="ada")),
        (
            "pin",
            {"tier": "all", "hashes": [A, B, A], "ttl_s": 1.5},
            PinRequest(hashes=[A, B], ttl_ms=1500, actor="ada"),
        ),
        (
            "pin",
            {"tier": "all", "hashes": [A], "ttl_s": 0.0001},
            PinRequest(hashes=[A], ttl_ms=1, actor="ada"),
        ),
        ("evict", {"tier": "disk", "prefix": A}, RemoveRequest(prefix=A, actor="ada")),
        (
            "filter",
            {"tier": "disk", "enabled": False, "decay_s": 2},
            FilterRequest(enabled=False, decay_ms=2000, actor="ada"),
        ),
    ],
)
def test_a_body_becomes_the_request_of_the_wire(
    verb: str, body: dict[str, Any], request_: msgspec.Struct
) -> None:
    """Fields by their names, seconds as milliseconds, each block once, and who wants it."""
    given = dict(BODIES[VERBS[verb].request](**body))
    assert contradiction(VERBS[verb], given) is None
    assert request_of(VERBS[verb], given, "ada") == request_


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_what_is_given_reaches_the_request_or_says_where(verb: OperatorVerb) -> None:
    """Goal: no option that is taken and does nothing, because its name is not the request's."""
    if not verb.is_change or not verb.given:
        return
    fields = set(verb.request.__struct_fields__) | {"tier", "kind", "host", "instance"}
    fields |= {f"{name.removesuffix('_ms')}_s" for name in fields if name.endswith("_ms")}
    assert {one.name for one in verb.given} <= fields


@pytest.mark.parametrize(
    ("verb", "given", "field"),
    [
        ("reset", {"everything": False}, "hashes"),
        ("reset", {"everything": True, "prefix": A}, "hashes"),
        ("filter", {}, "enabled"),
    ],
)
def test_what_types_cannot_say_is_said(verb: str, given: dict[str, Any], field: str) -> None:
    """Too much or too little is a contradiction, with the field at fault."""
    body = dict(BODIES[VERBS[verb].request](tier="all", **given))
    found = contradiction(VERBS[verb], body)
    assert found is not None
    assert found[0] == field


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("resize", {"tier": "object", "slots": 3}),
        ("resize", {"tier": "host", "slots": 0}),
        ("resize", {"tier": "host", "slots": "3"}),
        ("resize", {"tier": "host", "slots": 3, "slot": 3}),
        ("pin", {"tier": "all", "hashes": [], "ttl_s": 1}),
        ("pin", {"tier": "all", "hashes": ["x"], "ttl_s": 1}),
        ("unpin", {"tier": "host", "instance": "0", "pin": 1}),
        ("log_level", {"level": "loud"}),
    ],
)
def test_bounds_of_the_table_hold(verb: str, body: dict[str, Any]) -> None:
    """Choices, bounds, patterns and lengths are those of the wire's types."""
    with pytest.raises(ValidationError):
        BODIES[VERBS[verb].request](**body)
