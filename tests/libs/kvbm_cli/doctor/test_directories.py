"""What the doctor says of directories, beside what a disk tier does with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_cli.doctor.directories import place_of, refused_for
from kvbm_disk_tier.shell.own_files import open_own_directory


def opens(path: Path) -> bool:
    """Whether the tier opens it."""
    try:
        open_own_directory(path)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("made", "word"), [(0o700, ""), (0o755, ""), (0o770, "mode is 770"), (0o757, "mode is 757")]
)
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, made: int, word: str) -> None:
    path = tmp_path / "disk"
    path.mkdir()
    path.chmod(made)
    said = refused_for(path)
    assert word in said
    assert (said == "") == opens(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    link = tmp_path / "disk"
    link.symlink_to("there")
    assert "link" in refused_for(link)
    assert not opens(link)


def test_what_is_missing_is_made_in_the_nearest_place(tmp_path: Path) -> None:
    """Also below a directory that all may write."""
    tmp_path.chmod(0o1777)
    path = tmp_path / "new" / "disk"
    assert place_of(path) == tmp_path
    assert opens(path)
    assert place_of(path) == path
