"""Who sleeps on a doorbell; a pipe stands for the ring of NIXL, which `test_nixl` has for real."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from kvbm_common.nixl import doorbell
from kvbm_common.nixl.doorbell import Doorbell, only_new_ring

LIMIT_S = 10.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.fixture
def bell(pipe: tuple[int, int]) -> Iterator[Doorbell]:
    bell = Doorbell(pipe[0])
    yield bell
    bell.close()


def test_who_rings_before_is_heard_once(bell: Doorbell) -> None:
    bell.ring()
    bell.ring()
    assert not bell.wait(None), "a job is not the end of an I/O"
    assert not bell.wait(0.0)


def test_it_wakes_who_sleeps(bell: Doorbell) -> None:
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(bell.wait(None)), daemon=True)
    sleeper.start()
    bell.ring()
    sleeper.join(LIMIT_S)
    assert woken == [False]


def test_the_end_of_an_io_is_told_until_it_is_taken(bell: Doorbell, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    bell.ring()
    assert bell.wait(LIMIT_S)
    assert bell.wait(LIMIT_S)
    os.read(pipe[0], 1)
    assert not bell.wait(0.0)


def test_what_nobody_waits_for_wakes_nobody(bell: Doorbell, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    bell.ring()
    assert not bell.wait(None)


def test_of_two_new_rings_nobody_knows_which_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "rings", lambda: {3, 4, 5})
    assert only_new_ring({3, 4}) == 5
    assert only_new_ring({3}) is None
    assert only_new_ring({3, 4, 5}) is None
