"""The bodies of operators' routes, made from the table of verbs, and the requests they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, REQUIRED, OperatorVerb
from pydantic import BaseModel, Field, create_model

from kvbm_metrics.core.query_models import _Query
from kvbm_metrics.core.wire_types import checked


def _body_of(verb: OperatorVerb) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for one in verb.given:
        kind = checked(verb.type_of(one))
        if one.default is REQUIRED:
            fields[one.name] = (kind, Field(description=one.help))
        else:
            kind = kind | None if one.default is None else kind
            fields[one.name] = (kind, Field(one.default, description=one.help))
    assert fields, f"{verb.request.__name__} takes nothing, and needs no body"
    name = verb.request.__name__.removesuffix("Request") + "Query"
    return create_model(name, __base__=_Query, __doc__=verb.request.__doc__, **fields)


BODIES: Mapping[type[msgspec.Struct], type[BaseModel]] = {
    verb.request: _body_of(verb) for verb in OPERATOR_VERBS if verb.is_change and verb.given
}
"""Request that a body becomes → its model: `evict` and `reset` share one."""


def request_of(verb: OperatorVerb, given: Mapping[str, Any], actor: str) -> Any:
    """Return the verb's request; of a list each item once."""
    values: dict[str, Any] = {"actor": actor}
    for name in verb.request.__struct_fields__:
        stem = name.removesuffix("_ms")
        if name in given:
            value = given[name]
            values[name] = list(dict.fromkeys(value)) if isinstance(value, list) else value
        elif stem != name and (seconds := given.get(f"{stem}_s")) is not None:
            values[name] = max(1, round(seconds * 1000))
    return verb.request(**values)


def contradiction(verb: OperatorVerb, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what the fields' types cannot say, as a field and a sentence, where it is not so."""
    one_of, any_of = verb.exactly_one_of, verb.at_least_one_of
    if one_of and sum(given[name] not in (None, False) for name in one_of) != 1:
        return one_of[0], f"give exactly one of {_and(one_of)}"
    if any_of and all(given[name] is None for name in any_of):
        return any_of[0], f"give at least one of {_and(any_of)}"
    return None


def _and(names: Sequence[str]) -> str:
    assert len(names) > 1, f"one of {names} is no choice"
    return f"{', '.join(names[:-1])} and {names[-1]}"
