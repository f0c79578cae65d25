"""Checks of a running system: what its bounds say, and what an operator changes before they are
full.

Pure: the answers of `GET /v1/bounds` and `GET /v1/status` go in. A finding is `wrong` where work is
lost now, and `better` where it has been, or soon will be. A full history is neither: its reach
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from kvbm_common.wire.bounds import BOUNDS, HISTORIES

from kvbm_cli.doctor.finding import Finding, Level
from kvbm_cli.printing import count

NEARLY_FULL = 0.9
"""A queue or table that is fuller is worth a look before it drops."""
REACH_S: Mapping[str, tuple[float, float]] = {
    "explanations": (3_600.0, 60.0),
    "former_blocks": (3_600.0, 60.0),
    "event_stream": (900.0, 90.0),
}
"""Wanted and least reach in seconds. An operator asks about the last hour; a replica that starts
needs three intervals of index images."""
UNEXPLAINED = 0.05
MISSED_LEAST = 1_000
"""Missed blocks that a share is taken of."""
JOURNAL_DUE_S = 600.0
"""A rewrite that is tried every 5 s and has not ended well for so long will not."""


Figure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class LiveBound(msgspec.Struct, frozen=True):
    """A bound and how full it is, as the API tells it."""

    bound: str
    kind: str
    used: Figure
    size: Annotated[float, msgspec.Meta(gt=0, le=1e18)]
    dropped: Figure = 0.0
    reach_s: Figure | None = None


class LiveService(msgspec.Struct, frozen=True):
    """The bounds of one instance, as the API tells them."""

    service: str
    host: str
    instance: str
    answers: bool
    ready: bool
    reasons: list[str]
    bounds: list[LiveBound]
    missed_blocks: Figure = 0.0
    unexplained_blocks: Figure = 0.0
    journal_due_s: Figure = 0.0
    behind: Figure = 0.0
    """Sources or tiers whose events are missing."""

    @property
    def name(self) -> str:
        """Return the name in a report."""
        return f"{self.service} {self.instance} of {self.host}"

    @property
    def key(self) -> str:
        """Return the name in the reasons of the status page."""
        return f"{self.service}.{self.host}.{self.instance}"


class _Named(msgspec.Struct, frozen=True):
    """The name of a service whose other fields do not parse."""

    service: str
    host: str
    instance: str


class _Status(msgspec.Struct, frozen=True):
    """The part of the status page that is read."""

    reasons: list[str]


def services_of(answer: Any) -> list[LiveService]:
    """Return what the API has told; raises ValueError for another answer.

    A service with figures that make no sense stays, without them and not ready.
    """
    try:
        return [_service_of(one) for one in msgspec.convert(answer, list[Any])]
    except msgspec.ValidationError as error:
        raise ValueError(f"no bounds: {error}") from error


def _service_of(told: Any) -> LiveService:
    """Return one service of the answer; raises ValidationError if it has no name."""
    named = msgspec.convert(told, _Named)
    try:
        return msgspec.convert(told, LiveService)
    except msgspec.ValidationError as error:
        why = [f"its figures make no sense: {error}"]
        return LiveService(named.service, named.host, named.instance, True, False, why, [])


def reasons_of(answer: Any) -> list[str]:
    """Return why the system is not ready, from its status page; raises ValueError."""
    try:
        return msgspec.convert(answer, _Status).reasons
    except msgspec.ValidationError as error:
        raise ValueError(f"no status: {error}") from error


def examine_live(services: Sequence[LiveService], reasons: Sequence[str] = ()) -> list[Finding]:
    """Return every finding, the worst first; without any, one that says what was looked at.

    `reasons` are those of the status page: they name services that are not registered, too.
    """
    if not services:
        return [Finding("live", "wrong", "no service is registered", "Start it: kvbm up.")]
    own = tuple(f"{one.key}: " for one in services if not one.ready)
    found = [
        Finding(
            "status", "wrong", f"not ready: {reason}", "kvbm status and kvbm services say more."
        )
        for reason in reasons
        if not reason.startswith(own)
    ]
    found += [finding for one in services for finding in _of_service(one)]
    found.sort(key=lambda finding: finding.level != "wrong")
    return found or [Finding("live", "ok", looked_at(services))]


def looked_at(services: Sequence[LiveService]) -> str:
    """Return what was looked at, for a report without findings."""
    bounds = sum(len(one.bounds) for one in services)
    hosts = len({one.host for one in services})
    return (
        f"{bounds} bounds of {len(services)} services on {hosts} hosts, misses, journals and the "
        "event stream: nothing to change"
    )


def _of_service(one: LiveService) -> Iterator[Finding]:
    if not one.ready:
        why = "; ".join(one.reasons) or "it does not say why"
        state = "does not serve" if one.answers else "does not answer"
        unknown = "" if one.bounds else "; its bounds are not known"
        advice = "Its log and kvbm services say more."
        yield Finding(one.name, "wrong", f"{state}: {why}{unknown}", advice)
    elif not one.bounds:
        advice = "A service that has just started tells them in a moment; else see its log."
        yield Finding(one.name, "better", "its bounds are not known", advice)
    if one.ready and one.reasons:
        advice = "It serves what it can. Its log says more."
        yield Finding(one.name, "wrong", "; ".join(one.reasons), advice)
    if one.behind:
        found = f"{count(one.behind)} sources or tiers are behind: their blocks are not known"
        yield Finding(one.name, "wrong", found, "If it lasts, their snapshots fail: see its log.")
    for bound in one.bounds:
        yield from _of_bound(one, bound)
    if one.journal_due_s > JOURNAL_DUE_S:
        found = f"the journal waits for its rewrite for {_time(one.journal_due_s)}"
        yield Finding(one.name, "wrong", found, BOUNDS["journal"].advice)
    share = one.unexplained_blocks / one.missed_blocks if one.missed_blocks else 0.0
    if share > UNEXPLAINED and one.missed_blocks >= MISSED_LEAST:
        found = f"{share:.0%} of {count(one.missed_blocks)} missed blocks are not explained"
        advice = f"More has left than its histories hold. {HISTORIES}"
        yield Finding(one.name, "wrong", found, advice)


def _of_bound(one: LiveService, bound: LiveBound) -> Iterator[Finding]:
    assert bound.size > 0, f"{bound.bound} of {one.name} has no size"
    known = BOUNDS.get(bound.bound)
    holds = known.holds if known is not None else bound.bound
    advice = known.advice if known is not None else "docs/operating.md of its release names it."
    if bound.kind == "history":
        yield from _of_history(one, bound, holds, advice)
        return
    full = bound.used / bound.size
    if full >= NEARLY_FULL and bound.bound != "journal":  # A journal is rewritten when it is full.
        level: Level = "wrong" if full >= 1 else "better"
        found = f"{holds}: {full:.0%} full, {count(bound.used)} of {count(bound.size)}"
        yield Finding(one.name, level, found + _dropped(bound), advice)
    elif bound.dropped:
        yield Finding(one.name, "better", f"{holds}: {full:.0%} full" + _dropped(bound), advice)


def _of_history(one: LiveService, bound: LiveBound, holds: str, advice: str) -> Iterator[Finding]:
    wanted_s, least_s = REACH_S.get(bound.bound, (0.0, 0.0))
    if bound.reach_s is None or bound.reach_s >= wanted_s:
        return
    full = bound.used / bound.size
    found = f"history of {holds}: {full:.0%} full, reaches back {_time(bound.reach_s)}"
    yield Finding(one.name, "wrong" if bound.reach_s < least_s else "better", found, advice)


def _dropped(bound: LiveBound) -> str:
    return f"; {count(bound.dropped)} dropped since it began" if bound.dropped else ""


def _time(seconds: float) -> str:
    """Return a duration as an operator says it.

    >>> _time(59), _time(720), _time(7_300), _time(200_000)
    ('59 s', '12 min', '2 h', '2 days')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3_600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.0f} h" if seconds < 48 * 3_600 else f"{seconds / 86_400:.0f} days"
