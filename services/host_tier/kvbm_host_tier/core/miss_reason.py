"""The reason of each missed block, from what this host tier knows when it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby, takewhile

from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.tier.departures import Departure, Departures
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.reasons import MEANINGS
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import FateEntry, Place

from kvbm_host_tier.core.first_blocks import FirstBlocks, namespace_bits
from kvbm_host_tier.core.lower_tiers import LOWER, LowerTiers

OF_THE_RUN = (
    "no_room", "deadline", "busy", "draining", "engine_lost", "recompute_cheaper", "corrupt",
    "other_namespace", "removed", "too_long",
)  # fmt: skip
"""Reasons why a run ends that are told as they are."""
REASON_OF_DEPARTURE = {
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
"""Reason of a block's departure from a tier → the reason of its miss."""
POLICY_OF_DEPARTURE = {"guest": "guests first", "expired": "ttl", "surplus": "block limit"}
"""Why a block was evicted without an eviction policy → the policy that an explanation names."""
LAST_WORD = ("removed", "corrupt", "lost", "evicted")
"""Reasons of a lower tier that had the block itself: what host memory did before is no matter."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A missed block and the reason, or the first of `blocks` neighbours with one reason."""

    hash: SequenceHash
    reason: str
    tier: Place = ""
    at_ms: int = 0
    detail: str = ""
    policy: str = ""
    blocks: int = 1

    @property
    def kind(self) -> tuple[str, Place, str, str]:
        """Return what neighbours have in common that become one segment."""
        return (self.reason, self.tier, self.policy, self.detail)

    @property
    def may_be_told(self) -> bool:
        """Tell whether a lower tier may know more: it never had what never was in host memory."""
        return self.reason in ("evicted", "lost", "not_written")


class LookedState(Enum):
    """The states of a lookup that was answered, until its explanation is kept."""

    ANSWERED = "answered"
    OPEN = "open"
    """A lower tier might know more of the missed blocks."""
    ASKED = "asked"
    """The lower tiers are asked."""

    __hash__ = object.__hash__  # Enum's own is written in Python.


EXPLANATION = Machine(
    "explanation",
    {
        (None, "answered"): LookedState.ANSWERED,
        (LookedState.ANSWERED, "explained"): None,
        (LookedState.ANSWERED, "left a tier"): LookedState.OPEN,
        (LookedState.OPEN, "question sent"): LookedState.ASKED,
        (LookedState.OPEN, "outcome told"): None,
        (LookedState.ASKED, "question closed"): None,
    },
)


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
    """Index of a found block → the place that it came from; the others were here."""
    reason: str
    """Why the run ends, in the words of the engine's answer."""
    failed_at: Place = ""
    """The place of a failure that ended the run."""
    detail: str = ""
    """More about the reason, for people."""
    content: bytes = b""
    """Digest of the first block's tokens; see `Lookup`."""
    namespace: bytes = b""
    avoided: int = 0
    """Blocks after these that the connector did not ask for."""
    trace: str = ""
    told_later: bool = False
    """The engine has answered it by the miss filter, and tells of it some time afterwards."""
    missed: list[Missed] = field(default_factory=list)
    state: LookedState = LookedState.ANSWERED


