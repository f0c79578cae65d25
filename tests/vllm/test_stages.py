"""Pipeline stages as vLLM's own KV cache configurations tell them, on drawn models."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.vllm.harness import ENVIRON, ROOT, VLLM_PYTHON

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("several_groups")
]  # fmt: skip

SEEDS = 60


def test_all_processes_name_blocks_alike_and_a_name_has_the_same_layers() -> None:
    """Goal: no process of an engine stores a layer where another one loads a different one.

    1. Models are drawn: types of layers, patterns, groups of one size and of several. vLLM cuts
       each into stages in several ways, and tells every process its part.
    2. The scheduler and all workers agree, or refuse. Where types tell layers, they refuse alike.
    3. Two engines with one name have the same layer in each row of each group.
    4. A worker that refuses alone says so, once.
    """
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.stages_process", str(SEEDS)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRON, check=True, stdout=subprocess.PIPE, timeout=200
    )
    said = json.loads(ended.stdout)
    assert said["wrong"] == []
    assert min(said["counts"]["agreed"], said["counts"]["refused"], said["counts"]["shared"]) > 30
    scheduler, *reports = said["reports"]
    assert "4x2x2" in scheduler
    assert reports == [
        "pipeline parallelism: layers of one type have different KV layers", "", ""
    ]  # fmt: skip
