"""Explanations: for each lookup where its blocks came from, and why the others did not come.

The engine does not wait for this. A lookup is settled when the core takes its next input: the
answer is on its way by then, and nothing has changed in between. What only a lower tier knows (it
has filtered a block, or evicted it and by which policy) is asked for in bulk, once per tick at
most. The states of a lookup until its explanation is kept are drawn in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import msgspec
from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.reasons import OUTCOMES
from kvbm_common.wire.bounds import Usage
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
from kvbm_common.wire.local import Outcome as ConnectorOutcome

from kvbm_host_tier.core.explanation_ring import ExplanationRing
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import AskDepartures, DeparturesTold
from kvbm_host_tier.core.miss_reason import EXPLANATION, Looked, LookedState, Missed, MissReasons

OPEN_MAX = 1_024
"""Lookups that wait for a lower tier's answer; more are kept without one."""
ASKED_MAX = 1_024
"""Blocks in one question."""
ASKED_PER_LOOKUP_MAX = 256
"""Blocks of one lookup that are asked for: the first ones. Those after them went the same way."""
TOLD_WITHIN_MS = 2_000
SEGMENTS_MAX = 24
"""Segments of one lookup; what does not fit is added to the last."""


@dataclass(slots=True)
class Question:
    """A question to the lower tiers, and their answers so far."""

    looked: list[Looked]
    names: list[SequenceHash]
    until_ms: int
    waiting: set[tuple[WireTier, str]]
    told: dict[SequenceHash, list[tuple[WireTier, FateEntry]]] = field(default_factory=dict)


class Explain:
    """All lookups of one life of the tier, as far as they are kept."""

    def __init__(self, reasons: MissReasons, below: LowerTiers, means: Means) -> None:
        self.kept = ExplanationRing(means.limits.explain_requests)
        self.fresh: list[Looked] = []
        """Lookups that were answered and are not settled yet."""
        self._reasons = reasons
        self._below = below
        self._counts, self._emit = means.counts, means.emit
        self._open: deque[Looked] = deque()
        self._question: Question | None = None
        self._number = 0

    @staticmethod
    def _move(looked: Looked, event: str) -> None:
        """Move a lookup by its table; `_keep` ends it."""
        looked.state = EXPLANATION.next(looked.state, event, looked.request)

    def usage(self) -> Usage:
        """Return how full the queue of lookups is that lower tiers are to explain."""
        assert len(self._open) <= OPEN_MAX, f"{len(self._open)} lookups are open"
        return Usage(len(self._open), OPEN_MAX, self._counts["dropped.explain_open"])

    @property
    def is_settled(self) -> bool:
        """Tell whether every lookup that was answered is explained."""
        return not self.fresh and not self._open and self._question is None

    # --- outcomes ---------------------------------------------------------------------------

    def told_outcome(self, outcome: ConnectorOutcome, now_ms: int) -> None:
        """Take in what became of a lookup after its answer, or of one that was not sent."""
        assert outcome.blocks >= 0
        request = outcome.request[:REQUEST_CHARS_MAX]
        self._counts[f"unused_blocks.{_known(outcome.reason)}"] += outcome.blocks
        self._close_of(request, now_ms)
        if not outcome.lookup:
            avoided = Looked(request, outcome.engine, now_ms, (), 0, {}, "", avoided=outcome.blocks)
            self._keep(avoided, "explained")
        elif not self.kept.amend(request, outcome.engine, outcome.reason, outcome.blocks):
            self._counts["dropped.outcome_unknown"] += 1

    # --- settling ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Give every missed block of the lookups that were answered last a reason."""
        for looked in self.fresh:
            assert looked.state is LookedState.ANSWERED, looked.request
            if looked.run < len(looked.hashes):
                looked.missed = self._reasons.of(looked)
                if self._worth_asking(looked):
                    self._move(looked, "left a tier")
                    self._open.append(looked)
                    continue
            self._keep(looked, "explained")
        self.fresh.clear()

    def _worth_asking(self, looked: Looked) -> bool:
        """Tell whether a lower tier may know more, and there is room to ask."""
        if not self._below.instances() or not any(one.may_be_told for one in looked.missed):
            return False
        if len(self._open) >= OPEN_MAX:
            self._counts["dropped.explain_open"] += 1
            return False
        return True

    def tick(self, now_ms: int) -> None:
        """Ask for what is open; close a question whose answers are late."""
        if self._question is not None and now_ms >= self._question.until_ms:
            self._counts["dropped.fates_unanswered"] += len(self._question.waiting)
            self._close_question(now_ms)
        if self._question is None and self._open:
            self._ask(now_ms)

    def _ask(self, now_ms: int) -> None:
        assert self._question is None, f"question {self._number} is not answered"
        looked: list[Looked] = []
        names: dict[SequenceHash, None] = {}
        while self._open and len(names) < ASKED_MAX:
            one = self._open.popleft()
            looked.append(one)
            self._move(one, "question sent")
            wanted = [missed.hash for missed in one.missed if missed.may_be_told]
            names.update(dict.fromkeys(wanted[:ASKED_PER_LOOKUP_MAX]))
        sources = self._below.instances()
        self._question = Question(looked, list(names), now_ms + TOLD_WITHIN_MS, set(sources))
        self._number += 1
        request = FatesRequest(hashes=hashes_to_hex(names))
        for tier, instance in sources:
            self._emit(AskDepartures(self._number, instance, request, tier))
        if not sources:
            self._close_question(now_ms)

    def told(self, told: DeparturesTold, now_ms: int) -> None:
        """Take a lower tier's answer in, or that it gave no answer."""
        assert told.question <= self._number
        question = self._question
        source = (told.tier, told.instance)
        if question is None or told.question != self._number or source not in question.waiting:
            return
        question.waiting.discard(source)
        if told.reply is not None and len(told.reply.fates) == len(question.names):
            self._take(question, told.tier, told.reply)
        if not question.waiting:
            self._close_question(now_ms)

    def _take(self, question: Question, tier: WireTier, reply: FatesReply) -> None:
        assert len(question.names) == len(reply.fates)
        for name, entry in zip(question.names, reply.fates, strict=True):
            if entry.why:
                question.told.setdefault(name, []).append((tier, entry))

    def _close_question(self, now_ms: int) -> None:
        question, self._question = self._question, None
        assert question is not None, f"question {self._number} is closed already"
        for looked in question.looked:
            self._refine(looked, question, now_ms)
            self._keep(looked, "question closed")

    def _refine(self, looked: Looked, question: Question, now_ms: int) -> None:
        assert looked.state is LookedState.ASKED, looked.request
        last: Missed | None = None
        for index, one in enumerate(looked.missed):
            if not one.may_be_told:
                continue
            if one.hash in question.told:
                # The answers contain ages as of now; a tick more or less does not matter.
                last = self._reasons.refined(one, question.told[one.hash], now_ms)
                looked.missed[index] = last
            elif last is not None and index >= ASKED_PER_LOOKUP_MAX:
                looked.missed[index] = replace(last, hash=one.hash)

    # --- keeping ----------------------------------------------------------------------------

    def _keep(self, looked: Looked, why: str) -> None:
        EXPLANATION.end(looked.state, why, looked.request)
        counts = self._counts
        for one in looked.missed:
            counts[f"missed_blocks.{one.reason}"] += one.blocks
        if looked.avoided:
            counts["missed_blocks.avoided"] += looked.avoided
        self.kept.add(explanation_of(looked))

    def _close_of(self, request: str, now_ms: int) -> None:
        """Keep the open explanations of a request as they are now."""
        self.settle()
        for looked in [one for one in self._open if one.request == request]:
            self._open.remove(looked)
            self._keep(looked, "outcome told")
        question = self._question
        if question is not None and any(one.request == request for one in question.looked):
            self._close_question(now_ms)

    # --- questions --------------------------------------------------------------------------

    def find(self, request: str) -> list[Explanation]:
        """Return the explanations of a request, the newest first, open ones included."""
        request = request[:REQUEST_CHARS_MAX]
        self.settle()
        assert not self.fresh
        waiting = [*(self._question.looked if self._question else ()), *self._open]
        open_now = [explanation_of(one) for one in waiting if one.request == request]
        return open_now[::-1] + self.kept.find(request)

    def check(self) -> None:
        """Assert every invariant but those that take O(kept)."""
        assert all(one.state is LookedState.OPEN for one in self._open)
        assert len(self._open) <= OPEN_MAX
        assert self._question is None or self._question.waiting


