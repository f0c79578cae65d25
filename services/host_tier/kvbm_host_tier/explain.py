"""Explain: of each lookup where its blocks came from, and why the others did not.

    answered --settle--> every missed block has a reason
                            |-- none left a tier of ours ----------------------> kept
                            |-- some did, and a lower tier might know more:
                            |        OPEN --tick--> asked --told, or late----> kept

The engine does not wait for this. A lookup is settled when the core takes its next input: the
answer is on its way by then, and nothing has changed in between. What only a lower tier knows (it
has filtered a block, or evicted it and by which policy) is asked for in bulk, once per tick at
most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.reasons import OUTCOMES
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import (
    REQUEST_CHARS_MAX,
    Explanation,
    FateEntry,
    FatesReply,
    FatesRequest,
    Place,
    Segment,
)
from kvbm_common.wire.local import Lookup
from kvbm_common.wire.local import Outcome as ConnectorOutcome

from kvbm_host_tier.kept import KeptRequests
from kvbm_host_tier.messages import AskFates, FatesTold
from kvbm_host_tier.reason_of import Looked, Missed, Reasons
from kvbm_host_tier.tier import Tier

OPEN_MAX = 1_024
"""Lookups that wait for a lower tier's word; beyond that they go without."""
ASKED_MAX = 1_024
"""Blocks in one question."""
ASKED_PER_LOOKUP_MAX = 256
"""Of a long run that has left, the first blocks are asked for; those behind went the same way."""
TOLD_WITHIN_MS = 2_000
SEGMENTS_MAX = 24
"""Of one lookup; what does not fit is added to the last."""


@dataclass(slots=True)
class Question:
    """What lower tiers were asked, and what they have said."""

    looked: list[Looked]
    names: list[SequenceHash]
    until_ms: int
    waiting: set[tuple[WireTier, str]]
    told: dict[SequenceHash, list[tuple[WireTier, FateEntry]]] = field(default_factory=dict)


class Explain:
    """All lookups of one life of the tier, as far as they are kept."""

    def __init__(self, tier: Tier) -> None:
        self.kept = KeptRequests(tier.limits.explain_requests)
        self._tier = tier
        self._reasons = Reasons(tier)
        self._fresh: list[Looked] = []
        self._open: deque[Looked] = deque()
        self._question: Question | None = None
        self._number = 0

    # --- what has happened ------------------------------------------------------------------

    def answered(self, looked: Looked) -> None:
        """A lookup has its answer."""
        self._fresh.append(looked)

    def refused(self, lookup: Lookup, hashes: list[SequenceHash], reason: str, now_ms: int) -> None:
        """Nothing was looked for."""
        self.answered(
            Looked(
                lookup.request[:REQUEST_CHARS_MAX], lookup.engine, now_ms, hashes, 0, {}, reason,
                avoided=lookup.avoided, trace=lookup.trace,
            )
        )  # fmt: skip

    def told_outcome(self, outcome: ConnectorOutcome, now_ms: int) -> None:
        """A connector says what became of a lookup after its answer, or of one it did not send."""
        request = outcome.request[:REQUEST_CHARS_MAX]
        self._tier.counts[f"unused_blocks.{_known(outcome.reason)}"] += outcome.blocks
        self._close_of(request)
        if not outcome.lookup:
            self._keep(
                Looked(request, outcome.engine, now_ms, (), 0, {}, "", avoided=outcome.blocks)
            )
        elif not self.kept.amend(request, outcome.engine, outcome.reason, outcome.blocks):
            self._tier.counts["dropped.outcome_unknown"] += 1

    # --- settling ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Give every missed block of the fresh lookups a reason."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        for looked in fresh:
            if looked.run < len(looked.hashes):
                looked.missed = self._reasons.of(looked)
                if self._worth_asking(looked):
                    self._open.append(looked)
                    continue
            self._keep(looked)

    def _worth_asking(self, looked: Looked) -> bool:
        """Would a lower tier know more?"""
        if not self._tier.below.instances() or not any(one.may_be_told for one in looked.missed):
            return False
        if len(self._open) >= OPEN_MAX:
            self._tier.counts["dropped.explain_open"] += 1
            return False
        return True

    def tick(self, now_ms: int) -> None:
        """Ask for what is open; take what was told until now when it is late."""
        if self._question is not None and now_ms >= self._question.until_ms:
            self._tier.counts["dropped.fates_unanswered"] += len(self._question.waiting)
            self._close_question()
        if self._question is None and self._open:
            self._ask(now_ms)

    def _ask(self, now_ms: int) -> None:
        looked: list[Looked] = []
        names: dict[SequenceHash, None] = {}
        while self._open and len(names) < ASKED_MAX:
            one = self._open.popleft()
            looked.append(one)
            wanted = [missed.hash for missed in one.missed if missed.may_be_told]
            names.update(dict.fromkeys(wanted[:ASKED_PER_LOOKUP_MAX]))
        sources = self._tier.below.instances()
        self._question = Question(looked, list(names), now_ms + TOLD_WITHIN_MS, set(sources))
        self._number += 1
        request = FatesRequest(hashes=hashes_to_hex(names))
        for tier, instance in sources:
            self._tier.emit(AskFates(self._number, instance, request, tier))
        if not sources:
            self._close_question()

    def told(self, told: FatesTold) -> None:
        """A lower tier has answered; None: it has not."""
        question = self._question
        source = (told.tier, told.instance)
        if question is None or told.question != self._number or source not in question.waiting:
            return
        question.waiting.discard(source)
        if told.reply is not None and len(told.reply.fates) == len(question.names):
            self._take(question, told.tier, told.reply)
        if not question.waiting:
            self._close_question()

    def _take(self, question: Question, tier: WireTier, reply: FatesReply) -> None:
        for name, entry in zip(question.names, reply.fates, strict=True):
            if entry.why:
                question.told.setdefault(name, []).append((tier, entry))

    def _close_question(self) -> None:
        question, self._question = self._question, None
        assert question is not None
        for looked in question.looked:
            self._refine(looked, question)
            self._keep(looked)

    def _refine(self, looked: Looked, question: Question) -> None:
        last: Missed | None = None
        for index, one in enumerate(looked.missed):
            if not one.may_be_told:
                continue
            if one.hash in question.told:
                # The times that are told are ages as of now; a tick more or less is nothing.
                last = self._reasons.refined(one, question.told[one.hash], self._tier.now_ms)
                looked.missed[index] = last
            elif last is not None and index >= ASKED_PER_LOOKUP_MAX:
                looked.missed[index] = replace(last, hash=one.hash)

    # --- keeping ----------------------------------------------------------------------------

    def _keep(self, looked: Looked) -> None:
        counts = self._tier.counts
        for one in looked.missed:
            counts[f"missed_blocks.{one.reason}"] += one.blocks
        if looked.avoided:
            counts["missed_blocks.avoided"] += looked.avoided
        self.kept.add(explanation_of(looked))

    def _close_of(self, request: str) -> None:
        """Keep what is still open of a request, as far as it is known."""
        self.settle()
        for looked in [one for one in self._open if one.request == request]:
            self._open.remove(looked)
            self._keep(looked)
        question = self._question
        if question is not None and any(one.request == request for one in question.looked):
            self._close_question()

    # --- questions --------------------------------------------------------------------------

    def find(self, request: str) -> list[Explanation]:
        """The lookups of a request, the newest first, those that are open included."""
        request = request[:REQUEST_CHARS_MAX]
        self.settle()
        waiting = [*(self._question.looked if self._question else ()), *self._open]
        open_now = [explanation_of(one) for one in waiting if one.request == request]
        return open_now[::-1] + self.kept.find(request)

    def check(self) -> None:
        """Assert every invariant but those that take O(kept)."""
        assert len(self._open) <= OPEN_MAX
        assert self._question is None or self._question.waiting


