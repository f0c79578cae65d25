"""Blocks with images have one name, whether the connector or vLLM's events say it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SEEDS = 2_000
CLOSED = {"enable_mm_embeds": False, "allow_missing_mm_embeddings": False}
OURS = {"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm_connectors.vllm"}


def test_connector_and_events_name_blocks_with_images_alike() -> None:
    """Goal: what vLLM hashes beside tokens is in both names, at the same places.

    1. Prompts with up to four images, an adapter and a salt are drawn. 2. vLLM's own function says
    what it hashes of each block. 3. The names of events are those by which the connector asks.
    """
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.multimodal_process", str(SEEDS)]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=200)
    said = json.loads(ended.stdout)
    assert said["differ"] == []
    assert said["with_images"] > SEEDS / 2
    assert said["blocks"] > 10 * SEEDS
    assert said["inside_of_both"] == ["sound"], "vLLM's hits tell videos apart: do not refuse them"


@pytest.mark.parametrize(
    ("connector", "inputs"),
    [({}, CLOSED), (OURS, CLOSED),
     ({"kv_connector": "OffloadingConnector"}, dict.fromkeys(CLOSED, True))],
    ids=["none", "KVBM", "vLLM's own"],
)  # fmt: skip
def test_a_client_names_no_embeddings_that_it_does_not_send(
    tmp_path: Path, connector: dict[str, Any], inputs: dict[str, bool]
) -> None:
    """Goal: with KVBM a request cannot end an engine that vLLM alone protects from it."""
    transfer = json.dumps(connector | {"kv_role": "kv_both"} if connector else {})
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.embedding_inputs_process", str(tmp_path)]
    ended = subprocess.run(
        [*command, transfer], cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=200
    )
    assert json.loads(ended.stdout) == inputs
