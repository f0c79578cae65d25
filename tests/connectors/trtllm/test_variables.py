"""Variables: which of TensorRT-LLM's environment variables are part of a block's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_connectors.trtllm.harmless import HARMLESS_VARIABLES
from kvbm_connectors.trtllm.identity import namespace_of

from tests.connectors.trtllm.package import args_of


def digest() -> bytes:
    """The digest of a namespace, under the variables that are set now."""
    return namespace_of(args_of(), "1.2.1", "life").digest


@pytest.mark.parametrize(
    "variable",
    [
        "TLLM_OVERRIDE_LAYER_NUM",
        "TRTLLM_LOAD_KV_SCALES",
        "TRTLLM_OF_A_LATER_RELEASE",
        "OVERRIDE_QUANT_ALGO",
    ],
)
def test_variables_enter_the_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Goal: what one engine computes is not served to another one that would compute otherwise."""
    before = digest()
    monkeypatch.setenv(variable, "2")
    after = digest()
    assert before != after == digest()
    monkeypatch.setenv(variable, "3")
    assert digest() not in (before, after)


def test_harmless_variables_leave_the_name_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher draws a key for each life."""
    before = digest()
    assert "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY" in HARMLESS_VARIABLES
    for variable in (*HARMLESS_VARIABLES, "DYN_KVBM_TRTLLM_ZMQ_PORT"):
        monkeypatch.setenv(variable, "1")
    assert digest() == before


def test_a_file_that_a_variable_names_counts_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: neither another file under the same path nor another path of the same file misleads."""
    found = []
    for name, content in (("one", "{}"), ("one", "[]"), ("other", "[]")):
        path = tmp_path / name
        path.write_text(content)
        monkeypatch.setenv("TRTLLM_OF_A_LATER_RELEASE", str(path))
        found.append(digest())
    assert found[0] != found[1] == found[2]
