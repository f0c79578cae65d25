"""docs/asyncapi.yaml: current, complete, and whole in itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kvbm_common.wire import admin, events, index_verbs, verbs

from release import asyncapi
from release.asyncapi import Json

MODULES = (admin, events, index_verbs, verbs)
FILE = Path(__file__).parents[2] / "docs" / "asyncapi.yaml"


@pytest.fixture(scope="module")
def described() -> Json:
    """The document as a reader of the file sees it."""
    loaded = yaml.safe_load(FILE.read_text())
    assert isinstance(loaded, dict)
    return loaded


def references(node: Any) -> Iterator[str]:
    """Every `$ref` below a node."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(described: Json, reference: str) -> Any:
    """What a local reference points to; KeyError when it points nowhere."""
    node: Any = described
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def test_the_file_is_current() -> None:
    """Whoever changes a message renews the file: see the module's text."""
    assert FILE.read_text() == asyncapi.render()


def test_every_reference_resolves(described: Json) -> None:
    """A reader never meets a dangling reference."""
    for reference in references(described):
        assert resolve(described, reference), reference


def test_parameters_are_those_of_the_address(described: Json) -> None:
    """Each `{name}` in an address is explained, and nothing else."""
    for name, channel in described["channels"].items():
        placeholders = set(re.findall(r"{(\w+)}", channel["address"] or ""))
        assert placeholders == set(channel.get("parameters", {})), name


def test_operations_use_messages_of_their_channel(described: Json) -> None:
    """AsyncAPI 3.0 wants an operation's messages to be a subset of its channel's."""
    for operation in described["operations"].values():
        for part in [operation, *([operation["reply"]] if "reply" in operation else [])]:
            channel = part["channel"]["$ref"]
            assert part["messages"]
            assert all(one["$ref"].startswith(f"{channel}/messages/") for one in part["messages"])


def test_every_request_can_fail(described: Json) -> None:
    """An ErrorReply is one of the answers to each verb."""
    received = [one for one in described["operations"].values() if one["action"] == "receive"]
    assert len(received) == sum(1 + verb.shared for verb in asyncapi.VERBS)
    for operation in received:
        names = {one["$ref"].rsplit("/", 1)[1] for one in operation["reply"]["messages"]}
        assert "ErrorReply" in names


def test_every_message_on_nats_is_described(described: Json) -> None:
    """A new struct with a version must find its way into the tables of the generator."""
    messages = {
        name
        for module in MODULES
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and name[0] != "_"
        if "v" in one.__struct_fields__
    }
    assert messages <= set(described["components"]["messages"])


def test_every_field_is_in_the_schemas(described: Json) -> None:
    """Field by field, the schemas are the structs."""
    for name, schema in described["components"]["schemas"].items():
        struct = next((getattr(m, name) for m in MODULES if hasattr(m, name)), None)
        if struct is not None:
            tag = {struct.__struct_config__.tag_field} - {None}
            assert set(schema["properties"]) == set(struct.__struct_encode_fields__) | tag, name
