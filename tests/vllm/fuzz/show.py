"""What a campaign prints: a progress line, every failure with its replay, and what happened."""

from __future__ import annotations

import shlex
import threading
import time
from collections import Counter

from tests.vllm.fuzz.campaign import Found, Tally

PROGRESS_S = 15.0
WANTED = (
    "requests", "cached tokens", "vllm preemptions", "vllm hits on blocks of the same step",
    "vllm admitted with a hit", "vllm aborts", "vllm aborts in load", "vllm aborts in prefill",
    "vllm aborts before admission", "vllm drafts taken", "vllm drafts rejected",
    "vllm steps while loading", "offload_blocks", "loads_intact", "loads_failed",
    "offers_revoked", "near ties",
)  # fmt: skip
"""A feature that never happens is a dead draw: these are printed even when they are 0."""


class Board:
    """Takes tallies of all jobs."""

    def __init__(self, quiet: bool = False) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[tuple[int, str, str], Tally] = {}
        self._shown: set[tuple[int, str, str, int, bool]] = set()
        self._quiet = quiet
        self._printed_s = 0.0

    @property
    def failures(self) -> list[Found]:
        """Of all shapes."""
        return [found for tally in self._tallies.values() for found in tally.found]

    def take(self, job: int, tally: Tally) -> None:
        """A newer tally of a shape."""
        with self._lock:
            self._tallies[job, tally.shape, tally.plant] = tally
            for number, found in enumerate(tally.found):
                key = (job, tally.shape, tally.plant, number, found.shrunk is not None)
                if key not in self._shown:
                    self._shown.add(key)
                    print(describe(found), flush=True)
            if not self._quiet and time.monotonic() - self._printed_s > PROGRESS_S:
                self._printed_s = time.monotonic()
                print(self._progress(tally), flush=True)

    def _progress(self, tally: Tally) -> str:
        programs = sum(one.programs for one in self._tallies.values())
        some = {name.removeprefix("vllm "): tally.features.get(name, 0) for name in WANTED}
        happened = ", ".join(f"{name} {number}" for name, number in some.items() if number)
        return f"{programs} programs, {len(self.failures)} failed | {tally.shape}: {happened}"

    @property
    def all_found(self) -> bool:
        """Was every plant found?"""
        return all(tally.found for tally in self._tallies.values())

    def table(self) -> str:
        """After how many programs each plant was found."""
        return "\n".join(
            f"{tally.plant:20} {tally.shape:10} "
            + (f"{tally.programs:4} programs: {_kinds(tally.found[0])}" if tally.found
               else f"NOT FOUND in {tally.programs} programs")
            for tally in self._tallies.values()
        )  # fmt: skip

    def summary(self) -> str:
        """All shapes: speed, failures, what happened and what never did."""
        lines = []
        features: Counter[str] = Counter()
        for tally in self._tallies.values():
            features.update(tally.features)
            rate = 60 * tally.programs / tally.seconds if tally.seconds else 0.0
            lines.append(
                f"{tally.shape:10} {tally.programs:5} programs, {rate:5.0f} a minute, "
                f"started in {tally.started_s:.0f} s, {len(tally.found)} failed"
            )
        wanted = {name: features.pop(name, 0) for name in WANTED}
        lines += [f"  {name:40} {number}" for name, number in wanted.items()]
        lines += [f"  {name:40} {number}" for name, number in sorted(features.items())]
        dead = [name for name, number in wanted.items() if not number]
        lines.append(f"never: {', '.join(dead) or 'all happened'}")
        return "\n".join(lines)


def _kinds(found: Found) -> str:
    return ", ".join(sorted({failure.kind for failure in found.failures}))


def describe(found: Found) -> str:
    """A failure, its program, and the command that replays it."""
    if found.like:
        seed = f"{found.program.shape} seed {found.program.seed}"
        return f"FAILED {seed}: {_kinds(found)}, like {found.like}"
    program = found.shrunk or found.program
    failures = found.shrunk_failures or found.failures
    text = "\n".join(
        f"  {failure.kind}: {failure.request} {failure.text}" for failure in failures[:6]
    )
    state = f"shrunk in {found.runs} runs" if found.shrunk else "as drawn"
    return (
        f"FAILED {program.shape} seed {program.seed} ({state}: {len(program.requests)} requests, "
        f"{len(program.acts)} acts)\n{text}\n"
        f"  replay: .venv/bin/python -m tests.vllm.fuzz --replay {shlex.quote(program.line())}"
    )
