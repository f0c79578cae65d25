"""Calls of vLLM's engine core, watched where vLLM tells no connector what has changed.

The core runs in the scheduler's process, and makes these calls between steps, in its thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

WATCHED = "kvbm_watches"
"""Attribute of the method that stands for vLLM's own."""

log = logging.getLogger(__name__)


def watch(name: str, told: Callable[..., None], core_class: Any, *, without: str) -> None:
    """Have each call of this method of vLLM's `EngineCore` told of when it has ended.

    `told` gets the engine core, whether the call has raised (`failed`), and the call's arguments.
    `core_class` None is vLLM's own. Where there is no such method a warning says what comes of it,
    `without` the watch. A method is watched once.
    """
    if core_class is None:
        core_class = _engine_core()
    call = getattr(core_class, name, None)
    if call is None:
        log.warning("vLLM's engine core has no %r: %s", name, without)
        return
    if hasattr(call, WATCHED):
        return

    @functools.wraps(call)
    def watched(engine: Any, *arguments: Any, **more: Any) -> Any:
        failed = True
        try:
            answer = call(engine, *arguments, **more)
            failed = False
            return answer
        finally:
            told(engine, failed, *arguments, **more)

    setattr(watched, WATCHED, True)
    setattr(core_class, name, watched)


def _engine_core() -> Any:
    """Return vLLM's class, or None where this vLLM has it elsewhere."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return None
    return EngineCore


def ours(engine: Any, method: str) -> Iterator[Any]:
    """Yield our connectors of an engine core, which have this method; none before it has a
    scheduler."""
    yield from _within(getattr(getattr(engine, "scheduler", None), "connector", None), method)


def _within(connector: Any, method: str) -> Iterator[Any]:
    """Yield an engine's only connector, or ours among the children of vLLM's `MultiConnector`."""
    children = getattr(connector, "_connectors", None)
    for child in children if isinstance(children, (list, tuple)) else ():
        yield from _within(child, method)
    if hasattr(connector, method):
        yield connector
