"""Free ports: what a test or a stack on a laptop listens on is nobody else's."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TextIO

import pytest
from kvbm_common.runtime import processes
from kvbm_common.runtime.processes import LockTaken, free_port, remove_own, take_lock


@pytest.fixture
def kernels_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel says which ports it hands out."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(processes, "_KERNELS_PORTS", path)
    return path


def test_a_port_is_none_that_the_kernel_hands_out(kernels_ports: Path) -> None:
    """One of those may be a connection's by the time that a service listens on it."""
    kernels_ports.write_text("12000\t60999\n")
    assert all(10_000 <= free_port() < 12_000 for _ in range(100))
    assert all(10_000 <= free_port(also_above=1000) < 11_000 for _ in range(100))


@pytest.mark.parametrize("said", ["1024 65535", "9000 9999", "10500 65535"])
def test_where_the_kernel_has_all_ports_it_is_one_of_those(kernels_ports: Path, said: str) -> None:
    kernels_ports.write_text(said)
    assert 10_000 <= free_port(also_above=1000) <= 64_535


def test_without_a_kernel_that_says_so_there_are_ports_too(kernels_ports: Path) -> None:
    assert not kernels_ports.exists()
    assert 10_000 <= free_port() < 49_152


def test_the_port_above_is_free_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for replays was once another process's."""
    free = free_port(also_above=10)
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        taken = other.getsockname()[1]
        monkeypatch.setattr(processes, "_next_number", numbers(taken, taken - 10, free))
        assert free_port(also_above=10) == free


def test_when_all_are_taken_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        monkeypatch.setattr(processes, "_next_number", numbers(*[other.getsockname()[1]] * 100))
        with pytest.raises(OSError, match=r"no free TCP port found on 127\.0\.0\.1") as failed:
            free_port()
        assert failed.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine_is_no_port_taken() -> None:
    with pytest.raises(OSError, match="Cannot assign") as failed:
        free_port("192.0.2.1")
    assert failed.value.errno == errno.EADDRNOTAVAIL


def test_no_port_comes_twice_soon() -> None:
    """Goal: what was found and is not open yet is not found again, by this process or a fork."""
    found = [free_port() for _ in range(1_000)]
    assert len(set(found)) == len(found)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        others = list(fork.map(free_port, ["127.0.0.1"] * 3))
    assert set(others).isdisjoint([*found[-20:], *(free_port() for _ in range(3))])


def test_a_row_of_ports_above_one_is_no_other_ones() -> None:
    """An engine's ranks listen on ports in a row, from the one that was found for them on."""
    rows = [range(port, port + 50) for port in (free_port() for _ in range(20))]
    assert len({port for row in rows for port in row}) == 20 * 50


def numbers(*ports: int) -> Callable[[], int]:
    """The numbers that stand for these ports, in turn."""
    return iter([port - 10_000 for port in ports]).__next__


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: two processes never hold one lock.

    Method: the holder removes its file and ends, between another one's open and lock.
    """
    path = tmp_path / "lock"
    first = take_lock(path)
    flock = fcntl.flock

    def late(lock: TextIO, operation: int) -> None:
        if path.exists() and not first.closed:
            path.unlink()
            first.close()
        flock(lock, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with take_lock(path), pytest.raises(LockTaken):
        take_lock(path)


def test_only_an_own_file_is_removed(tmp_path: Path) -> None:
    """Goal: a process that ends late takes no file from the next one, which has its name."""
    path = tmp_path / "socket"
    with path.open("w") as ours:
        status = path.stat()
        path.unlink()
        remove_own(path, status)  # It is gone already.
        path.write_text("another process")
        remove_own(path, status)
        assert path.read_text() == "another process"
        assert not ours.closed
    remove_own(path, path.stat())
    assert not path.exists()
