"""Directories of private stacks: what a killed process has left is removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kvbm_cli import private_directory
from kvbm_cli.private_directory import FRESH_S, LOCK, PrivateDirectory, sweep

MAKE = """
import os, signal
from kvbm_cli.private_directory import PrivateDirectory
directory = PrivateDirectory()
print(directory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of a test, beside temporary directories of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def left_by_a_killed_process(shm_dir: Path) -> tuple[Path, Path]:
    """Return the directory and the arena that a process has left; they are old enough."""
    killed = subprocess.run(
        [sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=30, check=False
    )
    path = Path(killed.stdout.strip())
    arena = shm_dir / f"kvbm-{path.name.removeprefix('kvbm-')}-0-7-arena"
    arena.write_bytes(b"x")
    (path / "disk" / "blocks").write_bytes(b"x" * 4096)
    age(path)
    return path, arena


def age(path: Path) -> None:
    status = (path / LOCK).stat()
    os.utime(path / LOCK, (status.st_atime, status.st_mtime - 2 * FRESH_S))


def test_what_a_killed_process_left_is_removed(shm_dir: Path) -> None:
    path, arena = left_by_a_killed_process(shm_dir)
    assert sweep(shm_dir) == [path]
    assert not path.exists()
    assert not arena.exists()


def test_what_a_process_holds_stays(shm_dir: Path) -> None:
    directory = PrivateDirectory()
    age(directory.path)
    arena = shm_dir / f"kvbm-{directory.host}-0-7-arena"
    arena.write_bytes(b"x")
    assert sweep(shm_dir) == []
    assert directory.path.is_dir()
    assert arena.exists()
    directory.remove()
    assert not directory.path.exists()


def test_a_fresh_one_of_another_user_or_without_a_lock_stays(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = left_by_a_killed_process(shm_dir)
    os.utime(path / LOCK)
    (path.parent / f"{private_directory.PREFIX}aa").mkdir()
    (path.parent / "kvbm-logs-aa").mkdir()
    assert sweep(shm_dir) == [], "it is fresh"
    age(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep(shm_dir) == [], "it is another user's"
    assert len(list(path.parent.iterdir())) == 3


def test_logs_that_are_kept_outlive_the_directory(shm_dir: Path) -> None:
    directory = PrivateDirectory()
    (directory.path / "logs" / "index.log").write_text("why")
    kept = directory.keep_logs()
    directory.remove()
    assert (kept / "index.log").read_text() == "why"
    assert list(kept.parent.iterdir()) == [kept]
