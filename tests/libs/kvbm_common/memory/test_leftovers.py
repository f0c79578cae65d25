"""What killed processes leave in shared memory is found and removed, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.memory import leftovers
from kvbm_common.memory.arena import Arena
from kvbm_common.memory.leftovers import file_system_of, left_memory, remove_left

BYTES = 1 << 20
LEAVE = """
import os, signal, sys
from kvbm_common.memory.arena import Arena
arenas = [Arena.create(sys.argv[1], name, 1 << 20) for name in sys.argv[2:]]
os.kill(os.getpid(), signal.SIGKILL)
"""
LEFT = (
    "kvbm-h-2-1-0-1795955356638930-arena",
    "kvbm-h-2-1-0-1795955356638930-arena-names-1",
    "kvbm-h-2-1-0-1795955356638930-arena-roster",
    "kvbm-promises-0f3e",
)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory of shared memory: only there a lock proves that its owner is gone."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="leftovers-"))
    yield directory
    shutil.rmtree(directory)


def leave(shm_dir: Path, *names: str) -> None:
    """Have a process make arenas, and kill it."""
    killed = subprocess.run(
        [sys.executable, "-c", LEAVE, str(shm_dir), *names], timeout=30, check=False
    )
    assert killed.returncode == -signal.SIGKILL


def names_in(shm_dir: Path) -> list[str]:
    return sorted(path.name for path in shm_dir.iterdir())


def test_files_of_killed_owners_are_removed_and_those_of_living_ones_stay(shm_dir: Path) -> None:
    """1. Two owners, one of them is killed. 2. What it left is named. 3. It goes, and no other
    file; a process that has it mapped reads on."""
    leave(shm_dir, *LEFT)
    (shm_dir / "kvbm-notes").write_text("not an arena")
    (shm_dir / "kvbm-h-0-7-arena-link").symlink_to(shm_dir / LEFT[0])
    with Arena.create(shm_dir, "kvbm-other-0-7-arena", BYTES), Arena.attach(shm_dir / LEFT[0]) as a:
        stays = sorted({*names_in(shm_dir)} - {*LEFT})
        assert [one.path.name for one in left_memory(shm_dir)] == list(LEFT)
        assert all(one.bytes == BYTES for one in left_memory(shm_dir))
        assert [one.path.name for one in remove_left(shm_dir)] == list(LEFT)
        assert names_in(shm_dir) == stays
        assert a.array[0] == 0
    assert remove_left(shm_dir) == []


def test_what_another_user_has_left_stays(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(shm_dir, LEFT[0])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_left(shm_dir) == []
    assert names_in(shm_dir) == [LEFT[0]]


def test_on_a_file_system_that_machines_may_share_nothing_is_removed(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the lock of another machine need not be seen here."""
    leave(shm_dir, LEFT[0])
    monkeypatch.setattr(leftovers, "file_system_of", lambda _: "lustre")
    assert left_memory(shm_dir) == ()
    assert remove_left(shm_dir) == []
    assert names_in(shm_dir) == [LEFT[0]]


def test_the_file_system_of_a_directory_is_known(shm_dir: Path) -> None:
    assert file_system_of(shm_dir) == "tmpfs"
    assert file_system_of(shm_dir / "nowhere") == "missing"
    assert left_memory(shm_dir / "nowhere") == ()
