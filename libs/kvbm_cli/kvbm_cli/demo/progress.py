"""Progress of a demo: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

SAY_S = 5.0
"""The pause between two lines of progress in an output that is no terminal, in seconds."""


class Progress:
    """Counts steps of one kind. Use it in `with`."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._said_s = time.monotonic()
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(*columns, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, state: str) -> None:
        """Count a step; `state` says more about all of them."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=state)
        elif time.monotonic() > self._said_s + SAY_S:
            self._said_s = time.monotonic()
            print(f"{self._done} of {self._total} {self._what}, {state}", flush=True)
