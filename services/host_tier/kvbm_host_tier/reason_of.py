"""The reason of each missed block, from what this host tier knows when it answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbm_common.fates import Fate, Fates
from kvbm_common.identity import SequenceHash
from kvbm_common.reasons import MEANINGS
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import FateEntry, Place

from kvbm_host_tier.lower_tiers import LOWER
from kvbm_host_tier.tier import Tier

CONTENTS_MAX = 65_536
"""First blocks whose tokens are remembered, to see that only salt or namespace differ."""
NAMES_MAX = 4
"""Of one such block: tenants who begin with the same tokens."""
OF_THE_RUN = (
    "no_room", "deadline", "busy", "draining", "engine_lost", "recompute_cheaper",
)  # fmt: skip
"""Why a run ends that are reasons as they are."""
REASON_OF_FATE = {
    "evicted": "evicted",
    "guest": "evicted",
    "expired": "evicted",
    "surplus": "evicted",
    "duplicate": "lost",
    "corrupt": "corrupt",
    "gone": "lost",
    "reformatted": "lost",
    "admin": "removed",
    "resized": "removed",
    "filtered": "filtered",
    "waiting": "not_written",
    "not_written": "not_written",
    "offload": "offload_failed",
}
"""What tiers say has become of a block → why it is missed."""
POLICY_OF_FATE = {"guest": "guests first", "expired": "ttl", "surplus": "block limit"}
"""What chose an evicted block, where it was no eviction policy."""
LAST_WORD = ("removed", "corrupt", "lost", "evicted")
"""A block that a lower tier had itself: what host memory did with it before does not matter."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A missed block and why, or neighbours of one fate, of which it is the first."""

    hash: SequenceHash
    reason: str
    tier: Place = ""
    at_ms: int = 0
    detail: str = ""
    policy: str = ""
    blocks: int = 1

    @property
    def kind(self) -> tuple[str, Place, str, str]:
        """Neighbours that have this in common are told together."""
        return (self.reason, self.tier, self.policy, self.detail)

    @property
    def may_be_told(self) -> bool:
        """May a lower tier know more of it? It never had what never was in host memory."""
        return self.reason in ("evicted", "lost", "not_written")


@dataclass(slots=True)
class Looked:
    """A lookup that was answered: what its explanation is made of."""

    request: str
    engine: str
    at_ms: int
    hashes: Sequence[SequenceHash]
    run: int
    """Blocks that were found."""
    places: Mapping[int, Place]
    """Where they came from, by index; the others were here."""
    reason: str
    """Why the run ends there, as the engine was told."""
    failed_at: Place = ""
    """Where that was, if something failed."""
    content: bytes = b""
    """Digest of the first block's tokens; see `Lookup`."""
    namespace: bytes = b""
    avoided: int = 0
    """Blocks behind these that the connector did not ask for."""
    trace: str = ""
    missed: list[Missed] = field(default_factory=list)


