"""Affinity: our threads keep off the processors that an engine has bound its computation to.

OpenMP binds the thread that starts it (`OMP_PROC_BIND`, `GOMP_CPU_AFFINITY`, `KMP_AFFINITY`), and
every thread that is started from there inherits the binding: without this module a connector's
threads would take their time from the one processor that computes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

BINDINGS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def wider_cpus() -> set[int]:
    """Return the processors that the parent process may use, if OpenMP has bound this thread to
    fewer processors or to others.

    The set is empty when there is nothing to widen. An operator's own choice (`taskset vllm serve`)
    holds for the parent too, and so stays in force.
    """
    if not any(os.environ.get(name) for name in BINDINGS) or not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        ours, parents = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except OSError:  # The parent is gone, or not ours to look at.
        return set()
    return parents if parents - ours else set()


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Let threads that are started in this block run beside the engine's computation."""
    wider = wider_cpus()
    if not wider:
        yield
        return
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, wider)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound)
