"""What tests say to `process.py` and `live_process.py`, and what they answer: JSON lines."""

from __future__ import annotations

import msgspec

DISK_ALONE = "disk alone"
"""All is written to disk, and the host tier is emptied by its admin verb."""
QUICK = ("flip", "pause host-tier", "pause disk-tier", "restart engine")
"""What else is done in the middle of a program. A flip is of bits in the arena."""
DISTURBANCES = (*QUICK, "restart host-tier", "restart disk-tier")


class SeedsCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Run the programs of these seeds on a device of ours, in one kind."""

    kind: str
    first: int
    end: int
    plant: str = ""
    """The defect that is put in; empty: none."""


class SeedsReply(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in all of them, or how the first one that failed did."""

    error: str = ""
    counts: dict[str, int] = {}


class LiveCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Run a program of a kind; or, while one runs: the act that it asked for is done."""

    kind: str = ""
    seed: int = 0
    plant: str = ""
    """The defect that is put in; empty: none."""
    disturbances: list[str] = []
    """Acts that the program has done, in an order of its own."""
    epoch: int = 0
    """After an act: the host tier's present life."""


class LiveReply(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended; or an act that it wants done."""

    act: str = ""
    error: str = ""
    counts: dict[str, int] = {}
