"""Early fills: fills into an arena that this tier does not know yet, because it was just cut.

A host tier asks for fills as soon as its first engine has attached, and a lower tier learns of the
arena by asking for it. A fill causes that question and waits for the answer, at most twice: the
first answer may have left before the arena was cut. It waits until its deadline at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.messages import FillAsked


@dataclass(slots=True)
class EarlyFill:
    """A fill that waits for its arena."""

    event: FillAsked
    has_asked_again: bool = False
    """A question for the arena has begun after the fill came; no other will follow."""


class EarlyFills:
    """All fills whose arena is being asked for."""

    def __init__(self, arenas: HostArenas) -> None:
        self._arenas = arenas
        self.fills: list[EarlyFill] = []

    def takes(self, event: FillAsked) -> bool:
        """Take a fill whose arena is not known, if an answer may bring that arena."""
        if event.request.epoch in self._arenas.usable:
            return False
        fill = EarlyFill(event, has_asked_again=not self._arenas.is_asking)
        self._arenas.ask_missing()
        if not self._arenas.is_asking:
            return False
        self.fills.append(fill)
        return True

    def release(self, now_ms: int) -> list[FillAsked]:
        """Return the fills whose arena has become known, or will not in time; they wait no
        longer."""
        fills, self.fills = self.fills, []
        released = []
        for fill in fills:
            if now_ms < fill.event.request.until_ms and self._waits_on(fill):
                self.fills.append(fill)
            else:
                released.append(fill.event)
        waiting = len(self.fills)
        assert not waiting or self._arenas.is_asking, f"{waiting} fills wait for no answer"
        return released

    def release_all(self) -> list[FillAsked]:
        """Return every fill: this tier stops."""
        released, self.fills = self.fills, []
        return [fill.event for fill in released]

    def _waits_on(self, fill: EarlyFill) -> bool:
        if fill.event.request.epoch in self._arenas.usable:
            return False
        if not self._arenas.is_asking and not fill.has_asked_again:
            fill.has_asked_again = True
            self._arenas.ask_missing()
        return self._arenas.is_asking
