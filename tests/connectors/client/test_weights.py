"""Weights: their name is their content, wherever they lie and whenever they were written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvbm_connectors.client import weights
from kvbm_connectors.client.weights import (
    UnreadableWeights,
    fingerprint,
    label_of,
    signature,
)

COMMIT = 40 * "a"
SMALL_FILE = 8_192
"""Instead of 4 MiB, so that files need not be large to be sampled."""


SAMPLES = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def safetensors(tensors: Mapping[str, bytes]) -> bytes:
    """A file of byte tensors."""
    header, end = {}, 0
    for name, content in tensors.items():
        offsets = [end, end := end + len(content)]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def make_model(directory: Path, content: bytes = b"weights") -> Path:
    """A directory with a config and one file of weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(safetensors({"a": content}))
    return directory


def test_another_fine_tune_at_the_same_path_has_another_name(tmp_path: Path) -> None:
    """Times that were normalised, as by an image build, hide nothing."""
    model = make_model(tmp_path / "model", b"first")
    for path in model.iterdir():
        os.utime(path, ns=(0, 0))
    before = fingerprint(model)
    (model / "model.safetensors").write_bytes(safetensors({"a": b"other"}))
    os.utime(model / "model.safetensors", ns=(0, 0))
    assert fingerprint(model) != before


def test_copies_of_the_same_weights_have_one_name(tmp_path: Path) -> None:
    """Hosts with a copy each share their blocks, whatever the directory is called."""
    one, other = make_model(tmp_path / "one"), make_model(tmp_path / "deep" / "other")
    os.utime(one / "model.safetensors", ns=(0, 0))
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "pytorch_model.bin", "a.pt", "consolidated.pth", "a.gguf", "a.npz",
        "a.npy", "model.safetensors.index.json", "config.json", "modeling_own.py",
        "below/model.safetensors", "generation_config.json",
    ],
)  # fmt: skip
def test_every_file_of_a_model_counts(tmp_path: Path, name: str) -> None:
    """Its content does, and whether it is there."""
    model = make_model(tmp_path / "model")
    (model / "below").mkdir()
    found = {fingerprint(model)}
    for content in (b"1", b"2"):
        (model / name).write_bytes(content)
        found.add(fingerprint(model))
    assert len(found) == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "tekken.json", "README.md", ".x.pt"])
def test_files_that_do_not_matter(tmp_path: Path, name: str) -> None:
    """Blocks are named by token ids: what those mean, and how they are drawn, is not in them."""
    model = make_model(tmp_path / "model")
    before = fingerprint(model)
    (model / name).write_text("{}")
    assert fingerprint(model) == before


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    """GGUF models are given by a file; what it is called does not matter."""
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf"]
    for path, content in zip(paths, (b"1", b"1", b"2"), strict=True):
        path.write_bytes(content)
    first, same, other = map(fingerprint, paths)
    assert first == same != other


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all files are large."""
    monkeypatch.setattr(weights, "WHOLE_BYTES", SMALL_FILE)
    monkeypatch.setattr(weights, "STRETCH_BYTES", 1 << 16)
    monkeypatch.setattr(weights, "PAGES", 12)


@given(
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=4).filter(
        lambda sizes: sum(sizes) > SMALL_FILE
    ),
    changed=st.integers(0, 3),
    flip=st.integers(1, 255),
)
@SAMPLES
def test_training_any_one_tensor_is_seen(
    tmp_path_factory: pytest.TempPathFactory,
    sampled: None,
    sizes: list[int],
    changed: int,
    flip: int,
) -> None:
    """Of the file only samples are read, and some of each tensor."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    tensors = {f"layer {index}": bytes(size) for index, size in enumerate(sizes)}
    path.write_bytes(safetensors(tensors))
    before = fingerprint(path)
    name = f"layer {changed % len(sizes)}"
    path.write_bytes(safetensors(tensors | {name: bytes([flip]) * len(tensors[name])}))
    assert fingerprint(path) != before


