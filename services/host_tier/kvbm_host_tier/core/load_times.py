"""The times of loads: what bringing bytes to host memory takes, by the medium that has them.

A load (a fill from a lower tier, a pull from a peer) is measured from when it is asked for, with
the bytes of its medium that were under way before it: it had to wait for those. So the line of a
medium holds for any queue. A load that is late counts as so long, as it may never end.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.cost_line import Estimate, Line

from kvbm_host_tier.core.open_lookup import Medium

UNKNOWN = Estimate(0.0, 0.0)
"""The estimate for a medium without enough loads: they are made, as if they took no time."""


@dataclass(eq=False, slots=True)
class Loading:
    """A load under way."""

    medium: Medium
    size: int
    queued: int
    """Its bytes, and those of its medium that were under way when it was asked for."""
    began_ms: int


@dataclass(slots=True)
class Traffic:
    """The loads of one medium: those that have ended as a line, and those under way."""

    line: Line
    under_way: dict[Loading, None]
    """The oldest first."""
    queued: int = 0
    """Bytes under way."""
    took_ms: int = 0
    """The duration of the last load that has ended."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected time of the next load from a medium."""

    estimate: Estimate
    queued: int
    """Bytes under way before it."""
    least_ms: float
    """The time that the oldest load under way has taken by now: the next one will hardly be
    faster."""

    def ms(self, size: int) -> float:
        """Return how long a load of so many bytes takes to come."""
        assert size >= 0, f"a load of {size} bytes"
        return max(self.least_ms, self.estimate.ms(self.queued + size))


class LoadTimes:
    """The loads of every medium. Each call takes constant time."""

    def __init__(self) -> None:
        self._media: dict[Medium, Traffic] = {}

    def begin(self, medium: Medium, size: int, now_ms: int) -> Loading:
        """Begin to measure a load."""
        assert size > 0, f"a load from {medium} has bytes"
        traffic = self._media.setdefault(medium, Traffic(Line(), {}))
        traffic.queued += size
        loading = Loading(medium, size, traffic.queued, now_ms)
        traffic.under_way[loading] = None
        return loading

    def end(self, loading: Loading, now_ms: int, *, counts: bool) -> None:
        """End a load; it `counts` if all of it has come, or it was late. What fails at once tells
        nothing."""
        assert now_ms >= loading.began_ms, f"{loading} ends at {now_ms}"
        traffic = self._media[loading.medium]
        assert loading in traffic.under_way, f"{loading} has ended twice"
        del traffic.under_way[loading]
        traffic.queued -= loading.size
        assert traffic.queued >= 0, f"{traffic.queued} bytes of {loading.medium} are under way"
        if counts:
            traffic.took_ms = now_ms - loading.began_ms
            traffic.line.observe(loading.queued, traffic.took_ms, now_ms)

    def outlook(self, medium: Medium, now_ms: int) -> Outlook:
        """Return what the next load of a medium will take."""
        traffic = self._media.get(medium)
        if traffic is None:
            return Outlook(UNKNOWN, 0, 0.0)
        oldest = next(iter(traffic.under_way), None)
        assert oldest is None or oldest.began_ms <= now_ms, f"{oldest} at {now_ms}"
        least_ms = 0.0 if oldest is None else float(now_ms - oldest.began_ms)
        estimate = traffic.line.estimate() if traffic.line.is_known else UNKNOWN
        return Outlook(estimate, traffic.queued, least_ms)

    def is_due(
        self, medium: Medium, now_ms: int, *, share: int, within_ms: tuple[int, int]
    ) -> bool:
        """Tell whether a medium that is left has to be tried again. One whose last load was a
        surprise is tried at once: two more tell whether it has changed."""
        traffic = self._media.get(medium)
        if traffic is None or traffic.under_way or not traffic.line.loads:
            return False
        if traffic.line.surprises:
            return True
        least_ms, most_ms = within_ms
        pause_ms = min(max(least_ms, share * traffic.took_ms), most_ms)
        return now_ms - traffic.line.last_ms >= pause_ms

    def figures(self) -> dict[str, float]:
        """Return the estimates, for metrics."""
        figures: dict[str, float] = {}
        for medium, traffic in self._media.items():
            figures[f"load_queued_bytes.{medium}"] = float(traffic.queued)
            if traffic.line.is_known:
                estimate = traffic.line.estimate()
                figures[f"load_estimate_start_ms.{medium}"] = estimate.start_ms
                figures[f"load_estimate_ms_per_mib.{medium}"] = estimate.ms_per_byte * 2**20
        return figures

    def check(self) -> None:
        """Assert that the bytes queued are those of the loads under way."""
        for medium, traffic in self._media.items():
            sizes = sum(loading.size for loading in traffic.under_way)
            assert sizes == traffic.queued, f"{medium}: {sizes} of {traffic.queued} bytes"
