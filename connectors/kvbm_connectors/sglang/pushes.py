"""Pushes: weights that a running SGLang takes, seen where its model runner takes them.

SGLang tells a storage of no update, and notes one without a version nowhere. All of them go through
one class of its model runner, in the process that calls the storage. Methods of that class are
looked up with each call, so that they can be wrapped while the engine serves.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
CLASS = "WeightUpdater"
METHODS = (
    "update_weights_from_disk", "update_weights_from_tensor", "load_weights_from_distributed",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
    "init_weights_update_group",
)  # fmt: skip
"""Methods that write weights, or between which a trainer writes them over RDMA. With the last one
it joins: it may flush before its first update, and requests that wait must load nothing then."""


class Pushes:
    """Counts calls that change weights, before each and after it: what a storage was given while
    one ran may be of the old weights. SGLang's scheduler thread alone makes them."""

    def __init__(self) -> None:
        self.count = 0
        self._wrapped: set[Callable[..., Any]] = set()

    def watch(self, owner: type) -> None:
        """Wrap the methods of a class, once. Raises AttributeError where one is missing."""
        methods = {name: getattr(owner, name) for name in METHODS}
        for name, method in methods.items():
            if method not in self._wrapped:
                self._wrapped.add(counting := self._counting(method))
                setattr(owner, name, counting)

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counting(*given: Any, **named: Any) -> Any:
            self.count += 1
            try:
                return method(*given, **named)
            finally:
                self.count += 1

        return counting


PUSHES = Pushes()
"""Pushes into this process since its first storage was attached."""


def pushes_seen() -> Callable[[], int] | None:
    """Return what counts pushes into this process from now on; None: they are not seen."""
    try:
        PUSHES.watch(getattr(importlib.import_module(MODULE), CLASS))
    except Exception as error:  # Another SGLang, or no server: of any type.
        log.info("pushed weights are not seen: %r", error)
        return None
    return lambda: PUSHES.count
