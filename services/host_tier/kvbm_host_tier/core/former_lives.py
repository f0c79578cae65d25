"""The lives of engines that another life has replaced, and that are refused while it is heard."""

from __future__ import annotations

from kvbm_host_tier.core.messages import EngineId

FORMER_LIVES_MAX = 256
"""Old incarnations that are remembered, so that a twin that still runs is refused every time."""


class FormerLives:
    """The lives that are refused; bounded, the oldest is forgotten."""

    def __init__(self) -> None:
        self._lives: dict[EngineId, None] = {}

    def __contains__(self, life: EngineId) -> bool:
        return life in self._lives

    def add(self, life: EngineId) -> None:
        """Refuse a life from now on."""
        self._lives[life] = None
        while len(self._lives) > FORMER_LIVES_MAX:
            del self._lives[next(iter(self._lives))]
        assert life in self._lives, life

    def pardon(self, engine: str) -> None:
        """Let every life of an engine say hello again: the one that replaced the others is over.

        Incarnations have no order. A hello that came late may have replaced a newer life.
        """
        assert engine
        for life in [one for one in self._lives if one.engine == engine]:
            del self._lives[life]
