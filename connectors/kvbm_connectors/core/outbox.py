"""The outbox of the connector's core: builds its messages and keeps its effects in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvbm_common.identity import SequenceHash, pack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.consolidator import Offered, OfferedRun
from kvbm_common.wire.local import (
    MISSES_MAX,
    Confirm,
    Lookup,
    MissedLookup,
    Misses,
    Outcome,
    Release,
)
from kvbm_common.wire.session_hint import Action, SessionHint

from kvbm_connectors.core.messages import Effect, OfferEnded, OfferRun, Origin, ToEvents, ToHost

REQUEST_CHARS_MAX = 256
"""Characters of an engine's request id: enough for people to recognise it."""
LOOKUPS_PER_MESSAGE = 64
"""Misses in one message."""
BLOCKS_PER_MESSAGE = 8_192
"""… and their blocks, unless one alone has more: the host tier explains so many in some ms."""
UNTOLD_LOOKUPS_MAX = 1_024
UNTOLD_BLOCKS_MAX = 1_048_576
"""Misses that wait for the next tick or offer; more are dropped, and counted."""


@dataclass(slots=True)
class _Miss:
    """A lookup that was answered without the host tier, which hears of it later."""

    lookup: int
    wanted: tuple[SequenceHash, ...]
    avoided: int
    request: str
    origin: Origin
    groups: tuple[GroupRun, ...]

    def message(self) -> MissedLookup:
        """Return the part of a message about this lookup."""
        return MissedLookup(
            lookup=self.lookup,
            hashes=pack_hashes(self.wanted),
            request=_text_of(self.request),
            content=self.origin.content if self.request else b"",
            avoided=self.avoided,
            trace=self.origin.trace,
            sent_us=self.origin.sent_us,
            parent=self.origin.parent,
            groups=list(self.groups),
        )


