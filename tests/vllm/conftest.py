"""Fixtures of the vLLM suite: a model, a stack in a thread, engines in processes of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.harness import VLLM_PYTHON, vllm_minor


def pytest_itemcollected(item: pytest.Item) -> None:
    """Stacks are killed here, and the NATS client leaves the sockets of lost connections open."""
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session")
def several_groups() -> None:
    """Skip where this vLLM's connectors cannot serve several KV groups: test_smoke.py says how."""
    if vllm_minor() < 30:
        pytest.skip("vLLM 0.29 passes models with several KV groups through")


def make_model(directory: Path, kind: str, seed: int = 0) -> str:
    """A random model; see make_model.py."""
    assert VLLM_PYTHON.exists(), "`make test-vllm` makes the environment"
    script = Path(__file__).with_name("make_model.py")
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [str(VLLM_PYTHON), str(script), str(directory), "--kind", kind, "--seed", str(seed)]
    subprocess.run(command, check=True, env=environ)
    return str(directory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random model with full attention."""
    return make_model(tmp_path_factory.mktemp("model"), "full")


def make_lora(directory: Path, model: str, seed: int = 1) -> str:
    """A random LoRA adapter for a model; see make_lora.py."""
    script = Path(__file__).with_name("make_lora.py")
    command = [str(VLLM_PYTHON), str(script), model, str(directory), str(seed)]
    subprocess.run(command, check=True)
    return str(directory)


@pytest.fixture(scope="session")
def lora(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random LoRA adapter for the model."""
    return make_lora(tmp_path_factory.mktemp("lora"), model)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write what they have to say; pytest keeps it after a failure."""
    return tmp_path_factory.mktemp("engines")
