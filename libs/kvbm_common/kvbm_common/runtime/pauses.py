"""Pauses that end together: what wakes at the same moment wakes a processor once, and cheaply."""

from __future__ import annotations

import time
import zlib

SHIFTS = 16
"""Shifts of a period, which hosts share: a reader of a whole fleet wakes no more often."""
EARLY = 0.1
"""The part of a period below which a pause is made one period longer: a timer may be early."""


def pause_s(every_s: float, *, of: str = "", now_s: float | None = None) -> float:
    """Return how many seconds to wait for the next of the moments that come every `every_s`.

    All processes of a host wait for the same ones, by the wall clock. Those of another `of`, as the
    name of a host, may be shifted: a fleet does not do everything at once, nor at any time.
    """
    assert every_s > 0, f"a pause of {every_s} s"
    now_s = time.time() if now_s is None else now_s
    shift_s = zlib.crc32(of.encode()) % SHIFTS / SHIFTS * every_s
    left_s = every_s - (now_s - shift_s) % every_s
    pause = left_s if left_s >= EARLY * every_s else left_s + every_s
    assert 0 < pause <= (1 + EARLY) * every_s, f"{pause} s of {every_s} s"
    return pause


def has_turn(every_s: float, *, of: str, place: int = 0, now_s: float | None = None) -> bool:
    """Tell whether the moment that is nearest, of SHIFTS ones that come every `every_s`, is that of
    `of`: what wakes together need not all do at once what takes long.

    Up to SHIFTS ones that share a name have different moments by their places.
    """
    assert every_s > 0, f"a moment each {every_s} s"
    assert 0 <= place < SHIFTS, f"place {place}"
    now_s = time.time() if now_s is None else now_s
    return round(now_s / every_s) % SHIFTS == (zlib.crc32(of.encode()) + place) % SHIFTS