class Reasons:
    """Finds them."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._contents: OrderedDict[bytes, dict[SequenceHash, bytes]] = OrderedDict()
        """Digest of a first block's tokens → names that it has, each with its namespace."""

    def of(self, looked: Looked) -> list[Missed]:
        """The blocks behind the run, all of them."""
        assert looked.run < len(looked.hashes)
        names = looked.hashes[looked.run :]
        twin = self._twin(looked)
        if self._is_unheard_of(names):
            missed = [self._unheard_of(names)]
        else:
            missed = [self._of_block(name) for name in names]
        first = self._of_end(looked, names[0])
        if first is None and missed[0].reason in ("never_stored", "not_remembered"):
            first = twin
        return missed if first is None else _with_first(first, missed, names)

    # --- one block --------------------------------------------------------------------------

    def _is_unheard_of(self, names: Sequence[SequenceHash]) -> bool:
        """The common case, in C: nobody here has ever had any of them."""
        tier = self._tier
        if not (tier.fates.knows_none_of(names) and tier.table.has_none_of(names)):
            return False
        return all(view.has_never_had(names) for view in tier.below.views.values())

    def _unheard_of(self, names: Sequence[SequenceHash]) -> Missed:
        since = [fates.forgotten_ms for fates in self._all_fates()]
        forgotten = [at_ms for at_ms in since if at_ms is not None]
        reason = "not_remembered" if forgotten else "never_stored"
        since_ms = max(forgotten, default=self._tier.started_ms)
        return Missed(names[0], reason, at_ms=since_ms, blocks=len(names))

    def _of_block(self, name: SequenceHash) -> Missed:
        tier = self._tier
        if tier.table.find(name) is not None:
            return Missed(name, "behind", "host")
        if tier.table.is_staging(name):
            return Missed(name, "arriving", "host")
        for medium, view in tier.below.views.items():
            if name in view:
                usable = view.usable(name, tier.now_ms)
                return Missed(name, "behind" if usable else "avoided", medium)
        for medium, view in tier.below.views.items():
            if view.is_away(name):
                return Missed(name, "tier_away", medium)
        return self._of_fate(name) or self._unheard_of([name])

    def _of_fate(self, name: SequenceHash) -> Missed | None:
        """Where it was last: a lower tier has a block for longer than we have."""
        below = self._tier.below.views
        for medium in reversed(LOWER):
            fate = below[medium].fates.get(name)
            if fate is not None:
                return _missed_by(name, fate, medium)
        fate = self._tier.fates.get(name)
        return _missed_by(name, fate, "host") if fate is not None else None

    def _all_fates(self) -> list[Fates]:
        return [self._tier.fates, *(view.fates for view in self._tier.below.views.values())]

    # --- the end of the run -----------------------------------------------------------------

    def _of_end(self, looked: Looked, name: SequenceHash) -> Missed | None:
        """What the engine was told; None: the block is not here, which has a story of its own."""
        reason, place = looked.reason, looked.failed_at
        if reason == "not_stored":
            return None
        if reason in OF_THE_RUN:
            return Missed(name, reason, place)
        if reason == "corrupt":
            return Missed(name, reason, place)
        if place == "remote":
            return Missed(name, "peer_failed", place, detail=reason)
        if reason == "gone":
            return Missed(name, "lost", place, detail=reason)
        if place:
            return Missed(name, "fill_failed", place, detail=reason)
        return Missed(name, "unknown", detail=reason)

    # --- the same tokens under another name -------------------------------------------------

    def _twin(self, looked: Looked) -> Missed | None:
        """Is the first block here under another salt or namespace?"""
        if not looked.content:
            return None
        first = looked.hashes[0]
        names = self._contents.setdefault(looked.content, {})
        self._contents.move_to_end(looked.content)
        twins = (one for name, one in names.items() if name != first and self._is_here(name))
        namespace = next(twins, None)
        names.pop(first, None)
        names[first] = looked.namespace
        if len(names) > NAMES_MAX:
            del names[next(iter(names))]
        if len(self._contents) > CONTENTS_MAX:
            self._contents.popitem(last=False)
        if namespace is None or looked.run:
            return None
        same = namespace == looked.namespace
        return Missed(first, "salt_differs" if same else "namespace_differs", "host")

    def _is_here(self, name: SequenceHash) -> bool:
        return self._tier.table.find(name) is not None or name in self._tier.below

    # --- what lower tiers tell --------------------------------------------------------------

    def refined(
        self, missed: Missed, told: Sequence[tuple[WireTier, FateEntry]], now_ms: int
    ) -> Missed:
        """What they say of a block that has left us: the lowest that had it has the last word."""
        entries = [(medium, entry, REASON_OF_FATE.get(entry.why)) for medium, entry in told]
        for medium, entry, reason in reversed(entries):
            if reason in LAST_WORD:
                fate = Fate(now_ms - entry.ago_ms, entry.why, entry.detail)
                return _missed_by(missed.hash, fate, medium)
        for medium, entry, reason in entries:
            if reason is not None and missed.tier == "host":
                left = f"left host memory by {missed.policy or 'need'}"
                detail = f"{entry.detail}; {left}" if entry.detail else left
                return replace(missed, reason=reason, tier=medium, detail=detail)
        return missed


def _with_first(first: Missed, missed: list[Missed], names: Sequence[SequenceHash]) -> list[Missed]:
    """The same, but the first block has another fate."""
    head, *tail = missed
    rest = [replace(head, hash=names[1], blocks=head.blocks - 1)] if head.blocks > 1 else []
    return [replace(first, hash=names[0]), *rest, *tail]


def _missed_by(name: SequenceHash, fate: Fate, place: Place) -> Missed:
    reason = REASON_OF_FATE.get(fate.why, "unknown")
    assert reason in MEANINGS, reason
    if reason == "evicted":
        policy = fate.detail or POLICY_OF_FATE.get(fate.why, "")
        return Missed(name, reason, place, fate.at_ms, policy=policy)
    detail = fate.why if reason == "unknown" else fate.detail
    return Missed(name, reason, place, fate.at_ms, detail)
