"""The document shows what the tests run. It needs no vLLM."""

from __future__ import annotations

import json
import re

from tests.vllm.harness import ROOT
from tests.vllm.server import TRANSFER
from tests.vllm.test_disaggregated import BOTH, NIXL

DOCUMENT = ROOT / "docs" / "vllm.md"


def without_test_machine(config: object) -> object:
    """The same, without what the tests add for a machine with two cores."""
    text = json.dumps(config).replace(json.dumps(NIXL["kv_connector_extra_config"]), "null")
    return json.loads(text.replace(', "kv_connector_extra_config": null', ""))


def test_the_configurations_are_those_of_the_tests() -> None:
    """Goal: who copies a line from the document runs what was tested."""
    found = re.findall(r"--kv-transfer-config '(.*)'", DOCUMENT.read_text())
    assert [json.loads(text) for text in found] == [
        TRANSFER,
        without_test_machine(BOTH),
        without_test_machine(NIXL),
    ]


def test_counters_that_the_document_names_exist() -> None:
    """Goal: no counter in the document that nobody counts."""
    table = DOCUMENT.read_text().split("| what | meaning |")[1].split("\n\n")[0]
    named = {name.split(".")[0] for name in re.findall(r"`([a-z_.A-Z]+)`", table)}
    code = "\n".join(
        path.read_text() for path in (ROOT / "connectors" / "kvbm_connectors").rglob("*.py")
    )
    reasons = {"deadline", "lease_ended", "corrupt", "peer_lost", "arena_changed"}
    missing = {name for name in named - reasons if f'"{name}' not in code}
    assert missing - {"link"} == set()
