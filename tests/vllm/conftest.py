"""Fixtures of the vLLM suite: a model, a stack in a thread, engines in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import line_process
from tests.vllm.harness import ENVIRON, VLLM_PYTHON, vllm_minor
from tests.vllm.template import Suite, Templates

MAKE_DEADLINE_S = 120.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Stacks are killed here, and the NATS client leaves the sockets of lost connections open."""
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session")
def templates() -> Iterator[Templates]:
    """The processes that fork engines; no suite leaves them behind."""
    templates = Templates()
    yield templates
    templates.close()


@pytest.fixture(autouse=True, scope="session")
def _engines_fork(templates: Templates) -> Iterator[None]:
    """Engines that ask for nothing else are forked from a template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Suite, "templates", templates)
        yield


@pytest.fixture(scope="session")
def several_groups() -> None:
    """Skip where this vLLM's connectors cannot serve several KV groups: test_smoke.py says how."""
    if vllm_minor() < 30:
        pytest.skip("vLLM 0.29 passes models with several KV groups through")


def make_model(directory: Path, kind: str, seed: int = 0, *, kv_heads: int = 2) -> str:
    """A random model; see make_model.py."""
    assert VLLM_PYTHON.exists(), "`make test-vllm` makes the environment"
    numbers = ["--seed", str(seed), "--kv-heads", str(kv_heads)]
    run_maker("make_model", directory, str(directory), "--kind", kind, *numbers)
    return str(directory)


def run_maker(name: str, directory: Path, *arguments: str) -> None:
    """Run one of the modules here that write a directory, in the environment of the engines."""
    start = Suite.templates.start if Suite.templates else line_process.fresh
    log = directory.with_name(f"{directory.name}.log")
    with log.open("ab") as file:
        command: list[str | Path] = [VLLM_PYTHON, "-m", f"tests.vllm.{name}", *arguments]
        process = start(command, os.environ | ENVIRON, file)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.wait(MAKE_DEADLINE_S) == 0, log.read_text(errors="replace")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random model with full attention."""
    return make_model(tmp_path_factory.mktemp("model"), "full")


def make_lora(directory: Path, model: str, seed: int = 1, *, broken: bool = False) -> str:
    """A random LoRA adapter for a model; see make_lora.py."""
    more = ["broken"] if broken else []
    run_maker("make_lora", directory, model, str(directory), str(seed), *more)
    return str(directory)


@pytest.fixture(scope="session")
def lora(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random LoRA adapter for the model."""
    return make_lora(tmp_path_factory.mktemp("lora"), model)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write what they have to say; pytest keeps it after a failure."""
    return tmp_path_factory.mktemp("engines")
