"""The sources of events, registered or not, and which of them are forgotten.

A source that left is remembered for a while, so that its late events are known as such. Only the
core changes them (core.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.follow import Followed, FollowLimits, FollowState

from kvbm_index.core.messages import AnyEvent, Limits, SourceKey


@dataclass(slots=True)
class Source(Followed[AnyEvent]):
    """One source of events, registered or not: `follow.py` has the drawing of its states."""

    key: SourceKey
    registered: bool = False
    unregistered_since_ms: int = 0
    ahead_of_registry_since_ms: int | None = None
    """Since when a life is followed that the registry does not name yet; None: it names the
    followed life, or a snapshot was requested to tell which life is right."""

    def unregister(self, now_ms: int) -> None:
        """Note that the registry has no entry of this source."""
        self.registered, self.registered_epoch = False, 0
        self.unregistered_since_ms = now_ms

    def end_wait_for_registry(self, now_ms: int, after_ms: int) -> bool:
        """End a wait for the registry that lasts too long; return whether a snapshot must tell.

        The registry should name the life that is followed, and names another one.
        """
        since_ms = self.ahead_of_registry_since_ms
        if since_ms is None or now_ms - since_ms <= after_ms:
            return False
        assert now_ms >= since_ms, f"{self.key}: ahead since {since_ms} ms, in future"
        self.ahead_of_registry_since_ms = None
        return self.registered and self.state is FollowState.CURRENT


class Sources(dict[SourceKey, Source]):
    """Every source by its key, in the order in which they were made."""

    def __init__(self, limits: Limits, follow_limits: FollowLimits) -> None:
        super().__init__()
        self._limits = limits
        self._follow_limits = follow_limits

    def get_or_make(self, key: SourceKey, now_ms: int) -> Source | None:
        """Return the source, made if it is new; None: there are too many."""
        source = self.get(key)
        if source is None:
            if len(self) >= self._limits.sources_max and not self._forget_gone():
                return None
            source = self[key] = Source(
                key=key, unregistered_since_ms=now_ms, limits=self._follow_limits
            )
        assert source.key == key, f"{source.key} is kept as {key}"
        assert len(self) <= self._limits.sources_max, f"{len(self)} sources"
        return source

    def forget_old(self, now_ms: int) -> None:
        """Forget the sources that left long ago: engines come under new names."""
        old = [
            key
            for key, source in self.items()
            if _is_idle(source) and now_ms - source.unregistered_since_ms > self._limits.gone_ms
        ]
        for key in old:
            del self[key]

    def _forget_gone(self) -> bool:
        """Make room: forget the source that was made first among those that are gone."""
        gone = next((key for key, source in self.items() if _is_idle(source)), None)
        if gone is None:
            return False
        del self[gone]
        return True


def _is_idle(source: Source) -> bool:
    """Tell whether a source is gone, and no snapshot of it is requested."""
    return source.state is FollowState.GONE and source.requested_at_ms is None
