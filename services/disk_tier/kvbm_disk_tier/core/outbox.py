"""The outbox: the effects of the step that is being taken, in the order in which they are due.

Every part of the core that wants something done has the outbox, and no other way to say so. `step`
drains it once, at its end.
"""

from __future__ import annotations

from kvbm_disk_tier.core.effects import Effect


class Outbox:
    """Effects that wait for the end of the step."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        """Have this done after the step, behind what was emitted before."""
        self._effects.append(effect)

    def drain(self) -> list[Effect]:
        """Return the effects of the step, and begin with none."""
        effects, self._effects = self._effects, []
        return effects
