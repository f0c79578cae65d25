"""Blocks with images have one name, whether the connector or vLLM's events say it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.vllm.harness import ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SEEDS = 2_000


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
