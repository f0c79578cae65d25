"""Stops: a flush of SGLang's caches, seen while it waits for SGLang's storage threads to end.

These empty their queues first. The scheduler waits 10 s for each, and ends if that is too short:
with a slow disk, a few questions that wait for their deadlines are enough. The requests that they
are for are gone, so they are answered at once. Writes have a bound of their own (`storage.py`).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MODULE = "sglang.srt.managers.cache_controller"
CLASS = "HiCacheController"
METHOD = "_stop_storage_threads"


class Stops:
    """Stops of the storage threads of this process. SGLang's scheduler thread alone makes them."""

    def __init__(self) -> None:
        self.count = 0
        """Stops that are under way."""
        self._wrapped: set[Callable[..., Any]] = set()

    def watch(self, owner: type) -> None:
        """Wrap the method of a class, once. Raises AttributeError where it is missing."""
        stop = getattr(owner, METHOD)
        if stop in self._wrapped:
            return

        @functools.wraps(stop)
        def counted(*given: Any, **named: Any) -> Any:
            self.count += 1
            try:
                return stop(*given, **named)
            finally:
                self.count -= 1

        self._wrapped.add(counted)
        setattr(owner, METHOD, counted)


STOPS = Stops()


def watch_stops() -> None:
    """See the stops of this process from now on, where this SGLang has its class as before."""
    try:
        STOPS.watch(getattr(importlib.import_module(MODULE), CLASS))
    except Exception as error:  # Another SGLang, or no server: of any type.
        log.info("a flush is not seen while it waits for storage threads: %r", error)
