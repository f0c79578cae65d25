"""Space that is taken beforehand, on file systems that can preallocate, and on ext2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvbm_disk_tier.shell import allocation
from kvbm_disk_tier.shell.allocation import fallocate, fill, preallocate
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreError, StoreOptions

from tests.services.disk_tier.core.test_journal import committed, slots
from tests.small_tmpfs import small_tmpfs

MIB = 1 << 20
SLOTS = 64
SLOT_BYTES = 128 * 1024


@contextmanager
def ext2(directory: Path, size: int) -> Iterator[Path]:
    """An ext2 file system on a file: it has no extents, and cannot preallocate."""
    image, mounted = directory / "image", directory / "ext2"
    with image.open("wb") as file:
        file.truncate(size)
    mounted.mkdir()
    for command in (
        ["mke2fs", "-q", "-t", "ext2", "-m", "0", str(image)],
        ["mount", "-o", "loop", str(image), str(mounted)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"needs {command[0]}")
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def taken(path: Path) -> int:
    """Return the bytes that a file has on its disk."""
    return path.stat().st_blocks * 512


def prepared(directory: Path, *, zerofill_fallback: bool) -> Store:
    """A store of 8 MiB, to be created."""
    return Store(StoreOptions(
        directory=directory / "store", capacity_bytes=0, slot_count=SLOTS, direct=False,
        zerofill_fallback=zerofill_fallback,
    ))  # fmt: skip


def made(directory: Path, *, zerofill_fallback: bool) -> Store:
    """A store that has been created."""
    store = prepared(directory, zerofill_fallback=zerofill_fallback)
    store.create(SLOT_BYTES)
    return store


def test_a_file_system_that_can_preallocate_does(tmp_path: Path) -> None:
    """tmpfs: at once, without the fallback, and a file that keeps its size has the space, too."""
    with small_tmpfs(tmp_path / "tmpfs", 32 * MIB) as directory:
        store = made(directory, zerofill_fallback=False)
        assert taken(directory / "store/slots") >= SLOTS * SLOT_BYTES
        assert (directory / "store/journal").stat().st_size == 0
        assert taken(directory / "store/journal") == taken(directory / "store/spare") > 0
        store.close()


def test_ext2_says_that_it_cannot_preallocate_and_the_file_is_sparse(tmp_path: Path) -> None:
    """Without the fallback nothing is written: glibc's emulation would touch each block."""
    with ext2(tmp_path, 64 * MIB) as directory:
        with (directory / "probe").open("wb") as file:
            assert not fallocate(file.fileno(), MIB)
        store = made(directory, zerofill_fallback=False)
        assert (directory / "store/slots").stat().st_size == SLOTS * SLOT_BYTES
        assert taken(directory / "store/slots") < MIB
        store.close()


@pytest.mark.slow
def test_ext2_is_filled_with_zeros_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large writes; the journal's space as well, and its zeros are no records."""
    sizes: list[int] = []
    pwrite = os.pwrite

    def counted(fd: int, data: bytes, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data, offset)

    with ext2(tmp_path, 64 * MIB) as directory:
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", counted)
            store = made(directory, zerofill_fallback=True)
        assert len(sizes) == 3, "the slots, the journal, and the next one"
        assert taken(directory / "store/slots") >= SLOTS * SLOT_BYTES
        assert min(taken(directory / "store" / name) for name in ("journal", "spare")) > 0
        store.append((committed(1, 0, 1), committed(2, 1, 2)), commit=True)
        store.rewrite((committed(3, 0, 1), committed(4, 1, 2)))
        store.append((committed(5, 2, 3),), commit=True)
        store.close()
        again = Store(store.options)
        found = again.recover()
        assert found is not None
        assert (slots(found), found.records, found.damaged) == ({0: 1, 1: 2, 2: 3}, 3, 0)
        again.close()


def test_an_ext2_that_is_too_small_shows_it_at_the_start(tmp_path: Path) -> None:
    with ext2(tmp_path, 4 * MIB) as directory:
        store = prepared(directory, zerofill_fallback=True)
        with pytest.raises(StoreError, match="no room for"):
            store.create(SLOT_BYTES)
        store.close()


def test_zeros_are_written_from_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "ZEROS", bytes(1000))
    monkeypatch.setattr(allocation, "FLUSH_BYTES", 1500)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    with path.open("r+b") as file:
        fill(file.fileno(), 4_321, start=10)
    assert path.read_bytes() == b"x" * 10 + bytes(4_311)


@pytest.mark.parametrize("room", [0, MIB - 1])
def test_a_file_without_room_keeps_its_first_bytes(tmp_path: Path, room: int) -> None:
    """It is asked first: nothing is taken from a disk that is too small."""
    path = tmp_path / "slots"
    path.write_bytes(b"kept, and the rest")
    with path.open("r+b") as file, pytest.raises(OSError, match="No space"):
        preallocate(file.fileno(), MIB, kept=4, room=room, zerofill=False)
    assert path.read_bytes() == b"kept"


@pytest.mark.parametrize("zerofill", [False, True])
def test_a_file_has_its_space_after_what_it_keeps(tmp_path: Path, *, zerofill: bool) -> None:
    path = tmp_path / "slots"
    path.write_bytes(b"kept")
    with path.open("r+b") as file:
        preallocate(file.fileno(), MIB, kept=4, room=MIB, zerofill=zerofill)
    assert path.read_bytes() == b"kept" + bytes(MIB - 4)
