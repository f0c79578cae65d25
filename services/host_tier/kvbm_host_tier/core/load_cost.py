"""Load cost: the choice, for each run, which blocks to load and which to leave to the engine.

The engine's connector measures its prefill and reports the cost in each lookup (`prefill_cost.py`);
an operator may configure it instead (KVBM_RECOMPUTE_TOKENS_PER_S). The times of loads are measured
here (`load_times.py`). A hit is a prefix, and the engine computes the rest only after the hit has
arrived. So the run ends after the last block that saves more time than its load takes.

Without measurements a load is made and measured. A medium that was slower is tried again: when no
load from it has ended for a while, the first blocks that were left out are loaded all the same. The
lookup does not wait for them, so a try costs a small read and delays no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.tier.slots import SlotTable

from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.load_times import LoadTimes, Outlook
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.open_lookup import Medium, OpenLookup
from kvbm_host_tier.core.waiting_lookups import WaitingLookups

TRY_SHARE = 10
"""The pause between two tries of a slower medium, in multiples of a try's duration."""
TRY_MS = (200, 5_000)
"""The shortest and the longest pause between two tries."""
EXPLORED_BLOCKS = (4, 16)
"""Sizes of tries, in turn: with two sizes the fixed part of a load's time is known."""
FAVOUR = 1.1
"""The factor by which the last choice for a medium and a length must be dearer to be changed."""
NO_LOOKUP = (0, 0)
"""The lookup that waits for blocks of a try: a number that no lookup has."""


@dataclass(slots=True)
class Choice:
    """The chosen end of a run, with which the engine has all of its prompt soonest."""

    end: int
    comes_ms: float = 0.0
    """The time in which all wanted blocks would arrive."""
    compute_ms: float = 0.0
    """The time in which the engine would compute them."""


