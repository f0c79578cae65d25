"""Hits over several KV groups: our rule beside vLLM's own search, on drawn groups and blocks."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.vllm.harness import ENVIRON, ROOT, VLLM_PYTHON

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("several_groups")
]  # fmt: skip

SEEDS = 1_000


def test_a_hit_is_as_long_as_vllm_s_own_and_of_the_same_blocks() -> None:
    """Goal: what the host tier answers is what vLLM's device cache would hit on the same blocks.

    1. Groups are drawn: full attention, windows shorter than a block and no multiple of one,
       chunks, states, with up to four sizes of blocks; then the blocks that are there.
    2. vLLM's coordinator says how long the hit is, and which blocks of each group it uses.
    """
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.hits_process", str(SEEDS)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRON, check=True, stdout=subprocess.PIPE, timeout=200
    )
    said = json.loads(ended.stdout)
    assert said["differ"] == []
    assert said["hits"] > SEEDS / 2
