"""Values that are drawn from values.schema.json: a text at every place that takes one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from tests.helm.chart import CHART, LOADER

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.load((CHART / "values.yaml").read_text(), LOADER)
UNUSED = {"/global", "/bucket/claimName", "/bucket/path"}
"""Values that no template reads, or not beside `/bucket/name`."""

Schema = dict[str, Any]
Place = Callable[[str, str], str]
"""Makes the text of a place, from its pointer and an example of what belongs there."""


def resolved(schema: Schema) -> Schema:
    """Return a schema with the definition that it names."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return SCHEMA["$defs"][name] | schema if name else schema


def takes_text(schema: Schema) -> bool:
    """Tell whether a string may be the value of a schema."""
    kinds = schema.get("type", ())
    return "string" in kinds or any(isinstance(value, str) for value in schema.get("enum", ()))


def example(schema: Schema) -> str:
    """Return a string that a schema takes."""
    given = [*schema.get("examples", ()), *schema.get("enum", ())]
    return next(value for value in given if isinstance(value, str))


def values(place: Place, other: Any = None, schema: Schema = SCHEMA, pointer: str = "") -> Any:
    """Return a value with everything that a schema describes.

    `other` is at the places of switches and numbers. Without it a switch is on, and a number is
    there only where it must be. The pointer of a key ends in `/KEY`.
    """
    schema = resolved(schema)
    if takes_text(schema):
        return place(pointer, example(schema))
    match schema.get("type"):
        case "object":
            return dict(members(place, other, schema, pointer))
        case "array":
            return [values(place, other, schema["items"], f"{pointer}/0")]
        case "boolean":
            return other or True
    return other or schema["minimum"]


def members(place: Place, other: Any, schema: Schema, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of an object. A map has two: one for its value, one for its key."""
    assert schema.get("additionalProperties") is False, f"{pointer}: takes any name"
    for name, member in used(schema, pointer).items():
        is_needed = name in schema.get("required", ()) and not has_default(f"{pointer}/{name}")
        if other or not is_number(member) or is_needed:
            yield name, values(place, other, member, f"{pointer}/{name}")
    for member in schema.get("patternProperties", {}).values():
        [[name, text]] = schema["examples"][0].items()
        yield name, values(place, other, member, f"{pointer}/{name}")
        yield place(f"{pointer}/KEY", f"{name}2".upper()), text


def used(schema: Schema, pointer: str) -> dict[str, Schema]:
    """Return the members of an object that templates read."""
    properties = schema.get("properties", {}).items()
    return {
        name: member for name, member in properties
        if member is not False and f"{pointer}/{name}" not in UNUSED
    }  # fmt: skip


def is_number(schema: Schema) -> bool:
    """Tell whether a value is a number and nothing else."""
    schema = resolved(schema)
    kinds = {type(value) for value in schema.get("enum", ())}
    return schema.get("type") in ("integer", "number") or kinds == {int}


def has_default(pointer: str) -> bool:
    """Tell whether values.yaml has a value at a pointer."""
    value: Any = DEFAULTS
    for name in pointer.strip("/").split("/"):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def places(schema: Schema = SCHEMA, pointer: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every place of a value that has no parts, and every key, with its schema."""
    schema = resolved(schema)
    parts = used(schema, pointer)
    for pattern, member in schema.get("patternProperties", {}).items():
        yield f"{pointer}/KEY", {"type": "string", "pattern": pattern}
        parts = parts | {next(iter(schema["examples"][0])): member}
    if "items" in schema:
        parts = {"0": schema["items"]}
    for name, member in parts.items():
        yield from places(member, f"{pointer}/{name}")
    if not parts:
        yield pointer, schema


def plain(value: Any, text: str, mark: str) -> Any:
    """Return a rendered value with a mark for a text, and lists in an order without meaning."""
    match value:
        case dict():
            return {
                key.replace(text, mark): plain(inside(key, one), text, mark)
                for key, one in value.items()
            }
        case list():
            return sorted((plain(one, text, mark) for one in value), key=repr)
        case str():
            return value.replace(text, mark)
    return value


def inside(key: str, value: Any) -> Any:
    """Return the document that a rendered file has in it."""
    return yaml.load(value, LOADER) if key == "patch.yaml" else value
