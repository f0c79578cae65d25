"""LoRA in SGLang: page keys hold an adapter's name and path, so its content is in the revision."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.client.weights import UnreadableWeights
from kvbm_connectors.sglang.adapters import process_start_ns
from kvbm_connectors.sglang.weights import revision_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory."""
    return write(tmp_path / "model")


def write(directory: Path, content: bytes = b"1") -> Path:
    """Weights in a directory, replaced in place."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


def revision(model: Path, since_ns: int = 2**63, named: str = "", **arguments: Any) -> str:
    """The revision that SGLang's arguments give."""
    given = SimpleNamespace(model_path=str(model), **arguments)
    return revision_of(given, named=named, since_ns=since_ns)


def ref(name: str, path: Path) -> SimpleNamespace:
    """SGLang's LoRARef, which its arguments hold once they are parsed."""
    return SimpleNamespace(lora_id="1", lora_name=name, lora_path=str(path), pinned=False)


def forms(path: Path) -> list[Any]:
    """The ways in which SGLang takes one adapter that is called `poet`."""
    return [
        {"poet": str(path)},
        [f"poet={path}"],
        [{"lora_name": "poet", "lora_path": str(path)}],
        [ref("poet", path)],
    ]


def test_another_adapter_at_the_same_name_and_path_is_another_revision(
    model: Path, tmp_path: Path
) -> None:
    """In every form of the argument; the forms are one adapter."""
    found = []
    for content in (b"1", b"2"):
        adapter = write(tmp_path / "adapter", content)
        found.append({revision(model, lora_paths=form) for form in forms(adapter)})
    first, other = found
    assert len(first) == len(other) == 1
    assert first != other
    assert revision(model) not in first | other


def test_an_operator_s_name_stands_for_the_model_s_weights_alone(tmp_path: Path) -> None:
    """Adapters and arguments enter besides; without SGLang's arguments the name is all there is."""
    adapter = write(tmp_path / "adapter")
    nowhere = tmp_path / "nowhere"
    found = [revision(nowhere, named="1"), revision(nowhere, named="1", quantization="fp8")]
    for content in (b"1", b"2"):
        write(adapter, content)
        found.append(revision(nowhere, named="1", lora_paths={"poet": str(adapter)}))
    assert len(set(found)) == 4
    assert revision_of(None, named="1") == "1"


def test_a_copy_of_an_adapter_shares_the_revision(model: Path, tmp_path: Path) -> None:
    """Hosts may keep it in different places."""
    here, there = (write(tmp_path / place) for place in ("a", "b"))
    assert revision(model, lora_paths={"poet": str(here)}) == revision(
        model, lora_paths={"poet": str(there)}
    )


def test_a_path_without_a_name_is_its_name(model: Path, tmp_path: Path) -> None:
    """SGLang takes `--lora-paths PATH`."""
    adapter = write(tmp_path / "adapter")
    bare = revision(model, lora_paths=[str(adapter)])
    assert bare == revision(model, lora_paths={str(adapter): str(adapter)})


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_target_modules": ["o_proj"]},
        {"lora_target_modules": {"o_proj", "q_proj"}},
        {"experts_shared_outer_loras": True},
    ],
)
def test_where_adapters_are_applied_is_part_of_the_revision(
    model: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """The same files, and other layers that use them."""
    paths = {"poet": str(write(tmp_path / "adapter"))}
    assert revision(model, lora_paths=paths) != revision(model, lora_paths=paths, **changed)


def test_ignored_paths_change_nothing(model: Path) -> None:
    """SGLang warns, and loads none of them."""
    paths = {"poet": "/nowhere"}
    without = revision(model, enable_lora=False)
    assert revision(model, lora_paths=paths, enable_lora=False) == without


@pytest.mark.parametrize("paths", [{"poet": "/nowhere"}, [{"lora_name": "poet"}], "poet=/srv/poet"])
def test_an_adapter_that_cannot_be_read_has_no_name(model: Path, paths: Any) -> None:
    """The engine passes through."""
    with pytest.raises(UnreadableWeights):
        revision(model, lora_paths=paths)


def test_an_adapter_that_is_younger_than_the_engine_has_no_name(
    model: Path, tmp_path: Path
) -> None:
    """What SGLang has loaded is not what the files hold."""
    adapter = write(tmp_path / "adapter")
    changed = (adapter / "adapter_model.safetensors").stat().st_ctime_ns
    paths = {"poet": str(adapter)}
    assert revision(model, changed + 1, lora_paths=paths) == revision(model, lora_paths=paths)
    with pytest.raises(UnreadableWeights, match="poet are younger"):
        revision(model, changed, lora_paths=paths)


def test_the_process_began_before_this_test() -> None:
    """It is a time of the wall clock, of this boot."""
    began = process_start_ns()
    assert os.stat("/proc/1").st_ctime_ns - 10**11 < began < time.time_ns()
