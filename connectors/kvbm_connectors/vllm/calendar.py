"""The calendar of running requests: which of them a step has to look at.

A request that decodes gets one token a step, and its blocks become full in known steps at the
earliest. Looking at each request in every step would cost more than all that is to be done.

Many requests that began together would be looked at together again, in steps that take long for it.
So looks that may wait are gathered into every third step, a fair share into each. The other steps
look at none of them: looks in a row cost less than looks in steps of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

GATHER_STEPS = 3
"""Steps from one that looks at those that may wait to the next."""
GATHER_REQUESTS = 32
"""Fewer requests than these are looked at when they are due."""


class Calendar:
    """Requests by the next step that looks at them, in the order in which they are due."""

    def __init__(self, soon_steps: int = 0, wait_steps: int = 0) -> None:
        """Look at a request in time, but for entries more than `soon_steps` ahead: these may wait
        `wait_steps` more, if each computes one token."""
        assert soon_steps >= 0 <= wait_steps, f"{soon_steps} steps, {wait_steps} more"
        self._soon_steps, self._wait_steps = soon_steps, wait_steps
        self._step = 0
        self._soon: dict[str, None] = {}
        """To be looked at by the next step that computes for them."""
        self._due: dict[int, list[str]] = {}
        self._at: dict[str, int] = {}
        """Request → the step of its entry in `_due`; other entries of it are out of date."""
        self._most: dict[str, int] = {}
        """Request → tokens of a step, where more than one is what its entry counts on."""

    def look_soon(self, request: str) -> None:
        """Have the next step that computes for a request look at it."""
        self._soon[request] = None

    def look_in(self, request: str, steps: int, tokens: int = 1) -> None:
        """Have a request looked at `steps` steps after the present one, or some more where it may
        wait, if each computes at most `tokens` of it."""
        assert steps > 0, f"{request} is looked at {steps} steps from now"
        if tokens > 1:
            self._most[request] = tokens
        else:
            self._most.pop(request, None)
        at = self._step + steps
        if steps > self._soon_steps and len(self._at) >= GATHER_REQUESTS:
            at = self._gathered(at, steps, self._wait_steps // tokens)
        self._at[request] = at
        self._due.setdefault(at, []).append(request)

    def _gathered(self, at: int, steps: int, wait_steps: int) -> int:
        """Return the first step from `at` on that gathers looks and has at most its share; `at` if
        all have more. Each request comes again after as many `steps`."""
        share = len(self._at) * GATHER_STEPS // steps
        first = -(-at // GATHER_STEPS) * GATHER_STEPS
        for gathering in range(first, at + wait_steps + 1, GATHER_STEPS):
            if len(self._due.get(gathering, ())) <= share:
                return gathering
        return at

    def forget(self, request: str) -> None:
        """Drop a request that has ended."""
        self._soon.pop(request, None)
        self._at.pop(request, None)
        self._most.pop(request, None)

    def begin_step(self, scheduled: Mapping[str, int]) -> list[str]:
        """Begin a step that computes so many tokens of each request; return those to look at.

        Requests with more tokens than their entry counts on are always among them: their blocks
        fill early.
        """
        self._step += 1
        for request in self._due.pop(self._step, ()):
            if self._at.get(request) == self._step:
                del self._at[request]
                self._soon[request] = None
        due: dict[str, None] = {}
        if sum(scheduled.values()) > len(scheduled):  # Not so in most steps.
            most = self._most.get
            due = dict.fromkeys(
                [one for one, tokens in scheduled.items() if tokens > 1 and tokens > most(one, 1)]
            )
        fewer, others = (
            (self._soon, scheduled) if len(self._soon) < len(scheduled) else (scheduled, self._soon)
        )
        due |= dict.fromkeys([request for request in fewer if request in others])
        for request in due:
            self._soon.pop(request, None)
        return list(due)
