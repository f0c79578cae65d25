"""Every field and variable of the installed vLLM was looked at: it enters, or is harmless."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from kvbm_connectors.vllm import harmless

from tests.vllm import entering
from tests.vllm.harness import ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DRAFT = (
    ("speculative_config.draft_model_config.", "model_config."),
    ("speculative_config.draft_load_config.", "load_config."),
)
"""A draft's parts, and those of the engine that they are like."""
ENTERING = {
    path if not part else f"{part}.{path}"
    for part, names in entering.FIELDS.items()
    for path in names.split()
}


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    """What vLLM itself says."""
    found = subprocess.run(
        [VLLM_PYTHON, "-m", "tests.vllm.fields_process"], stdout=subprocess.PIPE, check=True,
        cwd=ROOT, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout  # fmt: skip
    answer: dict[str, list[str]] = json.loads(found)
    return answer


def paths_to(path: str) -> set[str]:
    """A field and the parts that it lies in."""
    pieces = path.split(".")
    return {".".join(pieces[:count]) for count in range(1, len(pieces) + 1)}


def as_of_the_engine(path: str) -> str:
    """The engine's own field, for one of a draft."""
    for prefix, own in DRAFT:
        path = own + path.removeprefix(prefix) if path.startswith(prefix) else path
    return path


def test_every_field_was_looked_at(known: dict[str, list[str]]) -> None:
    """One in neither list changes names already; put it where it belongs."""
    fields = {as_of_the_engine(path) for path in known["fields"]}
    assert len(fields) > 300
    seen = ENTERING | harmless.FIELDS
    assert {path for path in fields if not paths_to(path) & seen} == set()


def test_no_field_is_in_both_lists(known: dict[str, list[str]]) -> None:
    """A list of what enters says nothing that is not so."""
    both = {path for path in ENTERING if paths_to(path) & harmless.FIELDS}
    assert both == set()
    gone = {path for path in ENTERING if not any(path in paths_to(one) for one in known["fields"])}
    assert gone == set()


def test_every_variable_was_looked_at(known: dict[str, list[str]]) -> None:
    """So is each variable that vLLM knows."""
    assert len(known["variables"]) > 200
    enter = set("".join(entering.VARIABLES).split())
    assert set(known["variables"]) - harmless.HARMLESS_VARIABLES == enter


def test_every_field_of_lora_was_looked_at(known: dict[str, list[str]]) -> None:
    """They enter the names of adapters."""
    assert set(known["lora"]) - harmless.OF_LORA == set(entering.LORA.split())
