"""What must hold on every version of vLLM that is supported.

`make test-vllm` runs the whole suite on the newest version, `make test-vllm-versions` this smoke
test on the others.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import make_model
from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import (
    ENVIRON,
    VLLM_PYTHON,
    EngineProcess,
    LiveStack,
    alike,
    corrupt_arena,
    live_stack,
    prompt,
    same,
    vllm_minor,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LENGTHS = (300, 400, 500)


def test_the_environment_shares_no_file_with_another() -> None:
    """A file of two environments would change in both when one gets another version's Python."""
    packages = VLLM_PYTHON.parent.parent / "lib"
    found = list(packages.glob("python3.*/site-packages/vllm/v1/**/*.py"))
    assert found
    assert [path for path in found if path.stat().st_nlink > 1] == []


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    with live_stack({"cpu_cache_gb": 0.05, "scrub_cpu_percent": 0}) as running:
        yield running


SINCE = {
    "KVConnectorTransferResults": 30, "get_block_ids": 30, "host_resident": 30,
    "kv_hints": 31, "kv_tp_replicas": 31, "num_prefill_lookahead_tokens": 31,
    "prefix_replay_tokens": 31,
    "cache_hit_source": 32,
    "unregister_kv_caches": 33,
}  # fmt: skip
"""The first minor version with each name that older ones lack, as `vllm/versions.py` says."""


def test_what_a_version_lacks() -> None:
    """Goal: no question is asked for a version that is not there any more, nor one forgotten."""
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.versions_process"]
    environ = os.environ | ENVIRON
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    minor = vllm_minor()
    assert json.loads(printed.stdout) == {name: minor >= first for name, first in SINCE.items()}


def test_vllm_lays_heads_outside_of_tokens(model: str) -> None:
    """Goal: engines with one rank and with two share blocks, and vLLM refuses nothing for it.

    An operator's variable wins, and a back end that knows no such layout keeps its own.
    """
    command = [str(VLLM_PYTHON), "-m", "tests.vllm.kv_layout_process", model]
    environ = os.environ | ENVIRON
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    found = json.loads(printed.stdout)
    assert "layout mismatch" in found.pop("beside another layout")
    assert found == {
        "alone": "LBNHC",
        "kvbm": "LBHNC",
        "kvbm, NHD": "LBNHC",
        "kvbm, HND": "LBHNC",
        "kvbm, inside only": "LBNHC",
        "kvbm, blocks outermost": "BLHNC",
        "beside nixl": "LBHNC",
        "PdConnector": "LBHNC",
        "beside another layout, NHD": "LBNHC",
    }


@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_the_same_answers_as_alone(
    stack: LiveStack, tmp_path: Path, log_dir: Path, kind: str
) -> None:
    """Goal: attach, offload, load, a failed load and a reset; the answers of vLLM alone.

    1. Prompts arrive together, without the connector and with it.
    2. The device forgets them, and they come back from the host tier.
    3. The host tier's memory is garbage: all is computed again.
    4. The tiers are forgotten, too: nothing is found.

    One engine of the connector imports vLLM itself, as a user's does.
    """
    model = make_model(tmp_path / "model", kind)
    log = log_dir / f"{kind}.log"
    asks = [Ask(name=f"prompt {n}", tokens=prompt(n, n), new_tokens=20) for n in LENGTHS]
    alone = EngineProcess(model, None, log=log_dir / f"{kind}-alone.log", blocks=256).wait_started()
    expected = alone.run(*asks)
    alone.stop()
    engine = EngineProcess(model, stack.settings, log=log, blocks=256, fresh=kind == "full")
    try:
        engine.wait_started()
        if kind == "windowed" and vllm_minor() < 30:
            assert alike(engine.run(*asks), expected)
            assert "KVBM passes through: this vLLM cannot be told" in log.read_text()
            return
        engine.wait_attached(stack)
        assert alike(engine.run(*asks), expected)
        local = engine.run(*asks)
        engine.reset()
        loaded = engine.run(*asks)
        assert [answer.cached for answer in loaded] == [288, 384, 480]
        assert same(loaded, local)
        assert engine.count("loaded_blocks") > 0

        engine.reset()
        corrupt_arena(stack.settings)
        assert alike(engine.run(*asks), expected)
        assert engine.count("load_failed_blocks") > 0

        assert engine.say(Command(what="reset all")).ok
        forgotten = engine.run(*asks)
        assert [answer.cached for answer in forgotten] == [0, 0, 0]
        assert alike(forgotten, expected)
    finally:
        engine.stop()
