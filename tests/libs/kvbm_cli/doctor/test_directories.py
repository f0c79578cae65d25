"""What the doctor says of directories, beside what a disk tier does with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_cli.doctor.checks import examine
from kvbm_cli.doctor.directories import disk_facts, silent_directories
from kvbm_cli.doctor.facts import DiskFacts, Facts
from kvbm_cli.doctor.gather import gather
from kvbm_common.config.settings import Settings
from kvbm_disk_tier.shell.own_files import open_own_directory

from tests.hung_mount import hung_mount

ANSWER_S = 5.0
"""How long a directory that does not hang may take on a busy machine."""


def opens(path: Path) -> bool:
    """Whether the tier opens it."""
    try:
        open_own_directory(path)
    except OSError:
        return False
    return True


def gathered(tmp_path: Path, *directories: Path) -> tuple[Facts, Settings]:
    """Look at this host, with these directories for disk tiers of the host `h`."""
    texts = {
        "disk_cache_dirs": ",".join(map(str, directories)), "disk_cache_gb": 0.001, "host": "h",
        "runtime_dir": tmp_path / "run", "state_dir": tmp_path / "state",
    }  # fmt: skip
    settings = Settings.load({}, texts)
    return gather(settings), settings


def looked_at(directory: Path) -> DiskFacts:
    """Return what the doctor finds of a directory for the only disk tier of the host `h`."""
    settings = Settings.load({}, {"disk_cache_dirs": str(directory), "host": "h"})
    return disk_facts(directory, directory / "kvbm-h-0", settings)


def store_in(directory: Path, mode: int = 0o700) -> Path:
    """Make the directory that a tier has below its own."""
    store = directory / "kvbm-h-0"
    store.mkdir(parents=True)
    store.chmod(mode)
    return store


@pytest.mark.parametrize(
    ("made", "word"), [(0o700, ""), (0o755, ""), (0o770, "mode is 770"), (0o757, "mode is 757")]
)
def test_a_store_that_others_may_write_is_refused(tmp_path: Path, made: int, word: str) -> None:
    store = store_in(tmp_path / "disk", made)
    said = looked_at(tmp_path / "disk").error
    assert word in said
    assert (said == "") == opens(store)


def test_a_store_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "disk").mkdir()
    store = tmp_path / "disk" / "kvbm-h-0"
    store.symlink_to(tmp_path / "there")
    said = looked_at(tmp_path / "disk").error
    assert said.startswith(f"{store}: it is a link")
    assert not opens(store)


def test_a_store_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could write there, so only its owner says that the tier will not."""
    store = store_in(tmp_path / "disk")
    owner = store.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    assert f"it is of user {owner}" in looked_at(tmp_path / "disk").error
    assert not opens(store)


@pytest.mark.parametrize("mode", [0o700, 0o775, 0o1777])
@pytest.mark.parametrize("is_link", [False, True])
def test_the_directory_above_a_store_may_be_shared_and_a_link(
    tmp_path: Path, mode: int, is_link: bool
) -> None:
    """Goal: no disk directory that works is called wrong, before the first start or after it."""
    directory = there = tmp_path / "there"
    there.mkdir()
    there.chmod(mode)
    if is_link:
        directory = tmp_path / "disk"
        directory.symlink_to(there)
    before = looked_at(directory)
    assert opens(directory / "kvbm-h-0")
    after = looked_at(directory)
    assert (before.error, after.error) == ("", "")
    assert not before.will_be_made
    assert before.allocates


def test_what_is_missing_is_made_in_the_nearest_place(tmp_path: Path) -> None:
    """Also below a directory that all may write; the line of the doctor says so."""
    tmp_path.chmod(0o1777)
    directory = tmp_path / "new" / "disk"
    facts, settings = gathered(tmp_path, directory)
    (line,) = (one for one in examine(facts, settings) if one.check == f"disk {directory}")
    assert (line.level, line.found.endswith("; the directory will be made")) == ("ok", True)
    assert opens(directory / "kvbm-h-0")
    facts, settings = gathered(tmp_path, directory)
    (line,) = (one for one in examine(facts, settings) if one.check == f"disk {directory}")
    assert (line.level, "will be made" in line.found) == ("ok", False)


def test_a_store_is_tried_where_nothing_may_be_written_beside_it(tmp_path: Path) -> None:
    """Goal: an operator makes the store for the tier, and gives it no right above."""
    in_proc = looked_at(Path("/proc"))
    assert in_proc.error
    assert looked_at(Path("/proc/nowhere")).error.startswith("/proc: ")
    directory = tmp_path / "disk"
    directory.mkdir()
    (directory / "kvbm-h-0").write_text("a file")
    assert looked_at(directory).error.startswith(f"{directory}/kvbm-h-0: ")


def test_each_of_several_directories_has_the_store_of_its_own_tier(tmp_path: Path) -> None:
    """Goal: only what the second tier will open is looked at in the second directory."""
    first, second = tmp_path / "first", tmp_path / "second"
    store_in(first)
    store_in(second, 0o777)  # As a stack with this directory alone has left it.
    facts, _ = gathered(tmp_path, first, second)
    assert [one.error for one in facts.disks] == ["", ""]
    (second / "kvbm-h-0-1").mkdir()
    (second / "kvbm-h-0-1").chmod(0o777)
    good, bad = gathered(tmp_path, first, second)[0].disks
    assert not good.error
    assert bad.error.startswith(f"{second}/kvbm-h-0-1: others may write to it")


def test_room_of_a_host_does_not_include_stores_of_a_host_with_a_longer_name(
    tmp_path: Path,
) -> None:
    """Goal: `h` gets back what its own stores take, and nothing of the host `h-1`."""
    for name in ("kvbm-h-0", "kvbm-h-1-0"):
        store = tmp_path / name
        store.mkdir()
        (store / "journal").write_bytes(b"1")
        (store / "slots").write_bytes(b"1" * 100_000)
    own = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kvbm-h-0").iterdir())
    assert own > 100_000
    assert looked_at(tmp_path).own_bytes == own


@pytest.mark.slow
def test_a_directory_that_hangs_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the doctor ends, and says of two directories which one does not answer."""
    good = tmp_path / "good"
    monkeypatch.setattr("kvbm_cli.disk_stores.LOOK_S", 0.2)
    monkeypatch.setattr("kvbm_cli.doctor.gather.LOOK_S", ANSWER_S)
    with hung_mount(tmp_path / "hung") as hung:
        facts, settings = gathered(tmp_path, hung, good)
        lines = {one.check: one for one in examine(facts, settings)}
        assert lines[f"disk {good}"].level == "ok"
        assert lines[f"disk {hung}"].level == "wrong"
        assert lines[f"disk {hung}"].found == f"it does not answer within {ANSWER_S:.0f} s"
        assert "DYN_KVBM_DISK_CACHE_DIR" in lines[f"disk {hung}"].advice


@pytest.mark.slow
def test_a_directory_that_every_look_needs_is_named_where_it_hangs(tmp_path: Path) -> None:
    with hung_mount(tmp_path / "hung") as hung:
        texts = {"state_dir": hung, "runtime_dir": tmp_path, "creds_dir": tmp_path}
        [finding] = silent_directories(Settings.load({}, texts), within_s=ANSWER_S)
    assert (finding.check, finding.level) == (f"directory {hung}", "wrong")
    assert "KVBM_STATE_DIR" in finding.advice
    assert silent_directories(Settings.load({}, texts), within_s=ANSWER_S) == []
