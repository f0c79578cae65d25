"""Types of the wire (msgspec) as types of the HTTP API (pydantic): nothing is listed twice."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

import msgspec
from pydantic import ConfigDict, Field, create_model

BOUNDS = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length", "examples")
"""Constraints that both libraries have, under the same names."""


def checked(kind: Any) -> Any:
    """Return a type of the wire with its bounds, for what comes in."""
    match get_origin(kind):
        case origin if origin is Annotated:
            inner, *metas = get_args(kind)
            bounds = [(name, getattr(meta, name)) for meta in metas for name in BOUNDS]
            given: Any = {name: value for name, value in bounds if value is not None}
            # A list of a million wrong items is refused at the first one.
            fast: Any = {"fail_fast": True} if get_origin(inner) is list else {}
            return Annotated[checked(inner), Field(**given, **fast)]
        case origin if origin is list:
            return list[checked(*get_args(kind))]  # type: ignore[misc]
        case _:
            return kind


def view_of(struct: type[msgspec.Struct], *names: str) -> Any:
    """Return a base for the view of a struct: its fields, or those named, with what they mean."""
    unknown = set(names).difference(struct.__struct_fields__)
    assert not unknown, f"{struct.__name__} has no {unknown}"
    fields: dict[str, Any] = {
        one.name: (_unchecked(one.type), Field(description=_description(one.type)))
        for one in msgspec.structs.fields(struct)
        if one.name in (names or struct.__struct_fields__) and one.name != "v"
    }
    return create_model(struct.__name__, __config__=ConfigDict(frozen=True), **fields)


def _unchecked(kind: Any) -> Any:
    """Return the type without bounds: an answer is made by us."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _description(kind: Any) -> str | None:
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((meta.description for meta in metas if meta.description), None)
