"""The users of the NATS of `kvbm up`: which files are taken, and which are made again."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_cli.creds.embedded import authorization_of
from kvbm_common.access.http_access import ADMIN_TOKEN, api_access
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError


def texts_of(directory: Path) -> dict[str, str]:
    """Make the files of a directory; return what is in each."""
    authorization_of(directory, host="a", instances=["0"])
    api_access(Settings.load({}, {"creds_dir": directory}))
    files = list(directory.iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    return {path.name: path.read_text() for path in files}


def test_files_stay_from_start_to_start(tmp_path: Path) -> None:
    """A consumer that was given one keeps its access."""
    before = texts_of(tmp_path / "creds")
    assert ADMIN_TOKEN in before
    assert texts_of(tmp_path / "creds") == before


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o620])
@pytest.mark.parametrize(
    ("name", "weak"), [("admin.creds", "admin:abc"), (ADMIN_TOKEN, "abcdefgh")]
)
def test_a_secret_that_was_open_is_made_again(
    tmp_path: Path, mode: int, name: str, weak: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a password that another user has put there, or has read, is good for nothing."""
    before = texts_of(tmp_path)
    (tmp_path / name).write_text(weak)
    (tmp_path / name).chmod(mode)
    after = texts_of(tmp_path)
    assert weak not in after[name]
    assert len(after[name]) > 30
    assert {one for one in after if after[one] != before[one]} == {name}
    assert f"{name} was open to other users" in caplog.text


def test_a_link_is_no_secret(tmp_path: Path) -> None:
    """Goal: what it points to belongs to others."""
    target = tmp_path / "target"
    target.write_text("admin:abc")
    target.chmod(0o600)
    (tmp_path / "creds").mkdir(mode=0o700)
    (tmp_path / "creds" / "admin.creds").symlink_to(target)
    assert "abc" not in texts_of(tmp_path / "creds")["admin.creds"].split(":")[1]
    assert target.read_text() == "admin:abc"


def test_a_directory_to_which_others_may_write_is_refused(tmp_path: Path) -> None:
    """Goal: they could put another file in the place of a good one."""
    directory = tmp_path / "creds"
    texts_of(directory)
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="KVBM_CREDS_DIR"):
        authorization_of(directory, host="a", instances=["0"])
