"""Census: how many entries each attribute of a service's objects has, told by the service itself.

A leak of one entry for an engine is lost among the blocks of Python, which histories fill by tens
of thousands. The attribute that leaks grows by one for each engine, and no other does.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "KVBM_SOAK_CENSUS"
"""A `Plan` in JSON; only soaks know it."""
OURS = ("kvbm_", "tests.soak.plants")
CONTAINERS = (dict, list, set, deque)
DEPTH_MAX = 4


class Plan(NamedTuple):
    """When censuses are taken, and where their results are. None is taken in the tenths of a soak
    that are compared: lookups wait for one."""

    spacing_s: float
    from_s: float
    until_s: float
    """Of the monotonic clock, which all processes share."""
    directory: str


def begin() -> None:
    """Count in this process from now on, as the environment says.

    The main thread counts: what it looks at cannot be closed meanwhile, and is not kept alive for
    longer. It is asked as by a signal, but no system call is interrupted.
    """
    plan = Plan(*json.loads(os.environ[VARIABLE]))
    path = Path(plan.directory) / f"{os.getpid()}.json"
    signal.signal(signal.SIGUSR2, lambda *_: _write(path))
    threading.Thread(target=_ask, args=(plan,), name="soak-census", daemon=True).start()


def _ask(plan: Plan) -> None:
    while True:  # Its end would be a thread less, and hide one that leaks.
        time.sleep(plan.spacing_s)
        if plan.from_s <= time.monotonic() < plan.until_s:
            _thread.interrupt_main(signal.SIGUSR2)


def _write(path: Path) -> None:
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(entries()))
        new.replace(path)


def entries() -> dict[str, int]:
    """Return the entries below each attribute and global of ours, and the objects of each class."""
    counted: Counter[str] = Counter()
    seen: set[int] = set()
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(OURS):
            for name, value in [*vars(module).items()]:
                counted[f"{module.__name__}.{name}"] += _size(value, seen, DEPTH_MAX)
    for one in _objects():
        kind = type(one)
        if str(kind.__module__).startswith(OURS):
            counted[f"{kind.__qualname__} objects"] += 1
            for name, value in _attributes(one, kind):
                counted[f"{kind.__qualname__}.{name}"] += _size(value, seen, DEPTH_MAX)
    return {name: count for name, count in counted.items() if count}


def _objects() -> list[object]:
    """Return all objects that the collector knows, also those it leaves out.

    A service that is ready has frozen all it has. What is young is frozen as well afterwards, so
    that its garbage goes before: a failed request leaves cycles, which would stay until all is
    walked.
    """
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found


def _attributes(one: object, kind: type) -> Iterator[tuple[str, object]]:
    yield from [*getattr(one, "__dict__", {}).items()]
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield name, getattr(one, name)


def _size(value: object, seen: set[int], depth: int) -> int:
    """Return the entries of a container and of those in it; each is counted once."""
    if not isinstance(value, CONTAINERS) or id(value) in seen:
        return 0
    seen.add(id(value))
    inner = [*value.values()] if isinstance(value, dict) else [*value]
    deeper = (_size(one, seen, depth - 1) for one in inner) if depth else ()
    return len(inner) + sum(deeper)