class LoadCost:
    """The decisions, and the last one for each medium and length."""

    def __init__(
        self,
        table: SlotTable,
        below: LowerTiers,
        waiting: WaitingLookups,
        times: LoadTimes,
        means: Means,
    ) -> None:
        assert means.limits.recompute_tokens_per_s >= 0
        self._table = table
        self._below = below
        self._waiting = waiting
        self._times = times
        self._counts = means.counts
        self._is_on = means.limits.load_or_compute
        speed = means.limits.recompute_tokens_per_s
        self._said = PrefillCost(max(1, round(1e9 / speed))) if speed else None
        self._left: set[tuple[Medium, int]] = set()
        """Medium and length (its number of bits) of runs that were last left to compute."""
        self._tries = 0

    def cut(
        self, lookup: OpenLookup, fills: Sequence[SequenceHash], now_ms: int
    ) -> list[SequenceHash]:
        """Cut the run where the rest is computed sooner; return the blocks to load.

        Some of them may lie after the run's end: a try, to be measured.
        """
        cost = self._cost_of(lookup)
        if cost is None or None not in lookup.slots:
            return list(fills)
        first = lookup.slots.index(None)
        assert first < lookup.run_blocks == len(lookup.slots), lookup.owner
        medium = self._medium_of(lookup.hashes[first], lookup, now_ms)
        key = medium, (lookup.run_blocks - first).bit_length()
        wanted = frozenset(fills)
        favour = 1 / FAVOUR if key in self._left else FAVOUR
        looks = _Looks(self._times, now_ms)
        choice = self._choose(lookup, first, wanted, cost, looks, favour)
        assert first <= choice.end <= lookup.run_blocks, f"{lookup.owner}: {choice} from {first}"
        if choice.end == lookup.run_blocks:
            self._left.discard(key)
            return list(fills)
        if choice.end == first:
            self._left.add(key)
        left = [name for name in lookup.hashes[choice.end : lookup.run_blocks] if name in wanted]
        place = self._medium_of(lookup.hashes[choice.end], lookup, now_ms)
        self._count(lookup, choice, place, looks.of(place))
        lookup.cut(choice.end, "recompute_cheaper", self._table, place)
        lookup.detail = (
            f"{choice.comes_ms:.0f} ms to come, {choice.compute_ms:.0f} ms to compute, "
            f"{looks.of(place).queued >> 20} MiB under way"
        )
        after_end = set(left)
        return [name for name in fills if name not in after_end] + self._tried(left, place, now_ms)

    def _cost_of(self, lookup: OpenLookup) -> PrefillCost | None:
        """Return what the engine takes to compute; None: its blocks are brought."""
        if not lookup.block_tokens:
            return None  # An operator wants them.
        if self._said is not None or not self._is_on:
            return self._said
        said = lookup.asked.prefill if lookup.asked is not None else None
        return said if said is not None and said.is_valid else None

    def _choose(
        self,
        lookup: OpenLookup,
        first: int,
        wanted: frozenset[SequenceHash],
        cost: PrefillCost,
        looks: _Looks,
        favour: float,
    ) -> Choice:
        """Return the end of the run that saves most; of a plan over KV groups, none or all."""
        size, tokens = lookup.block_bytes, lookup.block_tokens
        assert size > 0 or not wanted, f"{lookup.owner} waits for blocks of no size"
        assert tokens > 0, f"{lookup.owner} computes blocks of no tokens"
        sizes: Counter[Medium] = Counter()
        comes_ms = most = 0.0
        choice = Choice(first)
        begin = first * tokens
        for index in range(first, lookup.run_blocks):
            if lookup.slots[index] is None:
                name = lookup.hashes[index]
                medium = self._medium_of(name, lookup, looks.now_ms)
                sizes[medium] += size if name in wanted else 0
                comes_ms = max(comes_ms, looks.of(medium).ms(sizes[medium]))
            copied_ms = cost.copy_ms((index + 1 - first) * size)
            choice.compute_ms = cost.compute_ms(begin, (index + 1) * tokens)
            choice.comes_ms = comes_ms + copied_ms
            saved = favour * choice.compute_ms - choice.comes_ms
            if saved >= most and (lookup.plan is None or index + 1 == lookup.run_blocks):
                most, choice.end = saved, index + 1
        return choice

    def _medium_of(self, name: SequenceHash, lookup: OpenLookup, now_ms: int) -> Medium:
        source = self._below.source(name, now_ms, lookup.namespaces)
        return "remote" if source is None else source[0]

    def _count(self, lookup: OpenLookup, choice: Choice, place: Medium, look: Outlook) -> None:
        """Count what is left, by its medium and by why that takes longer."""
        left = lookup.run_blocks - choice.end
        assert left > 0, f"{lookup.owner}: {choice} leaves nothing"
        size = left * lookup.block_bytes
        alone_ms = look.estimate.ms(size)
        why = "slow" if alone_ms > choice.compute_ms else "queued"
        if look.least_ms > look.estimate.ms(look.queued + size):
            why = "stalled"
        self._counts["declined_blocks"] += left
        self._counts[f"left_to_compute_blocks.{place}.{why}"] += left

    def _tried(
        self, left: Sequence[SequenceHash], medium: Medium, now_ms: int
    ) -> list[SequenceHash]:
        """Return the blocks that are brought to measure a medium. No lookup waits for them."""
        count = EXPLORED_BLOCKS[self._tries % len(EXPLORED_BLOCKS)]
        if not left or not self._times.is_due(medium, now_ms, share=TRY_SHARE, within_ms=TRY_MS):
            return []
        self._tries += 1
        tried = list(left[:count])
        assert all(not self._table.is_staging(name) for name in tried), f"{medium} is tried twice"
        for name in tried:
            self._waiting.add(name, NO_LOOKUP)  # Lookups may join them.
        self._counts["explored_blocks"] += len(tried)
        return tried


class _Looks:
    """The outlook of each medium at one moment, made when it is first asked for."""

    def __init__(self, times: LoadTimes, now_ms: int) -> None:
        self.now_ms = now_ms
        self._times = times
        self._known: dict[Medium, Outlook] = {}

    def of(self, medium: Medium) -> Outlook:
        """Return what the next load of a medium will take."""
        if medium not in self._known:
            self._known[medium] = self._times.outlook(medium, self.now_ms)
        return self._known[medium]
