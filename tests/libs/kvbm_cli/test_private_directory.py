"""Directories of private stacks: what a killed process has left is removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kvbm_cli.private_directory import FRESH_S, UNNAMED, PrivateDirectory, sweep

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
    """Return the directory and the arena that a process has left, just now."""
    killed = subprocess.run(
        [sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=30, check=False
    )
    path = Path(killed.stdout.strip())
    arena = shm_dir / f"kvbm-{path.name.removeprefix('kvbm-')}-0-7-arena"
    arena.write_bytes(b"x")
    (path / "disk" / "blocks").write_bytes(b"x" * 4096)
    return path, arena


def test_what_a_killed_process_left_is_removed(shm_dir: Path) -> None:
    path, arena = left_by_a_killed_process(shm_dir)
    assert sweep(shm_dir) == [path]
    assert not path.exists()
    assert not arena.exists()


def test_what_a_process_holds_stays(shm_dir: Path) -> None:
    directory = PrivateDirectory()
    arena = shm_dir / f"kvbm-{directory.host}-0-7-arena"
    arena.write_bytes(b"x")
    assert sweep(shm_dir) == []
    assert directory.path.is_dir()
    assert arena.exists()
    directory.remove()
    assert not directory.path.exists()


def test_one_of_another_user_and_kept_logs_stay(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = left_by_a_killed_process(shm_dir)
    (path.parent / "kvbm-logs-aa").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep(shm_dir) == []
    assert len(list(path.parent.iterdir())) == 2


def test_one_that_is_being_made_stays_until_it_is_old(shm_dir: Path) -> None:
    """It has no lock for a moment: a process may be between the two calls."""
    unnamed = shm_dir.parent / "tmp" / f"{UNNAMED}aa"
    unnamed.mkdir()
    assert sweep(shm_dir) == []
    status = unnamed.stat()
    os.utime(unnamed, (status.st_atime, status.st_mtime - 2 * FRESH_S))
    assert sweep(shm_dir) == [unnamed]
    assert not unnamed.exists()


def test_logs_that_are_kept_outlive_the_directory(shm_dir: Path) -> None:
    directory = PrivateDirectory()
    (directory.path / "logs" / "index.log").write_text("why")
    kept = directory.keep_logs()
    directory.remove()
    assert (kept / "index.log").read_text() == "why"
    assert list(kept.parent.iterdir()) == [kept]