def explanation_of(looked: Looked) -> Explanation:
    """The same for the wire: neighbours with one fate are one segment."""
    segments = _hits(looked) + _misses(looked.missed)
    if looked.avoided:
        segments.append(Segment(blocks=looked.avoided, reason="avoided", detail="not asked for"))
    if len(segments) > SEGMENTS_MAX:
        rest = sum(one.blocks for one in segments[SEGMENTS_MAX:])
        kept = segments[:SEGMENTS_MAX]
        kept[-1] = Segment(
            blocks=kept[-1].blocks + rest, tier=kept[-1].tier, reason=kept[-1].reason,
            hash=kept[-1].hash, policy=kept[-1].policy, at_ms=kept[-1].at_ms,
            detail=f"{rest} of them behind, each for a reason of its own",
        )  # fmt: skip
        segments = kept
    return Explanation(
        request=looked.request,
        engine=looked.engine,
        ts_ms=looked.at_ms,
        blocks=len(looked.hashes) + looked.avoided,
        hit_blocks=looked.run,
        reason=next((one.reason for one in segments if one.reason), ""),
        segments=segments,
        trace=looked.trace.split("-")[1] if looked.trace.count("-") == 3 else "",
    )


def _hits(looked: Looked) -> list[Segment]:
    if not looked.places:
        here = Segment(blocks=looked.run, tier="host")
        return [here] if looked.run else []
    places: Iterable[Place] = (looked.places.get(index, "host") for index in range(looked.run))
    return [Segment(blocks=len(list(group)), tier=place) for place, group in groupby(places)]


def _misses(missed: Sequence[Missed]) -> list[Segment]:
    segments: list[Segment] = []
    for _, group in groupby(missed, key=lambda one: one.kind):
        first, *others = group
        segments.append(
            Segment(
                blocks=first.blocks + sum(one.blocks for one in others),
                tier=first.tier,
                reason=first.reason,
                hash=first.hash.hex(),
                policy=first.policy,
                at_ms=first.at_ms,
                detail=first.detail,
            )
        )
    return segments


def _known(reason: str) -> str:
    """A label of a metric: a connector's own words do not become one."""
    return reason if reason in OUTCOMES else "other"