class MissReasons:
    """The reasons of missed blocks, from the tables of this tier and of those below."""

    def __init__(
        self,
        table: SlotTable,
        departures: Departures,
        former: FormerBlocks,
        first_blocks: FirstBlocks,
        below: LowerTiers,
    ) -> None:
        self.started_ms = 0
        """The time of this life's first step: nothing older is known."""
        self._table = table
        self._departures = departures
        self._former = former
        self._first_blocks = first_blocks
        self._below = below

    def of(self, looked: Looked) -> list[Missed]:
        """Return the reasons of all blocks after the run of a lookup."""
        assert looked.run < len(looked.hashes)
        at_ms = looked.at_ms
        names = looked.hashes[looked.run :]
        twin = self._twin(looked)
        was_here = self._former.among(names)
        if self._is_unheard_of(names):
            missed = self._unheard_of(names, was_here)
        else:
            late = self._came_later(looked, names)
            missed = [
                (self._of_departure(name) if index < late else self._of_block(name, at_ms))
                or self._of_stranger(name, former=former)
                for index, (name, former) in enumerate(zip(names, was_here, strict=True))
            ]
        assert sum(one.blocks for one in missed) == len(names), f"{looked.request}: {missed}"
        first = self._of_end(looked, names[0])
        if first is None and missed[0].reason in ("never_stored", "not_remembered"):
            first = twin
        return missed if first is None else _with_first(first, missed, names)

    def _came_later(self, looked: Looked, names: Sequence[SequenceHash]) -> int:
        """Return how many of the first blocks have come since the engine missed them.

        The filter never denies what is here. So the first was not, and those after it that are
        here now have come with it: the request has computed and offered them.
        """
        if not looked.told_later:
            return 0
        assert not looked.run, f"{looked.request}: the filter has found {looked.run} blocks"
        came = takewhile(lambda name: self._table.find(name) is not None
                         or self._table.is_staging(name), names)  # fmt: skip
        return sum(1 for _ in came)

    # --- one block --------------------------------------------------------------------------

    def _is_unheard_of(self, names: Sequence[SequenceHash]) -> bool:
        """Tell, in C, whether the common case holds: no tier here has ever had any of them."""
        if not (self._departures.knows_none_of(names) and self._table.has_none_of(names)):
            return False
        return all(view.has_never_had(names) for view in self._below.views.values())

    def _unheard_of(self, names: Sequence[SequenceHash], was_here: list[bool]) -> list[Missed]:
        """Return one miss for all neighbours that were here long ago, or that never were."""
        missed: list[Missed] = []
        start = 0
        for former, run in groupby(was_here):
            count = sum(1 for _ in run)
            missed.append(self._of_stranger(names[start], former=former, blocks=count))
            start += count
        return missed

    def _of_stranger(self, name: SequenceHash, *, former: bool, blocks: int = 1) -> Missed:
        """Return the miss of a block without a story: it was here once, or never was."""
        if former:
            forgotten = [departures.forgotten_ms or 0 for departures in self._all_departures()]
            return Missed(name, "not_remembered", at_ms=max(forgotten), blocks=blocks)
        since_ms = max(self.started_ms, self._former.since_ms or 0)
        return Missed(name, "never_stored", at_ms=since_ms, blocks=blocks)

    def _of_block(self, name: SequenceHash, now_ms: int) -> Missed | None:
        """Return why a block with a story is missed; None: it has none."""
        if self._table.find(name) is not None:
            return Missed(name, "behind", "host")
        if self._table.is_staging(name):
            return Missed(name, "arriving", "host")
        for medium, view in self._below.views.items():
            if name in view:
                usable = view.source(name, now_ms) is not None
                return Missed(name, "behind" if usable else "avoided", medium)
        for medium, view in self._below.views.items():
            if view.is_away(name):
                return Missed(name, "tier_away", medium)
        return self._of_departure(name)

    def _of_departure(self, name: SequenceHash) -> Missed | None:
        """Return why a block left the tier that had it last: a lower one keeps it for longer."""
        below = self._below.views
        for medium in reversed(LOWER):
            departure = below[medium].departures.get(name)
            if departure is not None:
                return _missed_by(name, departure, medium)
        departure = self._departures.get(name)
        return _missed_by(name, departure, "host") if departure is not None else None

    def _all_departures(self) -> list[Departures]:
        return [self._departures, *(view.departures for view in self._below.views.values())]

    # --- the end of the run -----------------------------------------------------------------

    def _of_end(self, looked: Looked, name: SequenceHash) -> Missed | None:
        """Return the reason of the engine's answer; None: the block itself has a reason."""
        reason, place = looked.reason, looked.failed_at
        if reason == "not_stored":
            return None
        if reason in OF_THE_RUN:
            return Missed(name, reason, place, detail=looked.detail)
        if place == "remote":
            return Missed(name, "peer_failed", place, detail=reason)
        if reason == "gone":
            return Missed(name, "lost", place, detail=reason)
        if place:
            return Missed(name, "fill_failed", place, detail=reason)
        return Missed(name, "unknown", detail=reason)

    # --- the same tokens with another salt or namespace -------------------------------------

    def _twin(self, looked: Looked) -> Missed | None:
        """Return a miss whose first block is here under another salt or namespace, if it is."""
        if len(looked.content) != HASH_BYTES:
            return None  # The connector tells no digest of the tokens.
        first = looked.hashes[0]
        others = self._first_blocks.note(looked.content, first, looked.namespace)
        if looked.run:
            return None
        twin = next((one for one in others if self._is_here(one.name)), None)
        if twin is None:
            return None
        same = twin.namespace == namespace_bits(looked.namespace)
        return Missed(first, "salt_differs" if same else "namespace_differs", "host")

    def _is_here(self, name: SequenceHash) -> bool:
        return self._table.find(name) is not None or name in self._below

    # --- the lower tiers' answers ------------------------------------------------------------

    def refined(
        self, missed: Missed, told: Sequence[tuple[WireTier, FateEntry]], now_ms: int
    ) -> Missed:
        """Return a miss with the lower tiers' reason: the lowest that had the block decides."""
        assert missed.may_be_told
        entries = [(medium, entry, REASON_OF_DEPARTURE.get(entry.why)) for medium, entry in told]
        for medium, entry, reason in reversed(entries):
            if reason in LAST_WORD:
                departure = Departure(now_ms - entry.ago_ms, entry.why, entry.detail)
                return _missed_by(missed.hash, departure, medium)
        for medium, entry, reason in entries:
            if reason is not None and missed.tier == "host":
                left = f"left host memory by {missed.policy or 'need'}"
                detail = f"{entry.detail}; {left}" if entry.detail else left
                return replace(missed, reason=reason, tier=medium, detail=detail)
        return missed


def _with_first(first: Missed, missed: list[Missed], names: Sequence[SequenceHash]) -> list[Missed]:
    """Return the misses with another reason for the first block."""
    assert missed
    head, *tail = missed
    rest = [replace(head, hash=names[1], blocks=head.blocks - 1)] if head.blocks > 1 else []
    return [replace(first, hash=names[0]), *rest, *tail]


def _missed_by(name: SequenceHash, departure: Departure, place: Place) -> Missed:
    reason = REASON_OF_DEPARTURE.get(departure.why, "unknown")
    assert reason in MEANINGS, reason
    if reason == "evicted":
        policy = departure.detail or POLICY_OF_DEPARTURE.get(departure.why, "")
        return Missed(name, reason, place, departure.at_ms, policy=policy)
    detail = departure.why if reason == "unknown" else departure.detail
    return Missed(name, reason, place, departure.at_ms, detail)
