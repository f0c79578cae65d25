"""The connector's core: the scheduler half of every engine, without the engine.

Its parts: `attachment.py` knows which life of the host tier serves, `lookups.py` what requests
asked for and load, `offers.py` which device blocks are on offer, `outbox.py` what is to be sent.
The methods here are the inputs; each returns the effects. `view` is what shells may read.

An offer pins the engine's device blocks from `offer` until `OfferEnded`. It ends by the host
tier's `Pulled` (then `Confirm` says whether the pin had held), by its deadline, or when the host
tier is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.local import Found, Pulled
from kvbm_common.wire.session_hint import Action

from kvbm_connectors.core.attachment import Attachment
from kvbm_connectors.core.lookups import Lookups
from kvbm_connectors.core.messages import (
    UNSAID,
    ConnectorLimits,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferRun,
    Origin,
)
from kvbm_connectors.core.offers import Offers
from kvbm_connectors.core.outbox import Outbox


class ConnectorView(NamedTuple):
    """The part of the core that its shell reads between two inputs."""

    epoch: int
    """The life of the host tier that serves; 0: none, so that everything passes through."""
    takes_offers: bool
    """A consolidator is there that passes offers on."""
    idle: bool
    """Nothing is on offer, asked or leased."""
    may_rest: bool
    """No tick is needed soon: nothing is on offer, and no miss is still to be told."""
    may_leave: bool
    """Nothing is under way with the present host tier."""
    counts: Mapping[str, int]
    """Counters since the core was made, by name; they count on."""


class ConnectorCore:
    """The scheduler half's state."""

    def __init__(
        self,
        *,
        engine: str,
        incarnation: str,
        namespace: bytes,
        limits: ConnectorLimits | None = None,
    ) -> None:
        self._limits = limits or ConnectorLimits()
        self._counts: Counter[str] = Counter()
        self._takes_offers = True
        self._attachment = Attachment()
        self._outbox = Outbox(engine=engine, incarnation=incarnation, namespace=namespace)
        self._offers = Offers(self._outbox, self._limits, self._counts)
        self._lookups = Lookups(
            self._outbox, self._attachment, self._offers.lately, self._limits, self._counts
        )

    @property
    def view(self) -> ConnectorView:
        """Return what shells may read."""
        return ConnectorView(
            epoch=self._attachment.epoch,
            takes_offers=self._takes_offers,
            idle=not self._offers and not self._lookups,
            may_rest=not self._offers and not self._outbox.has_misses,
            may_leave=not self._offers and not self._lookups.under_way,
            counts=MappingProxyType(self._counts),
        )

    # --- the link ---------------------------------------------------------------------------

    def attached(self, epoch: int, *, explains: bool = False, hints: bool = False) -> list[Effect]:
        """Attach to a life of the host tier. Another life has another arena: all leases are void.

        A host tier that `explains` wants to learn what becomes of lookups; `hints`: it takes those.
        """
        assert epoch >= 0, f"a host tier lives in epoch {epoch}"
        before = self._attachment.epoch
        if epoch != before:
            self._drop_everything("host_tier_restarted" if before else "attached")
        if self._attachment.welcomed(epoch, explains=explains, hints=hints):
            self._lookups.other_arena()
        return self._outbox.drain()

    def moved(self, now_ms: int, within_ms: int) -> None:
        """Begin nothing new with this host tier: another one serves this engine."""
        assert within_ms >= 0, within_ms
        self._counts["moves"] += 1
        self._attachment.moved(now_ms + within_ms)

    def detached(self) -> list[Effect]:
        """Pass through until the host tier answers again."""
        if self._attachment.epoch:
            self._drop_everything("host_tier_lost")
        self._attachment.lost()
        assert not self._offers, "offers are held for a host tier that is gone"
        return self._outbox.drain()

    def take_offers(self, *, taken: bool) -> None:
        """Note whether a consolidator passes offers on; the host tier is not asked."""
        self._takes_offers = taken

    def _drop_everything(self, reason: str) -> None:
        if dropped := self._outbox.drop_misses():
            self._counts["misses_not_told"] += dropped
        self._lookups.host_tier_gone(reason)
        self._offers.end_all(reason)
        assert not self._offers, f"offers outlive their host tier ({reason})"

    # --- lookups ----------------------------------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        now_ms: int,
        *,
        onboard_deadline_ms: int | None = None,
        origin: Origin = UNSAID,
        groups: Sequence[GroupRun] = (),
        is_absent: bool | None = None,
        prefill: PrefillCost | None = None,
        only_asks: bool = False,
    ) -> tuple[Hit | None, list[Effect]]:
        """Return which run of these blocks can be onboarded; None: ask again.

        Idempotent: asking again with the same hashes changes nothing. Other hashes begin another
        lookup. `onboard_deadline_ms` goes before the limit of that name, for an engine that waits
        for the answer. `origin` is what only serves to explain and to trace. Of a model with
        several KV groups, `groups` says how `hashes` is cut into them. `is_absent`: the filter of
        this life says that nothing can be found, so that nothing is asked; None: it says nothing.
        `prefill` is what computing takes, to which the host tier compares loads. `only_asks`: the
        blocks are not taken, so that nothing is counted or leased.
        """
        hit = self._lookups.lookup(
            request,
            hashes,
            now_ms,
            onboard_deadline_ms=onboard_deadline_ms or self._limits.onboard_deadline_ms,
            origin=origin,
            groups=groups,
            is_absent=is_absent,
            prefill=prefill,
            only_asks=only_asks,
        )
        assert hit is None or hit.blocks <= len(hashes), self.story(request)
        return hit, self._outbox.drain()

    def found(self, found: Found) -> list[Effect]:
        """Take the host tier's answer to a lookup."""
        self._lookups.found(found)
        return self._outbox.drain()

    def take(self, request: str, blocks: Sequence[int], now_ms: int) -> Load:
        """Return the load of the first `len(blocks)` found blocks, into these device blocks.

        Raises ConnectorMisuse where that much was not found.
        """
        load = self._lookups.take(request, blocks)
        assert len(load.slots) == len(load.checksums) == len(blocks), self.story(request)
        return load

    def load_ended(self, result: LoadResult, now_ms: int) -> list[Effect]:
        """End a load: give the lease back, and do not ask again for what failed."""
        self._lookups.load_ended(result, now_ms)
        return self._outbox.drain()

    def forget(self, request: str) -> list[Effect]:
        """End a lookup that the engine does not need (finished, aborted, preempted)."""
        self._lookups.forget(request)
        return self._outbox.drain()

    # --- hints ------------------------------------------------------------------------------

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> list[Effect]:
        """Say what becomes of a session's blocks; without names, of those of its last hint."""
        if self._attachment.refusal or not self._attachment.takes_hints:
            self._counts["hints_passed_through"] += 1
            return []
        self._counts[f"hints_sent.{action}"] += 1
        self._outbox.hint(session, action, names, ttl_ms=ttl_ms)
        return self._outbox.drain()

    # --- offers -----------------------------------------------------------------------------

    def offer(
        self,
        runs: Sequence[OfferRun],
        now_ms: int,
        *,
        priority: int = 0,
        namespace: bytes = b"",
    ) -> tuple[int | None, list[Effect]]:
        """Offer device blocks. The engine holds them until `OfferEnded`; None: do not hold.

        `namespace` is the digest of their KV group's; empty: the engine's.
        """
        if self._attachment.refusal or not self._takes_offers:
            self._counts["offers_passed_through"] += sum(len(run.hashes) for run in runs)
            return None, []
        self._outbox.tell_misses()  # Before the blocks come that were missed.
        offer = self._offers.offer(runs, now_ms, priority=priority, namespace=namespace)
        return offer, self._outbox.drain()

    def pulled(self, pulled: Pulled) -> list[Effect]:
        """End an offer that the host tier has read, and confirm that its blocks were held."""
        self._offers.pulled(pulled)
        return self._outbox.drain()

    def revoke(self, offer: int, reason: str = "revoked") -> list[Effect]:
        """End an offer whose blocks the engine reuses now: a pull would be worthless."""
        self._offers.revoke(offer, reason)
        return self._outbox.drain()

    # --- time -------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Effect]:
        """End offers whose deadline has passed; forget what is too old to matter."""
        self._offers.tick(now_ms)
        if self._attachment.is_out_of_time(now_ms):
            self._drop_everything("moved")
        self._lookups.tick(now_ms)
        self._outbox.tell_misses()
        return self._outbox.drain()

    def story(self, request: str) -> list[str]:
        """Return the last moves of a request's lookups, newest last."""
        return self._lookups.story(request)

    def check(self) -> None:
        """Assert every invariant of the core."""
        self._attachment.check()
        self._lookups.check()
        self._offers.check()
        if not self._attachment.epoch:
            assert not self._offers, "offers without a host tier"
