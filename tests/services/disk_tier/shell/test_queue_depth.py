"""The queue depth: measured on a real file, on slots that hold nothing."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.memory.huge_pages import map_shared
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_disk_tier.core.messages import Depth
from kvbm_disk_tier.shell import queue_depth as depth_module
from kvbm_disk_tier.shell.queue_depth import (
    BUDGET_S,
    DEPTH_MAX,
    IN_FLIGHT_BYTES_MAX,
    Tuning,
    knee,
    measure,
)
from numpy.typing import NDArray

STRIDE = 4096
SLOTS = 64
HELD = range(0, SLOTS, 2)
TAKEN = np.arange(SLOTS) % 2 == 0


@pytest.mark.parametrize(
    ("rates", "depth"),
    [
        ({}, None),
        ({1: 5.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 3.9, 8: 4.0, 16: 4.1}, 4),
        ({1: 1.0, 2: 2.0, 4: 4.0}, 4),
    ],
    ids=["nothing measured", "one", "no faster after four", "still rising"],
)
def test_the_smallest_depth_that_is_as_good_as_the_best(
    rates: dict[int, float], depth: int | None
) -> None:
    assert knee(rates) == depth


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of slots; each is filled with its own number."""
    path = tmp_path / "slots"
    path.write_bytes(b"".join(bytes([slot]) * STRIDE for slot in range(SLOTS)))
    return path


@pytest.fixture
def mover() -> Iterator[MoverThread]:
    with MoverThread("test-depth", backends=("POSIX",)) as mover:
        yield mover


def depth(mover: MoverThread, path: Path, tuning: Tuning, *, flags: int = os.O_RDWR) -> Depth:
    """As when a store is opened whose even slots hold blocks."""
    fd = os.open(path, flags | os.O_DIRECT)
    try:
        known = mover.register_file(fd, SLOTS * STRIDE).result(5)
        found = tuning.depth(mover, fd, STRIDE, TAKEN)
        mover.deregister(known).result(5)
        return found
    finally:
        os.close(fd)


def test_free_slots_are_measured_and_blocks_left_alone(mover: MoverThread, path: Path) -> None:
    found = depth(mover, path, Tuning(batch_blocks=1))
    assert found.reads in range(2, 2 * DEPTH_MAX + IN_FLIGHT_BYTES_MAX // STRIDE)
    assert found.writes in range(2, 2 * DEPTH_MAX + IN_FLIGHT_BYTES_MAX // STRIDE)
    data = path.read_bytes()
    changed = {
        slot for slot in range(SLOTS)
        if data[slot * STRIDE : (slot + 1) * STRIDE] != bytes([slot]) * STRIDE
    }  # fmt: skip
    assert changed, "nothing was written"
    assert not changed & set(HELD)
    assert found.written_bytes >= len(changed) * STRIDE


def test_two_batches_may_always_be_in_flight(mover: MoverThread, path: Path) -> None:
    count = IN_FLIGHT_BYTES_MAX // STRIDE
    found = depth(mover, path, Tuning(batch_blocks=count))
    assert (found.reads, found.writes) == (2 * count, 2 * count)


def test_four_batches_of_small_blocks_are_in_flight(
    mover: MoverThread, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth_module, "measure", lambda *_: Depth(1, 1))
    assert depth(mover, path, Tuning(batch_blocks=16, batch_bytes=100 * STRIDE)) == Depth(400, 400)


def test_memory_that_takes_its_time_costs_the_disk_nothing(
    mover: MoverThread, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(fd: int, size_bytes: int) -> NDArray[np.uint8]:
        ends_s = time.monotonic() + 2 * BUDGET_S
        while time.monotonic() < ends_s:
            pass
        return map_shared(fd, size_bytes)

    monkeypatch.setattr(depth_module, "map_shared", slow)
    found = depth(mover, path, Tuning(batch_blocks=1))
    assert found.reads is not None
    assert found.writes is not None


def test_who_says_it_has_nothing_measured(mover: MoverThread, path: Path) -> None:
    before = path.read_bytes()
    assert depth(mover, path, Tuning(queue_depth=7)) == Depth(7, 7)
    assert path.read_bytes() == before


def test_what_cannot_be_written_counts_as_deep_as_what_is_read(
    mover: MoverThread, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = depth(mover, path, Tuning(batch_blocks=1), flags=os.O_RDONLY)
    assert found.written_bytes == 0
    assert found.reads is not None
    assert found.writes == found.reads
    assert "cannot be measured" in caplog.text


def test_a_store_of_few_slots_has_nothing_to_measure(mover: MoverThread) -> None:
    assert Tuning().depth(mover, -1, STRIDE, np.zeros(8, bool)) == Depth()


def test_a_measurement_whose_time_is_over_ends(
    mover: MoverThread, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes a tenth of a second with every look: one step of writes has time, and then
    one of reads, although the writes took more than theirs."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    known = mover.register_file(fd, SLOTS * STRIDE).result(5)
    monkeypatch.setattr("kvbm_disk_tier.shell.queue_depth.time", _Clock())
    found = measure(mover, fd, STRIDE, list(range(SLOTS)), [])
    monkeypatch.undo()
    assert BUDGET_S < 0.5
    assert (found.reads, found.writes) == (2, 2)
    assert found.written_bytes == STRIDE
    mover.deregister(known).result(5)
    os.close(fd)


class _Clock:
    """`time`, as far as it is used."""

    def __init__(self) -> None:
        self._tenths = itertools.count()

    def monotonic(self) -> float:
        return next(self._tenths) / 10