def explanation_of(looked: Looked) -> Explanation:
    """Return the explanation of a lookup: neighbours with one reason are one segment."""
    hits, misses = _hits(looked), _misses(looked.missed)
    if looked.avoided:
        misses.append(Segment(blocks=looked.avoided, reason="avoided", detail="not asked for"))
    # A miss must not end up among hits, however often these change between the tiers.
    segments = _at_most(
        SEGMENTS_MAX // 2 if misses else SEGMENTS_MAX, hits, "from other tiers, too"
    )
    if misses:
        room = SEGMENTS_MAX - len(segments)
        segments = segments + _at_most(room, misses, "behind, each for a reason of its own")
    blocks = len(looked.hashes) + looked.avoided
    told = sum(one.blocks for one in segments)
    assert told == blocks, f"{looked.request}: {told} of {blocks} blocks are explained: {segments}"
    return Explanation(
        request=looked.request,
        engine=looked.engine,
        ts_ms=looked.at_ms,
        blocks=blocks,
        hit_blocks=looked.run,
        reason=next((one.reason for one in segments if one.reason), ""),
        segments=segments,
        trace=looked.trace.split("-")[1] if looked.trace.count("-") == 3 else "",
    )


def _at_most(count: int, segments: list[Segment], how: str) -> list[Segment]:
    """Return so many segments: the last one stands for all others."""
    assert count > 0, "no segment is allowed"
    if len(segments) <= count:
        return segments
    rest = sum(one.blocks for one in segments[count:])
    *kept, last = segments[:count]
    detail = f"{rest} of them {how}"
    return [*kept, msgspec.structs.replace(last, blocks=last.blocks + rest, detail=detail)]


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
    """Return a label for a metric: a connector's own words do not become labels."""
    return reason if reason in OUTCOMES else "other"
