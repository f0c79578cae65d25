"""The engines that have left and whose streams are kept for a while, for routers that were away."""

from __future__ import annotations

ENDED_MAX = 64
ENDED_MS = 600_000
"""A router that was away may still have to learn that nothing is held. A stream takes half a KiB
then."""


class EndedEngines:
    """Engines that have left, with the time, oldest first. Bounded by number and by age."""

    def __init__(self) -> None:
        self._left_ms: dict[str, int] = {}

    def left(self, engine: str, now_ms: int) -> None:
        """Note that an engine has left."""
        self._left_ms.pop(engine, None)
        self._left_ms[engine] = now_ms

    def returned(self, engine: str) -> None:
        """Forget that an engine has left, for it is back."""
        self._left_ms.pop(engine, None)

    def due(self, now_ms: int) -> set[str]:
        """Return the engines that left long ago, and the oldest of too many, and forget them."""
        found: set[str] = set()
        for engine, left_ms in self._left_ms.items():
            assert left_ms <= now_ms, f"{engine} left at {left_ms} ms, now {now_ms}"
            if len(self._left_ms) - len(found) <= ENDED_MAX and now_ms - left_ms < ENDED_MS:
                break
            found.add(engine)
        for engine in found:
            del self._left_ms[engine]
        assert len(self._left_ms) <= ENDED_MAX, f"{len(self._left_ms)} engines are kept"
        return found
