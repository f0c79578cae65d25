"""Secrets in files: written for one reader, read again when they change, named but not printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvbm_common.access.secret_files import (
    SECRET_BYTES_MAX,
    SecretFile,
    SecretUnreadable,
    write_secret,
)


def test_only_the_owner_reads_what_is_written(tmp_path: Path) -> None:
    """File and directory are closed, also where an open file stood before."""
    path = tmp_path / "new" / "secret"
    write_secret(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    assert not SecretFile(path, "V").is_private
    write_secret(path, "two")
    assert SecretFile(path, "V").is_private
    assert [one.name for one in path.parent.iterdir()] == ["secret"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to another user")
def test_an_owner_may_give_a_file_by_its_group(tmp_path: Path) -> None:
    """Goal: what a container was given by its group is private; a group of others is not."""
    path = tmp_path / "secret"
    write_secret(path, "one", mode=0o640)
    assert not SecretFile(path, "V").is_private
    os.chown(path, 10002, os.getegid())
    assert SecretFile(path, "V").is_private
    path.chmod(0o660)
    assert not SecretFile(path, "V").is_private
    path.chmod(0o640)
    os.chown(path, 10002, 10001)
    assert not SecretFile(path, "V").is_private


def test_a_change_is_seen_and_a_read_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The text without white space. 2. Unchanged, the file is not opened. 3. It is replaced."""
    path = tmp_path / "secret"
    write_secret(path, " one \n")
    file = SecretFile(path, "V")
    assert file.text() == "one"
    with monkeypatch.context() as closed:
        closed.setattr(Path, "open", None)
        assert file.text() == "one"
    write_secret(path, "two")
    assert file.text() == "two"


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"\xff\xfe", b"x" * (SECRET_BYTES_MAX + 1)],
    ids=["empty", "blank", "binary", "too long"],
)  # fmt: skip
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    """The error names variable and file."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(SecretUnreadable, match=f"THE_VARIABLE: {path}"):
        SecretFile(path, "THE_VARIABLE").text()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """As is a directory in its place; a repr has the path only."""
    file = SecretFile(tmp_path / "nothing", "V")
    with pytest.raises(SecretUnreadable, match="nothing: No such file"):
        file.text()
    with pytest.raises(SecretUnreadable):
        SecretFile(tmp_path, "V").text()
    assert repr(file) == f"SecretFile('{tmp_path}/nothing')"
