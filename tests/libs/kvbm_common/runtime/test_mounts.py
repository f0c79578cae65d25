"""A disk that is not mounted any more is told from one that was replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvbm_common.checksum import block_checksum
from kvbm_common.runtime import mounts
from kvbm_common.runtime.mounts import missing_mount, mount_point, note_mount

from tests.small_tmpfs import small_tmpfs


def test_a_store_whose_disk_is_not_mounted_is_named(tmp_path: Path) -> None:
    """1. A disk is mounted, and noted. 2. It is not mounted: the store would be made on the disk
    below. 3. It is mounted again, or another one is in its place."""
    disk, state = tmp_path / "disk", tmp_path / "state"
    store = disk / "kvbm-h-0"
    with small_tmpfs(disk, 1 << 20):
        assert mount_point(store) == disk
        assert missing_mount(store, state) is None
        note_mount(store, state)
        assert missing_mount(store, state) is None
    missing = missing_mount(store, state)
    assert missing is not None
    assert (missing.last, missing.now) == (disk, mount_point(tmp_path))
    assert missing.found.startswith(f"{disk} was on the disk mounted at {disk}, and is on that of ")
    assert missing.advice == f"mount {disk}, or accept this disk: mkdir -p -m 700 {store}"
    disk.rmdir()
    assert missing_mount(store, state) == missing
    with small_tmpfs(disk, 1 << 20):
        assert missing_mount(store, state) is None


def test_a_store_of_another_name_is_not_made_on_the_disk_below(tmp_path: Path) -> None:
    """The directory had a tier of another number or instance. Its disk is waited for, until one
    tier is told to use what is there."""
    disk, state = tmp_path / "disk", tmp_path / "state"
    with small_tmpfs(disk, 1 << 20):
        note_mount(disk / "kvbm-h-0", state)
    missing = missing_mount(disk / "kvbm-h-0-1", state)
    assert missing is not None
    assert (missing.store, missing.last) == (disk / "kvbm-h-0-1", disk)
    (disk / "kvbm-h-0-1").mkdir()
    note_mount(disk / "kvbm-h-0-1", state)
    assert missing_mount(disk / "kvbm-h-0-2", state) is None
    assert missing_mount(disk / "kvbm-h-0", state) is not None, "it has a record of its own"


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """It wrote one for the store alone."""
    disk, state = tmp_path / "disk", tmp_path / "state"
    with small_tmpfs(disk, 1 << 20):
        note_mount(disk / "kvbm-h-0", state)
    for one in (state / "mounts").iterdir():
        if one.name != f"{block_checksum(os.fsencode(disk / 'kvbm-h-0')):016x}":
            one.unlink()
    assert missing_mount(disk / "kvbm-h-0", state) is not None
    assert missing_mount(disk / "kvbm-h-0-1", state) is None


def test_a_store_whose_directory_is_made_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is noted then is the disk that it has now."""
    store, state = tmp_path / "disk/kvbm-h-0", tmp_path / "state"
    monkeypatch.setattr(mounts, "mount_point", lambda _: tmp_path / "disk")
    note_mount(store, state)
    monkeypatch.setattr(mounts, "mount_point", lambda _: Path("/"))
    assert missing_mount(store, state) is not None
    store.mkdir(parents=True)
    assert missing_mount(store, state) is None
    note_mount(store, state)
    store.rmdir()
    assert missing_mount(store, state) is None
    assert list((state / "mounts").iterdir()) == []


def test_a_disk_that_is_mounted_elsewhere_is_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that was on the root, and is on a disk of its own now, has a new disk."""
    store = tmp_path / "disk/kvbm-h-0"
    monkeypatch.setattr(mounts, "mount_point", lambda _: tmp_path)
    note_mount(store, tmp_path / "state")
    monkeypatch.setattr(mounts, "mount_point", lambda _: tmp_path / "disk")
    assert missing_mount(store, tmp_path / "state") is None


def test_what_cannot_be_noted_or_read_is_no_sign(tmp_path: Path) -> None:
    store = tmp_path / "disk/kvbm-h-0"
    (tmp_path / "file").write_text("not a directory")
    for state in (None, tmp_path / "file", tmp_path / "nowhere"):
        note_mount(store, state)
        assert missing_mount(store, state) is None
