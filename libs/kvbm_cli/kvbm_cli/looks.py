"""Looks at directories, each in a thread of its own: a disk that hangs hides no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Look(Generic[T]):
    """The outcome of one look; neither is set where it has not ended."""

    found: tuple[T, ...] = ()
    error: BaseException | None = None


def look_at_once(looks: Sequence[Callable[[], T]], *, within_s: float) -> dict[int, T]:
    """Run all looks at the same time; return what those found that ended in time, by their places.

    The thread of one that hangs is left behind. Raises the first error of a look.
    """
    outcomes: list[_Look[T]] = [_Look() for _ in looks]

    def run(place: int) -> None:
        try:
            outcomes[place].found = (looks[place](),)
        except BaseException as error:
            outcomes[place].error = error

    threads = [
        threading.Thread(target=run, args=(place,), name=f"look-{place}", daemon=True)
        for place in range(len(looks))
    ]
    end = time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return {place: found for place, one in enumerate(outcomes) for found in one.found}
