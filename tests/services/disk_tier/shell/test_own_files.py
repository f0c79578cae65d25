"""A store's directory and files, where another user got to the path first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvbm_disk_tier.shell.own_files import (
    lock_directory,
    open_own,
    open_own_directory,
    read_own,
)
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreBusy, StoreError, StoreOptions

FOREIGN = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def store_in(directory: Path) -> Store:
    return Store(StoreOptions(directory=directory, capacity_bytes=1 << 20, direct=False))


def test_directory_is_made_private(tmp_path: Path) -> None:
    os.close(open_own_directory(tmp_path / "a" / "store"))
    assert (tmp_path / "a" / "store").stat().st_mode & 0o777 == 0o700


@needs_root
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Somebody has made it in a directory to which all write, and may fill it as they like."""
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    os.chown(store, FOREIGN, FOREIGN)
    with pytest.raises(StoreError, match=f"is of user {FOREIGN}"):
        store_in(store).acquire()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_directory_to_which_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(mode)
    with pytest.raises(StoreError, match=f"has mode {mode:o}.*chmod go-w"):
        store_in(store).acquire()
    store.chmod(0o755)
    found = store_in(store)
    found.acquire()
    found.close()


def test_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A store would be made in a directory of someone else's choice."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be used"):
        store_in(tmp_path / "store").acquire()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["slots", "journal", "spare", "header.new"])
def test_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    """What it points to stays as it is; a new store is refused, or does without the spare."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    (directory / name).symlink_to(victim)
    store = store_in(directory)
    try:
        if name in ("slots", "header.new"):
            with pytest.raises((StoreError, OSError)):
                store.create(4096)
        else:  # Removed with what was there.
            store.create(4096)
    finally:
        store.close()
    assert victim.read_bytes() == b"precious"


def test_link_is_neither_read_nor_opened(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        read_own(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "link", os.O_RDWR | os.O_CREAT)


def test_directory_itself_is_locked(tmp_path: Path) -> None:
    """A file of the lock could be removed, and made again beside the one that is held."""
    first = store_in(tmp_path / "store")
    first.acquire()
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    with pytest.raises(StoreBusy):
        store_in(tmp_path / "store").acquire()
    first.close()
    second = store_in(tmp_path / "store")
    second.acquire()
    second.close()


def test_lock_of_an_earlier_release_is_respected(tmp_path: Path) -> None:
    """It is a file; its release may run until its successor has the place."""
    (tmp_path / "lock").touch()
    tmp_path.chmod(0o700)
    held = lock_directory(tmp_path)
    assert len(held) == 2
    os.close(held[0])
    with pytest.raises(BlockingIOError):
        lock_directory(tmp_path)
    os.close(held[1])