@given(first=st.integers(0, 400_000), kind=st.sampled_from([".safetensors", ".bin"]))
@SAMPLES
def test_a_change_of_two_stretches_is_seen(
    tmp_path_factory: pytest.TempPathFactory, sampled: None, first: int, kind: str
) -> None:
    """There is a page in each stretch: no change as long as two can lie between two pages."""
    path = tmp_path_factory.mktemp("model") / f"model{kind}"
    content = bytearray(500_000)
    pages = 12 if kind == ".safetensors" else 2
    stretch = 500_000 // 12 if kind == ".safetensors" else (1 << 16) // weights.PAGES_MIN

    def write() -> str:
        path.write_bytes(safetensors({"a": bytes(content)}) if pages == 12 else bytes(content))
        return fingerprint(path)

    before = write()
    end = min(len(content), first + 2 * stretch)
    content[first:end] = b"x" * (end - first)
    assert write() != before


@pytest.mark.parametrize("changed", [0, 39])
@pytest.mark.parametrize("quarter", [0, 1, 2])
def test_of_many_tensors_each_is_sampled_in_its_middle(
    tmp_path: Path, sampled: None, changed: int, quarter: int
) -> None:
    """Half of one tensor changes, in a model that has more tensors than pages to share out."""
    size = 100_000
    tensors = {f"layer {index}": bytes(size) for index in range(40)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(tensors))
    before = fingerprint(path)
    first = size * quarter // 4
    content = bytes(first) + b"x" * (size // 2)
    path.write_bytes(safetensors(tensors | {f"layer {changed}": content.ljust(size, b"\0")}))
    assert fingerprint(path) != before


def test_large_files_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 GB of weights are named by reading some MiB of them."""
    read: list[int] = []
    pread = os.pread

    def counting(file: int, size: int, offset: int) -> bytes:
        found = pread(file, size, offset)
        read.append(len(found))
        return found

    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(15 << 30)
    monkeypatch.setattr(os, "pread", counting)
    fingerprint(path)
    assert sum(read) < 20 << 20


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    """Content counts, not where it lies: a directory of links has the name of a copy."""
    model = make_model(tmp_path / "model")
    links = tmp_path / "links"
    links.mkdir()
    for path in model.iterdir():
        (links / path.name).symlink_to(path)
    assert fingerprint(links) == fingerprint(model)
    (links / "again").symlink_to(links)
    fingerprint(links)


def hub_snapshot(tmp_path: Path) -> Path:
    """A model as the hub's cache keeps it."""
    repository = tmp_path / "models--org--tiny"
    blobs = make_model(repository / "blobs")
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def test_a_snapshot_of_the_hub_that_is_written_through_its_link_has_another_name(
    tmp_path: Path,
) -> None:
    """`cp` follows the link: the snapshot keeps its commit, and is not what it was."""
    snapshot = hub_snapshot(tmp_path)
    before = fingerprint(snapshot)
    assert label_of(str(snapshot)) == "org/tiny"
    (snapshot / "config.json").write_text('{"rope": 1}')
    assert (snapshot / "config.json").is_symlink()
    assert fingerprint(snapshot) != before


def test_weights_that_cannot_be_read_have_no_name(tmp_path: Path) -> None:
    """In doubt an engine passes through."""
    model = make_model(tmp_path / "model")
    (model / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnreadableWeights):
        fingerprint(model)
    with pytest.raises(UnreadableWeights):
        signature(model)
    with pytest.raises(UnreadableWeights):
        fingerprint(tmp_path / "nothing")


def test_a_directory_without_weights_has_no_name(tmp_path: Path) -> None:
    """They are somewhere else then, and may change there."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnreadableWeights, match="no weights"):
        fingerprint(tmp_path)


def test_a_signature_says_that_a_file_was_touched(tmp_path: Path) -> None:
    """It tells whether the content must be looked at again."""
    model = make_model(tmp_path / "model")
    before = signature(model)
    assert signature(model) == before
    (model / "model.safetensors").write_bytes(safetensors({"a": b"xxxxxxx"}))
    assert signature(model) != before


@pytest.mark.parametrize("content", [b"\0" * 10_000, struct.pack("<Q", 2) + b"{]" + bytes(9_000)])
def test_a_file_that_only_claims_to_be_safetensors(
    tmp_path: Path, sampled: None, content: bytes
) -> None:
    """It is sampled like any other file."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = fingerprint(path)
    path.write_bytes(content[:-1] + b"x")
    assert fingerprint(path) != before
