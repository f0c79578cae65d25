"""Generations: `clear` ends what was stored, for every engine of the host, whatever fails."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from kvbm_connectors.sglang import engine_life, generation
from kvbm_connectors.sglang.generation import Generation, unwritable


def another_process(monkeypatch: pytest.MonkeyPatch, life: bytes = bytes(8)) -> None:
    """From now on: it has cleared nothing yet."""
    monkeypatch.setattr(generation, "CLEARED", Counter())
    monkeypatch.setattr(engine_life, "LIFE", life)


def test_a_generation_is_seen_by_all_and_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. None at first. 2. One engine clears, another one sees it. 3. So does a later one.
    4. Another namespace is not touched."""
    theirs = Generation(tmp_path, b"a" * 32)
    assert theirs.read() == b""
    Generation(tmp_path, b"a" * 32).renew()
    another_process(monkeypatch)
    first = theirs.read()
    assert len(first) == 8
    Generation(tmp_path, b"a" * 32).renew()
    another_process(monkeypatch)
    assert first != theirs.read() == Generation(tmp_path, b"a" * 32).read()
    assert Generation(tmp_path, b"b" * 32).read() == b""


def test_who_clears_is_found_by_its_own_life_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are updated, and it clears: neither its next life, with the weights of its start, nor
    another engine names pages as it does; nor does one that is updated and clears as well."""
    found = []
    for life in (b"first...", b"another."):
        another_process(monkeypatch, life)
        engine = Generation(tmp_path, bytes(32))
        engine.renew()
        found += [engine.read(), Generation(tmp_path, bytes(32)).read()]
        assert found[-1] == found[-2]
    another_process(monkeypatch, b"next....")
    found.append(Generation(tmp_path, bytes(32)).read())
    assert len(set(found)) == 3
    engine.renew()
    assert engine.read() not in found


@pytest.mark.parametrize("is_own", [False, True])
def test_a_generation_that_is_lost_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Neither what was cleared comes back, nor what was stored since: others may have cleared it
    meanwhile. Who has never seen one takes it for none."""
    engine = Generation(tmp_path, bytes(32))
    engine.renew()
    if not is_own:
        another_process(monkeypatch)
    before = engine.read()
    (path,) = (tmp_path / "sglang").iterdir()
    path.unlink()
    assert Generation(tmp_path, b"b" * 32).read() == b""
    after = engine.read()
    assert after not in (before, b"")
    assert engine.read() == after
    assert len(after) == len(before)
    other = Generation(tmp_path, bytes(32))
    assert other.read() == after


def test_a_clear_that_fails_finds_nothing_of_before(tmp_path: Path) -> None:
    """Goal: no pool keeps what was before, though its directory is full."""
    engine = Generation(tmp_path, bytes(32))
    engine.renew()
    before = engine.read()
    full = patch.object(Path, "write_bytes", side_effect=OSError("no space"))
    with full, pytest.raises(OSError, match="no space"):
        engine.renew()
    assert engine.read() != before


def test_a_generation_that_cannot_be_read_is_not_none(tmp_path: Path) -> None:
    """What was cleared must not come back because a file cannot be read."""
    Generation(tmp_path, bytes(32)).renew()
    (path,) = (tmp_path / "sglang").iterdir()
    os.unlink(path)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        Generation(tmp_path, bytes(32)).read()


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A state directory that cannot be made, for any user: it lies below a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "state"


def test_a_directory_that_cannot_be_written_is_known(tmp_path: Path, nowhere: Path) -> None:
    assert unwritable(tmp_path / "state") == ""
    assert list((tmp_path / "state" / "sglang").iterdir()) == []
    assert "Not a directory" in unwritable(nowhere)


def test_a_clear_without_a_file_ends_what_this_process_has_stored(
    nowhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Nothing is cleared yet: the names are everybody's. 2. It fails, and says so; this process
    goes on under names of its own, in all pools that share a life. 3. So does the next one."""
    engine, rank = Generation(nowhere, bytes(32)), Generation(nowhere, bytes(32))
    names = [engine.read()]
    assert names == [b""]
    for _ in range(2):
        with pytest.raises(NotADirectoryError):
            engine.renew()
        names.append(engine.read())
        assert engine.read() == rank.read() == names[-1]
    assert len(set(names)) == 3
    assert caplog.text.count("cannot be written") == 2  # Once by each of the two.


@pytest.mark.parametrize("is_own", [False, True])
def test_a_generation_that_is_lost_and_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """1. Others may have cleared before it was lost: nothing from before is found, neither what
    was stored before there was a file. 2. The names stay as they are. 3. A file is followed again.
    """
    engine = Generation(tmp_path, bytes(32))
    if not is_own:
        Generation(tmp_path, bytes(32)).renew()
        another_process(monkeypatch)
    else:
        full = patch.object(Path, "write_bytes", side_effect=OSError("no space"))
        with full, pytest.raises(OSError, match="no space"):
            engine.renew()
    names = [engine.read()]
    Generation(tmp_path, bytes(32)).renew()
    if not is_own:
        another_process(monkeypatch)
    names.append(engine.read())
    (path,) = (tmp_path / "sglang").iterdir()
    path.unlink()
    with patch.object(Path, "write_bytes", side_effect=OSError("no space")):
        names.append(engine.read())
        assert engine.read() == names[-1]
    assert len(set(names)) == 3
    assert b"" not in names
    Generation(tmp_path, bytes(32)).renew()
    if not is_own:
        another_process(monkeypatch)
    assert engine.read() == Generation(tmp_path, bytes(32)).read() not in names
