"""What the doctor says of several directories: those of one disk, and one by two paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from kvbm_cli.doctor.checks import examine
from kvbm_cli.doctor.facts import DiskFacts

from tests.libs.kvbm_cli.doctor.test_checks import DISK, GB, HEALTHY, judged, settings, store_in
from tests.libs.kvbm_cli.doctor.test_directories import gathered

SECOND = dataclasses.replace(DISK, path=Path("/second"))


def on(disk: DiskFacts, device: int, number: int, own_bytes: int = 0) -> DiskFacts:
    """Put a directory on a device; 3 GB are free there."""
    return dataclasses.replace(disk, place=(device, number), free_bytes=3 * GB, own_bytes=own_bytes)


@pytest.mark.parametrize(
    ("first", "second", "has_room"),
    [
        (on(DISK, 5, 1), on(SECOND, 6, 1), True),
        (on(DISK, 5, 1), on(SECOND, 5, 2), False),
        (on(DISK, 5, 0), on(SECOND, 5, 0), False),
        (on(DISK, 5, 1, GB), on(SECOND, 5, 2), True),
        (on(DISK, 5, 1), on(SECOND, 5, 2, GB), True),
        (on(DISK, 5, 1, GB // 2), on(SECOND, 5, 1, GB // 2), False),
    ],
    ids=["two disks", "one disk", "both missing", "own", "own of the other", "one directory"],
)
def test_directories_of_one_disk_share_its_room(
    first: DiskFacts, second: DiskFacts, *, has_room: bool
) -> None:
    """Two stores of 2 GB each need 4 GB on one disk."""
    facts = dataclasses.replace(HEALTHY, disks=(first, second))
    found = [one for one in judged(facts, settings(disk_cache_gb=4)) if one.level == "wrong"]
    assert [one.check for one in found] == ([] if has_room else ["disk /nvme", "disk /second"])
    assert all("for 2.0 GB in each of 2 directories" in one.found for one in found)


def test_a_store_that_is_used_by_another_path_is_not_called_left(tmp_path: Path) -> None:
    """Goal: the doctor never calls a store left that a disk tier will open. It says which paths
    are one directory."""
    directory, link = tmp_path / "disk", tmp_path / "link"
    for name in ("kvbm-h-0", "kvbm-h-0-1", "kvbm-h-0-2"):
        store_in(directory, name)
    link.symlink_to(directory)
    facts, chosen = gathered(tmp_path, directory, link)
    lines = [one for one in examine(facts, chosen) if str(tmp_path) in one.check]
    disks = [one for one in lines if one.check.startswith("disk ")]
    assert [(one.check, one.level) for one in disks] == [
        (f"disk {directory}", "ok"),
        (f"disk {link}", "ok"),
        (f"disk {link}", "better"),
    ]
    assert disks[2].found == f"it is the same directory as {directory}"
    left = [one.check for one in lines if one.check.startswith("store ")]
    assert left == [f"store {directory}/kvbm-h-0-2", f"store {link}/kvbm-h-0-2"]
