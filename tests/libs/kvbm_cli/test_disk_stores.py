"""A directory keeps the disk tier whose store it holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from kvbm_cli import disk_stores
from kvbm_cli.disk_stores import directories_by_number, numbers_of
from kvbm_cli.stack_processes import instances_of, processes_of
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.mounts import note_mount

from tests.small_tmpfs import small_tmpfs


def stored(directory: Path, *names: str) -> Path:
    """Make a directory with these stores."""
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "journal").write_bytes(b"1")
    return directory


def settings(*directories: Path, **more: object) -> Settings:
    texts = {"host": "h", "disk_cache_gb": 1, "disk_cache_dirs": ",".join(map(str, directories))}
    return Settings.load({}, texts | more)


def test_directories_in_another_order_keep_their_disk_tiers(tmp_path: Path) -> None:
    first = stored(tmp_path / "a", "kvbm-h-0", "kvbm-h-2-1", "kvbm-other-0-1")
    second = stored(tmp_path / "b", "kvbm-h-0-1")
    for chosen in (settings(first, second), settings(second, first)):
        own = processes_of("disk-tier", chosen)
        assert {name: one["DYN_KVBM_DISK_CACHE_DIR"] for name, one in own.items()} == {
            "disk-tier": str(first),
            "disk-tier-1": str(second),
        }
        assert instances_of("disk-tier", chosen) == ["0", "0-1"]


def test_a_directory_that_is_left_alone_keeps_its_disk_tier(tmp_path: Path) -> None:
    """The first disk has failed, and is taken out of the list."""
    second = stored(tmp_path / "b", "kvbm-h-0-1")
    own = processes_of("disk-tier", settings(second))["disk-tier"]
    assert own["KVBM_INSTANCE"] == "0-1"
    first = stored(tmp_path / "a", "kvbm-h-0")
    assert processes_of("disk-tier", settings(first)) == {"disk-tier": {}}


def test_a_new_directory_gets_a_number_that_is_free(tmp_path: Path) -> None:
    new, first, third = tmp_path / "n", stored(tmp_path / "a", "kvbm-h-0"), tmp_path / "c"
    stored(third, "kvbm-h-0-2")
    assert directories_by_number(settings(new, first, third)) == {0: first, 1: new, 2: third}


def test_directories_whose_disks_are_not_mounted_keep_their_disk_tiers(tmp_path: Path) -> None:
    """1. Two disks have a store each; one had another number before. 2. Neither is mounted at the
    next start, which has another order, or one directory less, or one more."""
    first, second, state = tmp_path / "a", tmp_path / "b", tmp_path / "state"
    with small_tmpfs(first, 1 << 20), small_tmpfs(second, 1 << 20):
        note_mount(second / "kvbm-h-0", state)
        for record in (state / "mounts").iterdir():
            os.utime(record, (1, 1))
        for directory, name in ((first, "kvbm-h-0"), (second, "kvbm-h-0-1")):
            note_mount(stored(directory, name) / name, state)
    second.rmdir()
    for directories, numbers in (
        ([second, first], {0: first, 1: second}),
        ([second], {1: second}),
        ([tmp_path / "new", first, second], {0: first, 1: second, 2: tmp_path / "new"}),
    ):
        assert directories_by_number(settings(*directories, state_dir=state)) == numbers


@pytest.mark.parametrize(
    ("held", "numbers"),
    [
        ([set(), set()], [0, 1]),
        ([{0, 1}, {0, 1}], [0, 1]),
        ([{1}, {1}], [0, 1]),
        ([{5}, set(), {0}], [5, 1, 0]),
        ([{1, 2}, set(), {1}], [2, 0, 1]),
        ([{0, 2}, {0}, {1}], [2, 0, 1]),
        ([{1}, {1, 2}, {2, 0}], [1, 2, 0]),
        ([{3}, {3}, {3, 4}], [3, 0, 4]),
    ],
)
def test_no_two_directories_have_one_number(held: list[set[int]], numbers: list[int]) -> None:
    assert numbers_of(held) == numbers


@pytest.mark.slow
def test_a_directory_that_hangs_neither_delays_nor_moves_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stores after it keep their tiers, and it is asked once."""
    first, second = stored(tmp_path / "a", "kvbm-h-0"), stored(tmp_path / "b", "kvbm-h-0-1")
    third = stored(tmp_path / "c", "kvbm-h-0-2")
    asked = hang_at(first, monkeypatch)
    for _ in range(3):
        found = directories_by_number(settings(first, third, second))
        assert found == {0: first, 1: second, 2: third}
    assert asked == [first]


@pytest.mark.slow
def test_a_directory_that_hangs_keeps_the_number_that_was_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, hung, state = tmp_path / "n", tmp_path / "a", tmp_path / "state"
    with small_tmpfs(hung, 1 << 20):
        note_mount(hung / "kvbm-h-0-1", state)
        hang_at(hung, monkeypatch)
        assert directories_by_number(settings(hung, new, state_dir=state)) == {0: new, 1: hung}


def hang_at(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let a look at a directory never end; returns the list of such looks."""
    asked: list[Path] = []
    listed = os.listdir

    def listdir(path: Path) -> list[str]:
        if path == directory:
            asked.append(path)
            threading.Event().wait()
        return listed(path)

    monkeypatch.setattr(disk_stores, "LOOK_S", 1.0)
    monkeypatch.setattr("os.listdir", listdir)
    return asked
