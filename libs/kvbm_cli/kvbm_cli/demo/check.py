"""The checks at the end of a run: nothing leaked, and the index sees what the tiers have."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from kvbm_common.config.settings import Settings
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.dumps import ask_dump
from kvbm_common.nats.jetstream import last_stored
from kvbm_common.nats.snapshots import ask_snapshot
from kvbm_common.wire.events import SUBJECT_PREFIX, Cleared, event_codec
from kvbm_common.wire.explain import (
    LIST_MAX,
    ExplainListRequest,
    Explanation,
    explain_list_reply,
    explain_list_request,
)
from kvbm_common.wire.index_verbs import HolderDump
from kvbm_common.wire.verbs import SnapshotReply, SnapshotRequest, StatsReply, verb_subject
from kvbm_connectors.sim.driver import EngineHandle

from kvbm_cli.demo.findings import (
    Difference,
    Findings,
    difference_of,
    is_under_way,
    leases_but_pins,
    leftovers_of,
)
from kvbm_cli.stack_processes import instances_of

VERB_DEADLINE_S = 5.0
QUIET_DEADLINE_S = 30.0
OPENED_DEADLINE_S = 5.0
"""Where a file system takes space at once it is milliseconds; where zeros are written, minutes."""
POLL_S = 0.05
"""The pause between two looks at a condition that no event announces, in seconds."""

Tiers = list[tuple[str, str]]
"""Kind and instance of each."""
ListTiers = Callable[[], Awaitable[Tiers]]
"""Returns the tiers that are there now; raises KvbmError."""


@dataclass(slots=True)
class Verdict:
    """The findings of the checks."""

    leases_left: int = 0
    staged_left: int = 0
    differences: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """Reasons why tiers do not serve, or take no blocks."""

    @property
    def views_consistent(self) -> bool:
        return not self.differences


class StackView:
    """Asks the services of one stack.

    With `list_tiers` it is one that others may use, too: tiers may join and leave at any time, and
    engines beside ours are no mistake.
    """

    def __init__(
        self, bus: Bus, settings: Settings, *, list_tiers: ListTiers | None = None
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._list_tiers = list_tiers
        self._seen: set[tuple[str, str]] = set()
        """The tiers that were there once."""

    @property
    def is_shared(self) -> bool:
        """Tell whether there may be engines that do not belong to this run."""
        return self._list_tiers is not None

    async def stats(self, kind: str, instance: str = "") -> StatsReply:
        """Return the stats of an instance of this host, of the first by default."""
        reply = await self._ask(kind, instance, "stats", b"{}")
        return msgspec.json.decode(reply, type=StatsReply)

    async def explanations(self, kind: str, instance: str, engine: str) -> list[Explanation]:
        """Return the lookups of one engine that a host tier has kept, the newest first."""
        found: list[Explanation] = []
        before = 0
        while True:
            request = ExplainListRequest(limit=LIST_MAX, engine=engine, before=before)
            payload = explain_list_request.encode(request)
            reply = await self._ask(kind, instance, "explain_list", payload)
            page = explain_list_reply.decode(reply)
            found += page.requests
            if not page.next:
                return found
            before = page.next

    async def snapshot(self, kind: str, instance: str = "") -> SnapshotReply:
        """Return what a tier holds by its own account."""
        source = f"{kind}-{instance or self._settings.instance}"
        ask = functools.partial(self._ask, kind, instance, "snapshot")
        return await ask_snapshot(ask, SnapshotRequest(source=source))

    async def instances(self, *kinds: str) -> Tiers:
        """Return kind and instance of every service of these kinds that is there now."""
        if self._list_tiers is not None:
            there = await self._list_tiers()
            self._seen.update(there)
            return [(kind, name) for kind, name in there if kind in kinds]
        return [(kind, name) for kind in kinds for name in instances_of(kind, self._settings)]

    async def lost(self) -> list[str]:
        """Return the tiers that are gone and have not said that they stop; raises KvbmError."""
        if self._list_tiers is None:
            return []
        there = await self._list_tiers()
        gone = [f"{kind}-{name}" for kind, name in sorted(self._seen.difference(there))]
        return [source for source in gone if await self._last_word(source) != "stop"]

    async def _last_word(self, source: str) -> str:
        """Return why a source has last said that it holds nothing; "": it has not."""
        subject = f"{SUBJECT_PREFIX}.{self._settings.host}.{source}.{Cleared.__struct_config__.tag}"
        last = await last_stored(
            self._bus, self._bus.limits.events_of(self._settings.host), subject
        )
        event = event_codec.decode(last.payload) if last is not None else None
        return event.reason if isinstance(event, Cleared) else ""

    async def dump(self) -> list[HolderDump]:
        """Return what the index holds, by holder of this host."""
        holders = await ask_dump(functools.partial(self.ask, verb_subject("index", "dump")))
        return [holder for holder in holders if holder.host == self._settings.host]

    async def _ask(self, kind: str, instance: str, verb: str, payload: bytes) -> bytes:
        settings = self._settings
        if not instance:
            found = await self.instances(kind)
            instance = found[0][1] if found else settings.instance
        subject = verb_subject(kind, verb, host=settings.host, instance=instance)
        return await self.ask(subject, payload)

    async def ask(self, subject: str, payload: bytes) -> bytes:
        """Send the request of a verb to its subject and return the reply; raises KvbmError."""
        return await self._bus.request(subject, payload, deadline_s=VERB_DEADLINE_S)


def tier_kinds(*, with_disk: bool) -> list[str]:
    """Return the kinds of tiers that a run uses."""
    return ["host-tier", *(["disk-tier"] if with_disk else []), "object-tier"]


async def wait_opened(view: StackView, kinds: Sequence[str]) -> list[str]:
    """Wait until every tier has slots, or says why not; returns what they say.

    A disk tier makes its file when the first engine has said how large blocks are. What takes
    longer than a few seconds is the check's to say.
    """
    with contextlib.suppress(DeadlineExceeded):
        opened = functools.partial(_have_opened, view, kinds)
        await wait_until(opened, "the tiers have no slots", deadline_s=OPENED_DEADLINE_S)
    return await troubles_of(view, kinds)


async def _have_opened(view: StackView, kinds: Sequence[str]) -> bool:
    for kind, instance in await view.instances(*kinds):
        stats = await view.stats(kind, instance)
        if not stats.reasons and not stats.slots.get("total"):
            return False
    return True


async def troubles_of(view: StackView, kinds: Sequence[str]) -> list[str]:
    """Return why tiers of these kinds do not serve, or take no blocks; raises KvbmError."""
    return [
        f"{kind}-{instance}: {reason}"
        for kind, instance in await view.instances(*kinds)
        for reason in (await view.stats(kind, instance)).reasons
    ]


async def wait_moved(
    view: StackView, engines: Sequence[EngineHandle], kinds: Sequence[str]
) -> bool:
    """Wait until all that the engines computed has moved; False: that did not end.

    The tiers of a shared stack may never be at rest: there only the engines are looked at.
    """
    asked = () if view.is_shared else kinds
    try:
        await wait_until(lambda: _is_quiet(view, engines, asked), "the stack is not quiet")
    except DeadlineExceeded:
        return False
    return True


async def check_stack(
    view: StackView, engines: Sequence[EngineHandle], *, with_disk: bool
) -> Verdict:
    """Wait for a quiet point, then compare every view with the index's.

    Every look asks the tiers that are there then: one that has left in order is no trouble. On a
    shared stack only the engines have to be quiet, and a finding counts if every look has it.
    """
    verdict = Verdict()
    findings = Findings(lasting=view.is_shared)
    unrest: list[str] = []
    kinds = tier_kinds(with_disk=with_disk)
    quiet = () if view.is_shared else kinds
    steps: tuple[tuple[Callable[[], Awaitable[bool]], str], ...] = (
        (lambda: _is_quiet(view, engines, quiet), "the stack is not quiet"),
        (
            lambda: _has_answered(view, engines, kinds, verdict, findings),
            "the tiers do not answer",
        ),
        (lambda: _agree(view, engines, kinds, findings), "the views differ"),
    )
    for look, trouble in steps:
        try:
            await wait_until(look, trouble)
        except DeadlineExceeded as error:
            if not findings.is_complete:  # Otherwise they say it themselves.
                unrest.append(str(error))
    verdict.leases_left, verdict.staged_left = findings.leases_left, findings.staged_left
    verdict.differences = unrest + findings.texts()
    return verdict


async def _is_quiet(view: StackView, engines: Sequence[EngineHandle], kinds: Sequence[str]) -> bool:
    for engine in engines:
        if not (await engine.stats()).idle:
            return False
    for kind, instance in await view.instances(*kinds):
        stats = await view.stats(kind, instance)
        if is_under_way(stats) or stats.slots.get("staged"):
            return False
        if kind == "host-tier" and leases_but_pins(stats):
            return False
    return True


async def _has_answered(
    view: StackView,
    engines: Sequence[EngineHandle],
    kinds: Sequence[str],
    verdict: Verdict,
    findings: Findings,
) -> bool:
    """Note what each tier has left, and why it does not serve.

    Returns False where others use the stack, and what is left may still be theirs.
    """
    findings.is_complete = False
    verdict.troubles.clear()
    own = [engine.config.name for engine in engines] if view.is_shared else None
    findings.take_leftovers(
        {
            f"{kind}-{instance}": leftovers_of(await view.stats(kind, instance), own)
            for kind, instance in await view.instances(*kinds)
        }
    )
    verdict.troubles += await troubles_of(view, kinds)
    verdict.troubles += [f"{source} is gone, and has not said why" for source in await view.lost()]
    findings.is_complete = True
    return not view.is_shared or not any(findings.leftovers.values())


async def _agree(
    view: StackView, engines: Sequence[EngineHandle], kinds: Sequence[str], findings: Findings
) -> bool:
    """Compare what each source has with what the index has of it; note what differs."""
    findings.is_complete = False
    held: dict[str, set[str]] = {}
    for holder in await view.dump():
        held.setdefault(holder.source, set()).update(holder.hashes)
    look: dict[str, Difference] = {}
    for kind, instance in await view.instances(*kinds):
        snapshot = await view.snapshot(kind, instance)
        own = {name for part in snapshot.parts for run in part.runs for name in run.hashes}
        look[snapshot.source] = difference_of(own, held.pop(snapshot.source, set()))
    for engine in engines:
        own = {name.hex() for name in await engine.dump()}
        look[engine.config.name] = difference_of(own, held.pop(engine.config.name, set()))
    if not view.is_shared:
        look |= {source: difference_of(set(), names) for source, names in held.items()}
    findings.take_differences(look)
    findings.is_complete = True
    return not any(findings.differences.values())


async def wait_until(
    condition: Callable[[], Awaitable[bool]], what: str, *, deadline_s: float = QUIET_DEADLINE_S
) -> None:
    """Look at a condition until it holds; raises DeadlineExceeded. A failed look is no answer."""
    give_up_s = time.monotonic() + deadline_s
    error: KvbmError | None = None
    while time.monotonic() < give_up_s:
        try:
            if await condition():
                return
        except KvbmError as failure:
            error = failure
        await asyncio.sleep(POLL_S)
    raise DeadlineExceeded(f"{what} after {deadline_s} s" + (f" ({error})" if error else ""))
