"""A connector's core with a host tier, an engine and a clock around it. Blocks are small integers.

`Engine` is the outside world: it calls the core, checks every invariant after each call, keeps what
was sent, and knows which device blocks are held and which leases are out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvbm_common.identity import Namespace, SequenceHash, unpack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.consolidator import Offered, ToConsolidator
from kvbm_common.wire.local import Confirm, Found, FromHostTier, Lookup, Pulled, Release, ToHostTier
from kvbm_connectors.core.core import ConnectorCore
from kvbm_connectors.core.messages import (
    ConnectorLimits,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
    ToEvents,
    ToHost,
)

NAMESPACE = Namespace(model="test", block_tokens=4)
INCARNATION = f"{1:016x}"
EPOCH = 7
BLOCK_BYTES = 64
LIMITS = ConnectorLimits(
    lease_ms=1_000,
    onboard_deadline_ms=100,
    answer_margin_ms=50,
    offer_deadline_ms=500,
    offers_max=4,
    avoid_ms=2_000,
    avoid_max=8,
)
ANSWER_MS = LIMITS.onboard_deadline_ms + LIMITS.answer_margin_ms
LEASE_MS = LIMITS.onboard_deadline_ms + LIMITS.lease_ms

T = TypeVar("T")


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def numbers(names: Iterable[bytes]) -> list[int]:
    """Names back to numbers."""
    return [int.from_bytes(block, "big") for block in names]


def of(entries: Iterable[object], kind: type[T]) -> list[T]:
    """Those of one type."""
    return [entry for entry in entries if isinstance(entry, kind)]


def answer(
    lookup: int, count: int, *, lease: int = 0, epoch: int = EPOCH, disk: Sequence[int] = ()
) -> Found:
    """What a host tier answers: `count` blocks in slots 10, 11, …"""
    return Found(
        lookup=lookup,
        epoch=epoch,
        lease=lease or (100 + lookup if count else 0),
        slots=list(range(10, 10 + count)),
        checksums=list(range(count)),
        block_bytes=BLOCK_BYTES if count else 0,
        disk_blocks=list(disk),
    )


class Engine:
    """The core, the clock, and everybody who talks to it."""

    def __init__(self, *, attach: bool = True, limits: ConnectorLimits = LIMITS) -> None:
        self.core = ConnectorCore(
            engine="ada", incarnation=INCARNATION, namespace=NAMESPACE.digest, limits=limits
        )
        self.now_ms = 1_000
        self.to_host: list[ToHostTier] = []
        self.to_events: list[ToConsolidator] = []
        self.ended: list[OfferEnded] = []
        self.held: set[int] = set()
        """Offers for which the engine holds blocks."""
        if attach:
            self.attached()

    def took(self, effects: Sequence[Effect]) -> list[Effect]:
        """Carry effects out, and look whether all is well."""
        for effect in effects:
            match effect:
                case ToHost(message):
                    self.to_host.append(message)
                case ToEvents(message):
                    self.to_events.append(message)
                case OfferEnded(offer=offer):
                    self.held.remove(offer)  # KeyError: ended twice, or never begun.
                    self.ended.append(effect)
        self.core.check()
        return list(effects)

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass, and the core notice."""
        self.now_ms += ms
        return self.took(self.core.tick(self.now_ms))

    def attached(self, epoch: int = EPOCH, *, explains: bool = False) -> None:
        """A host tier says welcome."""
        self.took(self.core.attached(epoch, explains=explains))

    def detached(self) -> None:
        """It is silent."""
        self.took(self.core.detached())

    def idle(self) -> bool:
        """Return whether nothing is on offer, asked or leased."""
        return self.core.view.idle

    def may_leave(self) -> bool:
        """Return whether nothing is under way with the host tier."""
        return self.core.view.may_leave

    # --- onboard ----------------------------------------------------------------------------

    def look_up(
        self, *wanted: int, request: str = "r", groups: Sequence[GroupRun] = ()
    ) -> Hit | None:
        """Which of these can be had?"""
        names = [name(number) for number in wanted]
        hit, effects = self.core.lookup(request, names, self.now_ms, groups=groups)
        self.took(effects)
        return hit

    def hear(self, message: FromHostTier) -> list[Effect]:
        """The host tier says something."""
        if isinstance(message, Found):
            return self.took(self.core.found(message))
        assert isinstance(message, Pulled)
        return self.took(self.core.pulled(message))

    def found(self, *wanted: int, count: int | None = None, request: str = "r") -> Hit:
        """A lookup, its answer, and what the engine is told then."""
        assert self.look_up(*wanted, request=request) is None
        asked = self.lookups[-1]
        self.hear(answer(asked.lookup, len(wanted) if count is None else count))
        hit = self.look_up(*wanted, request=request)
        assert hit is not None
        return hit

    def take(self, *blocks: int, request: str = "r") -> Load:
        """The engine loads into these device blocks."""
        load = self.core.take(request, blocks, self.now_ms)
        self.core.check()
        return load

    def load_ended(self, load: Load, *bad: int, corrupt: Sequence[int] = ()) -> list[Effect]:
        """The worker reports; `bad` and `corrupt` are indices in the load."""
        lost = {*bad, *corrupt}
        intact = tuple(index not in lost for index in range(len(load.blocks)))
        result = LoadResult(load, intact, tuple(corrupt), "why" if lost else "")
        return self.took(self.core.load_ended(result, self.now_ms))

    def forget(self, request: str = "r") -> None:
        """Finished, aborted or preempted."""
        self.took(self.core.forget(request))

    # --- offload ----------------------------------------------------------------------------

    def offer(self, *wanted: int, priority: int = 0) -> int | None:
        """Offer a chain: block n is in device block n."""
        run = OfferRun(name(wanted[0] - 1), tuple(map(name, wanted)), wanted)
        offer, effects = self.core.offer([run], self.now_ms, priority=priority)
        if offer is not None:
            self.held.add(offer)
        self.took(effects)
        return offer

    def pulled(
        self,
        offer: int,
        count: int = 1,
        *,
        failed: int = 0,
        confirm: bool = True,
        reason: str = "",
    ) -> list[Effect]:
        """The host tier has what it wanted."""
        message = Pulled(
            offer=offer, pulled=count, skipped=0, failed=failed, reason=reason, confirm=confirm
        )
        return self.hear(message)

    def revoke(self, offer: int) -> None:
        """The engine takes its blocks back."""
        self.took(self.core.revoke(offer))

    # --- what was sent ----------------------------------------------------------------------

    @property
    def lookups(self) -> list[Lookup]:
        return of(self.to_host, Lookup)

    @property
    def released(self) -> list[int]:
        """Leases that were given back, in order."""
        return [release.lease for release in of(self.to_host, Release)]

    @property
    def confirms(self) -> list[tuple[int, bool]]:
        return [(confirm.offer, confirm.held) for confirm in of(self.to_host, Confirm)]

    @property
    def offered(self) -> list[Offered]:
        return of(self.to_events, Offered)

    def asked(self) -> list[int]:
        """The blocks of the last lookup."""
        return numbers(unpack_hashes(self.lookups[-1].hashes))
