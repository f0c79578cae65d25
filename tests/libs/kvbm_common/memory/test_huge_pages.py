"""Shared memory: where huge pages can be, in huge pages where the kernel has them, gone with the
last who uses it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.memory.huge_pages import HUGE_PAGE_BYTES, make_huge, map_shared, populate

SIZE = 3 * HUGE_PAGE_BYTES + 4096


def huge_bytes(address: int) -> int:
    """Of the mapping that begins there; see proc_pid_smaps(5)."""
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index(f"{address:x}-") :]
    return int(re.search(r"ShmemPmdMapped: +(\d+) kB", mapping)[1]) << 10  # type: ignore[index]


def is_mapped(address: int) -> bool:
    return f"{address:x}-" in Path("/proc/self/maps").read_text()


def linux() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


@pytest.fixture
def memory() -> np.typing.NDArray[np.uint8]:
    return map_shared(-1, SIZE)


def test_memory_begins_where_a_huge_page_can(memory: np.typing.NDArray[np.uint8]) -> None:
    assert len(memory) == SIZE
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not memory.any()


@pytest.mark.skipif(linux() < (6, 1), reason="MADV_COLLAPSE came with Linux 6.1")
def test_it_is_made_huge_without_a_setting_and_keeps_what_is_in_it(
    memory: np.typing.NDArray[np.uint8],
) -> None:
    memory[5:SIZE:4096] = 7
    before = memory.copy()
    make_huge(memory.ctypes.data, SIZE)
    assert huge_bytes(memory.ctypes.data) == 3 * HUGE_PAGE_BYTES
    populate(memory.ctypes.data, SIZE, writable=True)
    assert np.array_equal(memory, before)


def test_it_lives_as_long_as_a_view_of_it() -> None:
    memory = map_shared(-1, SIZE)
    address, view = memory.ctypes.data, memory.data[1:5]
    view[0] = 9
    del memory
    assert view[0] == 9
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def test_a_reader_of_a_file_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(b"abc" + bytes(SIZE - 3))
    fd = os.open(path, os.O_RDONLY)
    reader = map_shared(fd, SIZE, writable=False)
    os.close(fd)
    assert bytes(reader[:3]) == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        reader[0] = 1


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.touch()
    fd = os.open(path, os.O_WRONLY)
    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(PermissionError):
        map_shared(fd, SIZE)
    os.close(fd)
    assert Path("/proc/self/maps").read_text().count("---p") == before
