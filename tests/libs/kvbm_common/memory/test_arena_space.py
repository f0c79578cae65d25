"""The arena's space: all of it is taken before the arena is there, or nothing is left of it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.memory import arena as arena_module
from kvbm_common.memory.arena import Arena, ArenaNoSpace, ArenaStopped, ArenaUnavailable
from kvbm_common.memory.committed_table import SUFFIX, CommittedTable

from tests.small_tmpfs import fill, free_bytes, small_tmpfs

MB = 1 << 20
ROOM = 8 * MB
LIMIT_S = 20.0

OWNER = """
import sys
import numpy as np
from kvbm_common.memory.arena import Arena
arena = Arena.create(sys.argv[1], "arena", 6 << 20)
print("ready", flush=True)
sys.stdin.readline()
arena.array[:] = 7
print(int(arena.array.sum()), flush=True)
"""
READER = """
import sys
from kvbm_common.memory.arena import Arena
arena = Arena.attach(sys.argv[1], writable=False)
print(int(arena.array.sum()), flush=True)
"""


@pytest.fixture
def shm_dir(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "shm", ROOM) as shm_dir:
        yield shm_dir


def python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that a SIGBUS may end without ending this one."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_file_system_that_fills_later_ends_neither_owner_nor_reader(shm_dir: Path) -> None:
    """1. An arena is made. 2. The rest is filled. 3. Both sides can touch every byte of it."""
    owner = python(OWNER, shm_dir)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    fill(shm_dir)
    reader = python(READER, shm_dir / "arena")
    read, _ = reader.communicate(timeout=LIMIT_S)
    assert (read, reader.returncode) == ("0\n", 0)
    written, _ = owner.communicate("write\n", timeout=LIMIT_S)
    assert (written, owner.returncode) == (f"{7 * 6 * MB}\n", 0)


@pytest.mark.parametrize("huge", [True, False])
def test_every_byte_is_taken_before_the_arena_is_there(shm_dir: Path, huge: bool) -> None:
    """Also where the last slice and the last huge page are not whole ones."""
    size = 5 * MB + 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "ALLOCATE_SLICE_BYTES", 3 * MB)
        with Arena.create(shm_dir, "arena", size, huge=huge) as arena:
            status = arena.path.stat()
            assert (status.st_size, status.st_blocks * 512) == (size, size)
            assert free_bytes(shm_dir) == ROOM - size
    assert free_bytes(shm_dir) == ROOM


def test_a_committed_table_is_taken_whole(shm_dir: Path) -> None:
    """Goal: a full file system ends no engine that looks a block up."""
    table = CommittedTable.create(str(shm_dir / "a"), slot_count=10_000, epoch=1)
    status = (shm_dir / f"a{SUFFIX}").stat()
    assert status.st_blocks * 512 >= status.st_size > 0
    table.close()


@pytest.mark.parametrize("huge", [True, False])
def test_space_that_runs_out_is_an_error_and_is_given_back(
    shm_dir: Path, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the beginning is passed: another takes the space while this one allocates."""
    monkeypatch.setattr(arena_module, "_check_space", lambda *_: None)
    monkeypatch.setattr(arena_module, "ALLOCATE_SLICE_BYTES", 3 * MB)
    with pytest.raises(ArenaNoSpace) as caught:
        Arena.create(shm_dir, "arena", 2 * ROOM, setting="KVBM_STAGING_GB", huge=huge)
    for part in (f"{2 * ROOM} bytes", str(shm_dir), f"{ROOM} bytes free", "KVBM_STAGING_GB",
                 "--shm-size"):  # fmt: skip
        assert part in str(caught.value)
    assert list(shm_dir.iterdir()) == []
    assert free_bytes(shm_dir) == ROOM


def test_an_allocation_that_fails_otherwise_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves neither file nor descriptor."""

    def fail(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ArenaUnavailable, match="File too large"):
        Arena.create(tmp_path, "arena", MB)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


class AfterThreeSlices(threading.Event):
    """Set when it has been asked three times."""

    asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > 3


def test_a_stop_ends_an_allocation_between_two_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three slices of ten are taken, with a line of progress each; then nothing is left."""
    monkeypatch.setattr(arena_module, "ALLOCATE_SLICE_BYTES", MB)
    monkeypatch.setattr(arena_module, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO), pytest.raises(ArenaStopped):
        Arena.create(tmp_path, "arena", 10 * MB, stop=AfterThreeSlices())
    assert [record.getMessage().split(" after")[0] for record in caplog.records] == [
        f"allocating {tmp_path}/arena: {done} of 10 MB" for done in (1, 2, 3)
    ]
    assert list(tmp_path.iterdir()) == []
