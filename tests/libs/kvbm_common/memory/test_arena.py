"""The arena: shared between processes, gone with its owner, never taken from a living one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from kvbm_common.memory import arena as arena_module
from kvbm_common.memory import huge_pages
from kvbm_common.memory.arena import Arena, ArenaNoSpace, ArenaUnavailable, remove_stale

SIZE = 8 << 20
LIMIT_S = 10.0

OWNER = """
import sys
from kvbm_common.memory.arena import Arena
arena = Arena.create(sys.argv[1], sys.argv[2], 1 << 20)
arena.array[:3] = (1, 2, 3)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    """An arena works on any file system; the tests leave nothing in /dev/shm."""
    return tmp_path


def start_owner(shm_dir: Path, name: str) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(shm_dir), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def test_both_sides_see_the_same_bytes(shm_dir: Path) -> None:
    with Arena.create(shm_dir, "kvbm-a", SIZE) as owner, Arena.attach(owner.path) as other:
        owner.view(4096, 4)[:] = b"kvbm"
        assert bytes(other.array[4096:4100]) == b"kvbm"
        other.array[SIZE - 1] = 9
        assert owner.view(SIZE - 1, 1)[0] == 9
        assert other.bytes == SIZE
        assert owner.array.ctypes.data == owner.address


def test_closing_unlinks_and_leaves_views_alive(shm_dir: Path) -> None:
    owner = Arena.create(shm_dir, "kvbm-a", SIZE)
    view, array = owner.view(0, 3), owner.array
    view[:] = b"abc"
    owner.close()
    owner.close()
    assert not owner.path.exists()
    assert bytes(view) == b"abc"
    assert array[0] == ord("a")


def test_an_attached_arena_does_not_unlink(shm_dir: Path) -> None:
    with Arena.create(shm_dir, "kvbm-a", SIZE) as owner:
        Arena.attach(owner.path).close()
        assert owner.path.exists()


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_populating_takes_the_memory_and_keeps_the_contents(
    shm_dir: Path, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old kernel is one that does not know the advice: an advice that no kernel knows."""
    if kernel == "old":
        monkeypatch.setattr(huge_pages, "MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(arena_module, "POPULATE_SLICE_BYTES", 1 << 20)
    with Arena.create(shm_dir, "kvbm-a", SIZE + 4096) as owner:
        done = owner.populate()
        owner.array[:] = 5
        done.result(LIMIT_S)
        assert bool(np.all(owner.array == 5))
        assert os.stat(owner.path).st_blocks * 512 >= SIZE


def test_closing_stops_populating(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "POPULATE_SLICE_BYTES", 4096)
    owner = Arena.create(shm_dir, "kvbm-a", SIZE)
    done = owner.populate()
    owner.close()
    assert done.done()


def test_an_arena_is_usable_where_no_thread_can_populate_it(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes `start` raises RuntimeError."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
    with Arena.create(shm_dir, "kvbm-a", SIZE) as owner:
        with pytest.raises(ArenaUnavailable, match="no thread"):
            owner.populate().result(LIMIT_S)
        owner.array[:] = 5
        assert bool(np.all(owner.array == 5))


def test_too_little_space_names_both_sizes(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * 4096))
    with pytest.raises(ArenaNoSpace, match=rf"{SIZE} bytes .* 409600 bytes free"):
        Arena.create(shm_dir, "kvbm-a", SIZE)
    assert not (shm_dir / "kvbm-a").exists()


def test_a_taken_name_and_a_missing_file_are_typed(shm_dir: Path) -> None:
    with (
        Arena.create(shm_dir, "kvbm-a", SIZE),
        pytest.raises(ArenaUnavailable, match="File exists"),
    ):
        Arena.create(shm_dir, "kvbm-a", SIZE)
    with pytest.raises(ArenaUnavailable, match="No such file"):
        Arena.attach(shm_dir / "kvbm-a")
    with pytest.raises(ArenaUnavailable, match="No such file"):
        Arena.create(shm_dir / "nowhere", "kvbm-a", SIZE)


def test_only_what_a_killed_owner_left_is_removed(shm_dir: Path) -> None:
    """1. Two owners, one foreign file. 2. Kill one owner. 3. Only its file goes."""
    living, killed = start_owner(shm_dir, "kvbm-living"), start_owner(shm_dir, "kvbm-killed")
    (shm_dir / "other-file").write_text("not ours")
    try:
        assert remove_stale(shm_dir, "kvbm-") == []
        with Arena.attach(shm_dir / "kvbm-killed") as attached:
            killed.kill()
            killed.communicate(timeout=LIMIT_S)

            assert remove_stale(shm_dir, "kvbm-") == [shm_dir / "kvbm-killed"]
            assert bytes(attached.array[:3]) == b"\x01\x02\x03"
        assert sorted(path.name for path in shm_dir.iterdir()) == ["kvbm-living", "other-file"]
    finally:
        living.kill()
        living.communicate(timeout=LIMIT_S)


def test_a_mapping_that_fails_leaves_no_file_open(shm_dir: Path) -> None:
    """Goal: a worker that tries again and again does not run out of descriptors."""
    with Arena.create(shm_dir, "arena", 4096) as arena:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                huge_pages, "_mapped", Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
            )
            with pytest.raises(ArenaUnavailable, match="cannot map"):
                Arena.attach(arena.path)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_maps_without_the_right_to_write(shm_dir: Path) -> None:
    """It sees what the owner writes, and its mapping may be taken in advance."""
    with (
        Arena.create(shm_dir, "arena", 2 * 4096) as arena,
        Arena.attach(arena.path, writable=False) as reader,
    ):
        reader.populate().result(5)
        arena.view(4096, 3)[:] = b"abc"
        assert bytes(reader.view(4096, 3)) == b"abc"
        assert reader.view(0, 1).readonly
