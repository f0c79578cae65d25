"""Affinity: threads started beside a bound computation may run elsewhere, and nobody else may."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from kvbm_connectors.client.affinity import unbound

ALL = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="one processor is everybody's")


@pytest.fixture
def bound() -> Iterator[set[int]]:
    """This thread may use one processor, as OpenMP's first one."""
    one = {min(ALL)}
    os.sched_setaffinity(0, one)
    yield one
    os.sched_setaffinity(0, ALL)


def seen_in_a_thread() -> set[int]:
    """What a thread that is started now may use."""
    seen: set[int] = set()
    thread = threading.Thread(target=lambda: seen.update(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return seen


def test_threads_leave_the_processor_that_openmp_has_bound(
    bound: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of this process may use them all. Afterwards the binding is as it was."""
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert seen_in_a_thread() == bound
    with unbound():
        assert seen_in_a_thread() == os.sched_getaffinity(os.getppid())
    assert os.sched_getaffinity(0) == bound
    assert seen_in_a_thread() == bound


def test_an_operators_choice_is_not_ours_to_undo(
    bound: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Nothing is bound by OpenMP: whoever bound us meant it. 2. The parent is bound alike."""
    with unbound():
        assert os.sched_getaffinity(0) == bound
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    code = (
        "import os; from kvbm_connectors.client.affinity import unbound\n"
        "with unbound(): print(os.sched_getaffinity(0))"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert child.stdout.decode().strip() == str(bound)


def test_a_parent_on_other_processors_takes_our_threads(
    bound: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taskset` has put the server on one processor, and OpenMP its worker on another one: our
    threads stay off the one that computes."""
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    code = (
        "import os; from kvbm_connectors.client.affinity import unbound\n"
        f"os.sched_setaffinity(0, {ALL - bound})\n"
        "with unbound(): print(os.sched_getaffinity(0))"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert child.stdout.decode().strip() == str(bound)
