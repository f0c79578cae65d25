"""Hostile texts at every place of values.schema.json: refused by name, or a string and no more."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import Document, Refused, render
from tests.helm.hostile import Place, places, plain, takes_text, values

LINES = ("x\n  hostNetwork: true", "\u2028", "x\u0085y", "\x1b[2J", "\u202e")
"""Controls, and what ends a line or turns it round: no place takes them."""
SIGNS = (
    "x: y",
    "a } # b",
    "{{ .Release.Name }}",
    "- x",
    "'\"",
    "!!binary x",
    "*a",
    "&a",
    "%",
    "\\",
)
"""Signs of YAML and of templates: free texts take them, names do not."""
OTHER_TYPES = ("true", "null", "~", "0x1", "1e3", "2026-01-01")
"""Texts that YAML would read as something else."""
MARK = "harmless"
TEXTS = {pointer: schema for pointer, schema in places() if takes_text(schema)}
FREE = {pointer for pointer, schema in TEXTS.items() if r"\p{C}" in schema.get("pattern", "")}
CHECKED_BY_A_TEMPLATE = "/fullnameOverride"
SHAPES: tuple[dict[str, dict[str, Any]], ...] = (
    {"node": {"hostNetwork": False}},
    {"nats": {"enabled": False}, "image": {"digests": {}}},
)
"""Every value has an effect in one of these."""
POSITIONS = {
    "alone": lambda text, example: text,
    "before": lambda text, example: text + example,
    "after": lambda text, example: example + text,
}


def drawn(place: Place, shape: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the values of a shape."""
    made: dict[str, Any] = values(place)
    for name, more in shape.items():
        made[name] |= more
    if made["nats"]["enabled"]:
        del made["nats"]["url"]
    return made


def rendered(made: dict[str, Any], *arguments: str) -> list[Document]:
    """Return the documents of values; raises Refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "values.json"
        path.write_text(json.dumps(made))
        return render("--values", str(path), *arguments)


def refused_places(made: dict[str, Any]) -> set[str]:
    """Return the pointers in helm's complaints; of a name that is not allowed that of a key."""
    with pytest.raises(Refused) as refused:
        rendered(made)
    complaints = re.findall(r"^ *- at '(\S*)': (\S+ +\S+)", str(refused.value), re.MULTILINE)
    return {
        f"{pointer}/KEY" if words == "additional properties" else pointer
        for pointer, words in complaints
        if words != "validation failed"
    }


def test_examples_are_taken() -> None:
    """Goal: the schema refuses texts for what they are, not for where they are."""
    for shape in SHAPES:
        assert rendered(drawn(lambda _, example: example, shape))


@pytest.mark.parametrize("text", LINES + SIGNS, ids=ascii)
def test_the_schema_refuses_a_text_by_the_name_of_its_value(text: str) -> None:
    """Goal: no place takes a control; signs of YAML are only in free texts."""
    for position in ("before", "after"):
        refused: set[str] = set()
        for shape in SHAPES:
            refused |= refused_places(drawn(placed(text, position), shape))
        missing = set(TEXTS) - refused - {CHECKED_BY_A_TEMPLATE}
        assert missing <= (set() if text in LINES else FREE), position


def test_the_schema_refuses_a_text_in_place_of_a_switch_or_a_number() -> None:
    """Goal: what a template writes without quotes is no text."""
    refused = refused_places(values(lambda _, example: example, other=SIGNS[0]))
    others = {pointer for pointer, _ in places()} - set(TEXTS)
    assert len(others) > 20
    assert others <= refused


@functools.cache
def harmless(position: str, shape: int) -> list[Document]:
    """Return the documents with a harmless text at every place."""
    return rendered(drawn(placed(MARK, position), SHAPES[shape]), "--skip-schema-validation")


def placed(text: str, position: str) -> Place:
    """Return what puts a text at every place, but for the one that a template checks."""

    def place(pointer: str, example: str) -> str:
        return example if pointer == CHECKED_BY_A_TEMPLATE else POSITIONS[position](text, example)

    return place


@pytest.mark.parametrize("text", LINES + SIGNS + OTHER_TYPES, ids=ascii)
def test_templates_write_a_text_as_a_string_and_no_more(text: str) -> None:
    """Goal: without the schema, too, documents are those of a harmless text, but for the text."""
    positions = ["alone"] if text in OTHER_TYPES else ["alone", "after"]
    for position, (number, shape) in itertools.product(positions, enumerate(SHAPES)):
        found = rendered(drawn(placed(text, position), shape), "--skip-schema-validation")
        assert plain(found, text, MARK) == plain(harmless(position, number), text, MARK), position


@pytest.mark.parametrize("text", LINES + SIGNS, ids=ascii)
def test_the_name_of_all_objects_is_refused_by_schema_and_template(text: str) -> None:
    """Goal: the name that all others begin with holds no such text."""
    made = {"fullnameOverride": text}
    assert refused_places(made) == {CHECKED_BY_A_TEMPLATE}
    with pytest.raises(Refused, match="fullnameOverride"):
        rendered(made, "--skip-schema-validation")


def test_every_place_is_rendered() -> None:
    """Goal: no place passes the tests above because nothing is made of it."""
    names = {pointer: f"place-{number}-x" for number, pointer in enumerate(TEXTS)}
    seen = "\n".join(
        json.dumps(rendered(drawn(lambda at, _: names[at], shape), "--skip-schema-validation"))
        for shape in SHAPES
    )
    assert [pointer for pointer, name in names.items() if name not in seen] == []