class Outbox:
    """Effects of the present step. `drain` hands them to the shell."""

    def __init__(self, *, engine: str, incarnation: str, namespace: bytes) -> None:
        assert len(namespace) == 32, len(namespace)
        self._engine, self._incarnation, self._namespace = engine, incarnation, namespace
        self._ids = count(1)
        self._effects: list[Effect] = []
        self._misses: list[_Miss] = []
        """Misses that the host tier has not been told yet."""
        self._missed_blocks = 0
        self._in_vain = 0
        """Lookups that the filter could not answer and that found nothing, not told yet."""

    def drain(self) -> list[Effect]:
        """Return the effects since the last call, oldest first."""
        effects, self._effects = self._effects, []
        return effects

    def new_id(self) -> int:
        """Return a number that no other lookup or offer of this connector has."""
        return next(self._ids)

    def ask(
        self,
        lookup: int,
        wanted: Sequence[SequenceHash],
        *,
        lease_ms: int,
        onboard_deadline_ms: int,
        avoided: int,
        request: str,
        origin: Origin,
        groups: Sequence[GroupRun] = (),
        prefill: PrefillCost | None = None,
        only_asks: bool = False,
    ) -> None:
        """Ask the host tier for a run; an empty `request` keeps the question unexplained."""
        assert wanted, f"lookup {lookup} asks for nothing"
        assert lookup > 0, f"{request}: lookup {lookup}"
        assert onboard_deadline_ms <= lease_ms, f"lookup {lookup}: its lease ends too early"
        message = Lookup(
            engine=self._engine,
            incarnation=self._incarnation,
            lookup=lookup,
            namespace=self._namespace,
            hashes=pack_hashes(wanted),
            lease_ms=lease_ms,
            deadline_ms=onboard_deadline_ms,
            request=_text_of(request),
            content=origin.content if request else b"",
            avoided=avoided,
            trace=origin.trace,
            sent_us=origin.sent_us,
            parent=origin.parent,
            groups=list(groups),
            prefill=prefill,
            only_asks=only_asks,
        )
        self._effects.append(ToHost(message))

    def miss(
        self,
        lookup: int,
        wanted: Sequence[SequenceHash],
        *,
        avoided: int,
        request: str,
        origin: Origin,
        groups: Sequence[GroupRun] = (),
    ) -> bool:
        """Keep a lookup that was answered without the host tier, to tell it soon; False: too many
        wait. What can be done later is: the engine waits for this call."""
        assert wanted, f"lookup {lookup} misses nothing"
        if len(self._misses) >= UNTOLD_LOOKUPS_MAX or self._missed_blocks >= UNTOLD_BLOCKS_MAX:
            return False
        self._misses.append(_Miss(lookup, tuple(wanted), avoided, request, origin, tuple(groups)))
        self._missed_blocks += len(wanted)
        return True

    @property
    def has_misses(self) -> bool:
        """Return whether the host tier has not heard yet of a lookup that found nothing."""
        return bool(self._misses or self._in_vain)

    def tell_misses(self) -> None:
        """Tell the host tier what has missed since the last time, in as few messages as can be."""
        if not self.has_misses:
            return
        lookups: list[MissedLookup] = []
        blocks = 0
        for miss in self._misses:
            is_full = len(lookups) == LOOKUPS_PER_MESSAGE
            if lookups and (is_full or blocks + len(miss.wanted) > BLOCKS_PER_MESSAGE):
                self._emit_misses(lookups)
                lookups, blocks = [], 0
            lookups.append(miss.message())
            blocks += len(miss.wanted)
        self._emit_misses(lookups)
        self._misses, self._missed_blocks = [], 0

    def _emit_misses(self, lookups: list[MissedLookup]) -> None:
        assert len(lookups) <= MISSES_MAX, f"{len(lookups)} misses in a message"
        message = Misses(
            engine=self._engine,
            incarnation=self._incarnation,
            namespace=self._namespace,
            lookups=lookups,
            in_vain=self._in_vain,
        )
        self._effects.append(ToHost(message))
        self._in_vain = 0

    def asked_in_vain(self) -> None:
        """Count a lookup that the filter could not answer and that found nothing."""
        self._in_vain += 1

    def drop_misses(self) -> int:
        """Drop the misses not reported yet: their host tier is gone. Returns how many."""
        count = len(self._misses)
        assert count <= UNTOLD_LOOKUPS_MAX, f"{count} misses have waited"
        self._misses, self._missed_blocks, self._in_vain = [], 0, 0
        return count

    def tell(self, request: str, lookup: int, reason: str, blocks: int) -> None:
        """Tell the host tier what became of a lookup, so that it can explain it."""
        assert blocks >= 0, f"{request}: {blocks} blocks {reason}"
        assert lookup >= 0, f"{request}: lookup {lookup}"
        message = Outcome(
            engine=self._engine,
            incarnation=self._incarnation,
            request=_text_of(request),
            lookup=lookup,
            reason=reason,
            blocks=blocks,
        )
        self._effects.append(ToHost(message))

    def release(self, lease: int, corrupt: Sequence[int] = ()) -> None:
        """Give a lease back; 0 is not a lease."""
        assert all(index >= 0 for index in corrupt), f"lease {lease}: {corrupt}"
        if lease:
            message = Release(
                engine=self._engine,
                incarnation=self._incarnation,
                lease=lease,
                corrupt=list(corrupt),
            )
            self._effects.append(ToHost(message))

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash], *, ttl_ms: int
    ) -> None:
        """Tell the host tier what an agent does next with a session."""
        assert session, f"a hint to {action} names its session"
        assert ttl_ms >= 0, f"session {session} pins for {ttl_ms} ms"
        message = SessionHint(
            engine=self._engine,
            incarnation=self._incarnation,
            namespace=self._namespace,
            session=session,
            action=action,
            hashes=pack_hashes(names),
            ttl_ms=ttl_ms,
        )
        self._effects.append(ToHost(message))

    def offer(
        self,
        offer: int,
        runs: Sequence[OfferRun],
        *,
        deadline_ms: int,
        priority: int,
        namespace: bytes = b"",
    ) -> None:
        """Offer device blocks through the consolidator; an empty namespace is the engine's."""
        assert offer > 0, f"offer {offer}"
        assert deadline_ms >= 0, f"offer {offer} waits {deadline_ms} ms"
        message = Offered(
            engine=self._engine,
            incarnation=self._incarnation,
            offer=offer,
            namespace=namespace or self._namespace,
            deadline_ms=deadline_ms,
            priority=priority,
            runs=[
                OfferedRun(
                    parent=run.parent, hashes=pack_hashes(run.hashes), blocks=list(run.blocks)
                )
                for run in runs
            ],
        )
        self._effects.append(ToEvents(message))

    def confirm(self, offer: int, *, held: bool) -> None:
        """Answer whether the blocks of an offer were held until now."""
        message = Confirm(
            engine=self._engine, incarnation=self._incarnation, offer=offer, held=held
        )
        self._effects.append(ToHost(message))

    def offer_ended(self, ended: OfferEnded) -> None:
        """Let the engine free what it offered."""
        self._effects.append(ended)


def _text_of(request: str) -> str:
    """Return a request's name for people, with "?" for lone surrogates, which JSON lets through."""
    return request[:REQUEST_CHARS_MAX].encode(errors="replace").decode()
