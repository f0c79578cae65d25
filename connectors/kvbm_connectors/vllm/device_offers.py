"""Offers of vLLM's device blocks: which blocks of a request are offered, and what holds them.

With one KV group, a request holds the blocks that it offers, and vLLM frees them when a plan names
the request in `sent`. With several, or a sliding window, vLLM frees blocks while their request
runs, so `BlockHolds` has a reference to each offered block; so it does where request ids repeat.

A block can be offered when the step that computes it has ended; a block of a window may have left
the window by then. So blocks that a hit may need are held from the plan of that step on. Recurrent
states, too: vLLM hands them over with the step, and its block table keeps only the last one.

A draft model may still write KV of a step that has ended. With one, offers wait for a mark in every
rank's stream, and their blocks are held until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import boundary_tokens

from kvbm_connectors.client.offered_names import OfferedNames
from kvbm_connectors.core.messages import OfferRun, offers_of
from kvbm_connectors.vllm.block_holds import NULL_BLOCK, BlockHolds
from kvbm_connectors.vllm.half import OffersTaken
from kvbm_connectors.vllm.kv_groups import KvGroup, tails_in
from kvbm_connectors.vllm.stream_marks import MarkEnd, RankMarks
from kvbm_connectors.vllm.tracked import Tracked, runs_to_offer

Tables = Sequence[Sequence[int]]
"""A request's device blocks, KV group by KV group."""
Handed = Sequence[tuple[int, int, int]]
"""Recurrent states of a request: KV group, device block, and number of tokens before the state."""

TOGETHER_BLOCKS_MAX = 96
"""Blocks of several requests in one offer: a request that ends waits for all of them."""
DECODED_TOGETHER = 64
"""Decoded blocks wait until there are so many, since an offer costs the engine's step as much as
several blocks. They go sooner with a prompt or the end of a request."""
WAIT_STEPS_MAX = 8
"""Steps that decoded blocks wait at most."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Blocks of one request in an offer."""

    tracked: Tracked
    run: OfferRun
    group: KvGroup
    held: bool
    """True if `BlockHolds` holds the blocks: they may leave the request's table."""


class DeviceOffers:
    """All offers of one engine."""

    def __init__(
        self,
        half: OffersTaken,
        groups: Sequence[KvGroup],
        counts: Counter[str],
        holds: BlockHolds | None,
        marks: RankMarks | None = None,
    ) -> None:
        """Offer the blocks of these groups; without `holds` requests hold what they offer. With
        `marks` an offer leaves when the ranks' streams have passed one."""
        assert groups, "an engine without KV groups offers nothing"
        assert holds is not None or (len(groups) == 1 and groups[0].is_prefix), groups
        self._half, self._groups, self._counts = half, groups, counts
        self._holds = holds
        self._boundary_tokens = boundary_tokens(group.run(0, 0) for group in groups)
        self._numbers = {group.table: at for at, group in enumerate(groups)}
        """vLLM's number of a group → its index among those that are cached."""
        self._unsent: list[_Part] = []
        """Parts that were found since the last `send`."""
        self._steps_waited = 0
        """Steps since the first part in `_unsent` was found."""
        self._can_wait = True
        """True if all parts in `_unsent` were decoded, and are held by their requests."""
        self._released: list[tuple[Tracked, int]] = []
        """Requests and offers that were revoked since `take_ended`; a negative number is a mark
        that is over."""
        self._marks = marks
        self._by_mark: dict[int, list[_Part]] = {}
        """Mark → the parts that are offered when it is over; the last mark may not be laid yet."""
        self._out: dict[int, tuple[_Part, ...]] = {}
        """Offer → its parts, one for each request."""
        self.known = OfferedNames()

    @property
    def any_out(self) -> bool:
        """Return whether anything is on offer, or will be when a mark is over."""
        return bool(self._out or self._by_mark)

    @property
    def any_waits_for_mark(self) -> bool:
        """Return whether offers wait for a mark that is not over, or not laid yet."""
        return bool(self._by_mark)

    @property
    def holding(self) -> bool:
        """Return whether blocks are held beside the requests that use them."""
        return self._holds is not None and len(self._holds) > 0

    # --- windows, chunks, states --------------------------------------------------------------

    def hold_tails(self, tracked: Tracked, tables: Tables, end: int) -> None:
        """Hold the blocks of windows and chunks before token `end` that a hit may need, until they
        are offered."""
        if self._holds is None or not self._holds.ready or tracked.refused or not tables:
            return
        assert end >= 0, f"{tracked.request.request_id} has {end} tokens"
        for at, group in enumerate(self._groups):
            if group.is_prefix or group.handed_over:
                continue
            table, size = tables[group.table], group.block_tokens
            indices = range(tracked.looked_tokens // size, min(end // size, len(table)))
            tails = tails_in(indices, group, tracked.boundaries, self._boundary_tokens)
            self._hold(tracked, at, {index: table[index] for index in tails})
        tracked.looked_tokens = max(tracked.looked_tokens, end)

    def hold_states(self, requests: Mapping[str, Tracked], states: Mapping[str, Handed]) -> None:
        """Hold the recurrent states that a step computes, or that a load has brought, until they
        are offered."""
        for request, handed in states.items():
            tracked = requests.get(request)
            if tracked is not None and not tracked.finished:
                self._hold_states(tracked, handed)

    def _hold_states(self, tracked: Tracked, handed: Handed) -> None:
        if self._holds is None or not self._holds.ready or tracked.refused:
            return
        for number, block, tokens in handed:
            at = self._numbers.get(number)
            # Our hits end with a block: vLLM alone can use a state inside of one.
            if at is not None and not tokens % self._boundary_tokens:
                self._hold(tracked, at, {tokens // self._groups[at].block_tokens - 1: block})

    def hold_last_tail(self, tracked: Tracked, tables: Tables) -> None:
        """Hold the last blocks of windows and chunks of a request that ends: the next turn begins
        there.

        Those that an offer or a load has brought to the host tier need not be held.
        """
        end = self._final(tracked) // self._boundary_tokens * self._boundary_tokens
        if self._holds is None or not self._holds.ready or tracked.refused or not end:
            return
        for at, group in enumerate(self._groups):
            if group.is_prefix or group.handed_over:
                continue
            table, indices = tables[group.table], group.needed_indices(0, end)
            names = tracked.first_names(group.hasher, indices.stop)
            new = [
                index for index in indices if index < len(table) and names[index] not in self.known
            ]
            self._hold(tracked, at, {index: table[index] for index in new})

    def _hold(self, tracked: Tracked, at: int, blocks: Mapping[int, int]) -> None:
        assert self._holds is not None
        if not blocks:  # The usual case: most steps finish no block.
            return
        group, held = self._groups[at], tracked.held.setdefault(at, {})
        size = group.block_tokens
        # Blocks that the device had before may have been offered already.
        names = tracked.first_names(group.hasher, tracked.local // size)
        for index, block in blocks.items():
            is_here = index < len(names) and names[index] in self.known
            if block == NULL_BLOCK or index in held or is_here or tracked.was_loaded(index, size):
                continue
            self._holds.hold([block])
            held[index] = block

    def release_unoffered(self, tracked: Tracked, *, until: int = 0) -> None:
        """Give back what is held of a request and not on offer; blocks after token `until` may be
        held again."""
        for held in tracked.held.values():
            assert self._holds is not None
            self._holds.release(list(held.values()))
        tracked.held.clear()
        tracked.looked_tokens = min(tracked.looked_tokens, until)

    # --- offers -----------------------------------------------------------------------------

    def offer(self, tracked: Tracked, tables: Tables) -> None:
        """Collect for `send` what steps have finished since; without tables, leave it for later."""
        if tracked.refused or not tables or (self._holds is not None and not self._holds.ready):
            return
        self._serve()
        end = self._final(tracked)
        for at, group in enumerate(self._groups):
            size = group.block_tokens
            if not group.is_prefix:
                self._offer_held(tracked, at, end // size)
                continue
            names = tracked.first_names(group.hasher, end // size)
            table = tables[group.table]
            upto = min(end // size, len(table))
            indices = tracked.indices_to_offer(upto, names, self.known.__contains__, size)
            runs = runs_to_offer(indices, table, names, group.hasher.root)
            self._offer_runs(tracked, group, runs, held=False)
        tracked.offered = end

    def offer_of_others(
        self, requests: Mapping[str, Tracked], scheduled: Mapping[str, int]
    ) -> None:
        """Collect for `send` what is held of requests that a step leaves out. vLLM may have no
        blocks for them, and wait for these."""
        if not self.holding:
            return
        for request, tracked in requests.items():
            if tracked.held and request not in scheduled:
                self._offer_all_held(tracked)
                if tracked.held and not tracked.request.num_in_flight_tokens:
                    # A draft model writes them again, with a step that is not planned yet.
                    self.release_unoffered(tracked, until=self._final(tracked))

    def _offer_all_held(self, tracked: Tracked) -> None:
        """Collect for `send` what is held of a request, as far as its steps have ended."""
        if tracked.refused:
            return
        self._serve()
        end = self._final(tracked)
        for at in list(tracked.held):
            self._offer_held(tracked, at, end // self._groups[at].block_tokens)

    def _final(self, tracked: Tracked) -> int:
        """Return the tokens of a request whose KV no step writes again."""
        rewritten = 0 if self._marks is None else self._marks.rewritten
        return max(0, tracked.computed() - rewritten)

    def _offer_held(self, tracked: Tracked, at: int, end: int) -> None:
        group, held = self._groups[at], tracked.take_held(at, end)
        if held:
            names = tracked.first_names(group.hasher, end)
            runs = runs_to_offer(list(held), held, names, group.hasher.root)
            self._offer_runs(tracked, group, runs, held=True)

    def loads(self, names: Sequence[SequenceHash]) -> None:
        """Note that a load brings these blocks: the host tier has them."""
        self._serve()
        self.known.add(names)

    def _serve(self) -> None:
        """Forget the names of another life of the host tier; of what `send` offers, once."""
        if not self._unsent:
            self.known.serve(self._half.epoch)

    def _offer_runs(
        self, tracked: Tracked, group: KvGroup, runs: Iterable[OfferRun], *, held: bool
    ) -> None:
        """Put runs among those that `send` offers."""
        # vLLM may need blocks that are held beside their request: these do not wait.
        self._can_wait &= tracked.offers_decoded and not held
        for part in (part for run in runs for part in offers_of(run)):
            self._unsent.append(_Part(tracked, part, group, held))
            self.known.add(part.hashes)

    def send_if_due(self) -> None:
        """Offer what was found, unless it can wait for more."""
        if not self._unsent:
            return
        self._steps_waited += 1
        found = sum(len(part.run.blocks) for part in self._unsent)
        is_enough = found >= DECODED_TOGETHER or self._steps_waited >= WAIT_STEPS_MAX
        if is_enough or not self._can_wait:
            self.send(hurry=not self._can_wait)

    def preempted(self, tracked: Tracked) -> None:
        """End the offers of a request, and those that wait: vLLM has freed its blocks."""
        self._withdraw([part for part in self._unsent if part.tracked is tracked])
        for mark, parts in self._by_mark.items():
            freed = [part for part in parts if part.tracked is tracked and not part.held]
            self._by_mark[mark] = [part for part in parts if part not in freed]
            self._drop(freed)
        if sent := {offer for offer in tracked.offers if offer > 0}:
            self.revoke(sent)

    def _withdraw(self, parts: Sequence[_Part]) -> None:
        """Drop parts that wait to be offered."""
        for part in parts:
            assert not part.held, "held blocks do not wait"
            self._unsent.remove(part)
            self.known.discard(part.run.hashes)

    def send(self, *, hurry: bool = True) -> None:
        """Offer what was found, or have it wait for the next mark. Without `hurry`: in 100 ms."""
        unsent, self._unsent = self._unsent, []
        self._steps_waited, self._can_wait = 0, True
        if self._marks is None or not self._half.epoch:
            self._send_all(unsent, hurry=hurry)  # Without a host tier no block waits for a mark.
        elif unsent:
            waiting = self._by_mark.setdefault(self._marks.next, [])
            waiting += [self._hold_part(part, self._marks.next) for part in unsent]

    def _hold_part(self, part: _Part, mark: int) -> _Part:
        """Return a part whose blocks are held until a mark is over."""
        if self._holds is None:
            part.tracked.offers.add(-mark)
            return part
        if not part.held:
            self._holds.hold(part.run.blocks)
        return replace(part, held=True)

    def mark_of_step(self) -> int:
        """Return the mark that workers lay in this step, for what waits for one; 0: nothing."""
        if self._marks is None or self._marks.next not in self._by_mark:
            return 0
        return self._marks.begin()

    def marks_ended(self, reports: Iterable[MarkEnd]) -> None:
        """Offer what waited for marks that are over now; nothing whose mark a rank cannot vouch
        for."""
        for mark, has_passed in self._marks.ended(reports) if self._marks is not None else ():
            parts = self._by_mark.pop(mark)
            self._serve()
            if has_passed:
                for part in parts:
                    self.known.add(part.run.hashes)
                self._send_all(parts)
            else:
                self._counts["offers_unmarked"] += len(parts)
                self._drop(parts)
            self._released += [(part.tracked, -mark) for part in parts]

    def _drop(self, parts: Iterable[_Part]) -> None:
        """Give up parts that wait for a mark, or whose offer was not taken."""
        for part in parts:
            self.known.discard(part.run.hashes)
            if part.held and self._holds is not None:
                self._holds.release(part.run.blocks)

    def _send_all(self, found: Sequence[_Part], *, hurry: bool = True) -> None:
        """Offer parts, those of one group together, up to TOGETHER_BLOCKS_MAX blocks."""
        parts: list[_Part] = []
        count = 0
        # All parts of an offer are of one group.
        for part in sorted(found, key=lambda one: one.group.table):
            count += len(part.run.blocks)
            if parts and (part.group is not parts[0].group or count > TOGETHER_BLOCKS_MAX):
                self._send(parts, hurry=hurry)
                parts, count = [], len(part.run.blocks)
            parts.append(part)
        if parts:
            self._send(parts, hurry=hurry)

    def _send(self, parts: Sequence[_Part], *, hurry: bool) -> None:
        digest = parts[0].group.hasher.namespace.digest if self._holds is not None else b""
        offer = self._half.offer([one.run for one in parts], namespace=digest, hurry=hurry)
        if offer is None:  # No host tier is there, or too much is on offer: it is counted.
            self._drop(parts)
            return
        for part in parts:
            if self._holds is None:
                part.tracked.offers.add(offer)
            elif not part.held:
                self._holds.hold(part.run.blocks)
        self._out[offer] = tuple(parts)

    # --- ends -------------------------------------------------------------------------------

    def take_ended(self) -> list[tuple[Tracked, int]]:
        """Return request and offer (or negative mark) of each that is over: it holds the request's
        blocks no longer."""
        self.marks_ended(())  # Late marks end without a report.
        ended, self._released = self._released, []
        for one in self._half.drain_ended():
            for part in self._out.pop(one.offer, ()):  # None: revoked before, with its request.
                if not one.complete:
                    self.known.discard(part.run.hashes)
                if self._holds is not None:
                    self._holds.release(part.run.blocks)
                ended.append((part.tracked, one.offer))
        return ended

    def revoke(self, offers: Collection[int]) -> None:
        """End offers with blocks that vLLM has freed: the step now planned may overwrite them.

        Other requests with blocks in them offer theirs again with their next ones.
        """
        assert self._holds is None, "held blocks are not overwritten"
        for offer in offers:
            for part in self._out.pop(offer, ()):
                self.known.discard(part.run.hashes)
                part.tracked.offer_again(part.group.hasher, part.run)
                self._released.append((part.tracked, offer))
            self._half.revoke(offer)
        self._counts["offers_revoked"] += len(offers)

    def revoke_all(self) -> None:
        """Have every offer end: the engine's memory may be taken away."""
        self._withdraw(list(self._unsent))
        for mark, parts in self._by_mark.items():
            self._drop(parts)
            self._released += [(part.tracked, -mark) for part in parts]
            self._by_mark[mark] = []
        for offer in self._out:
            self._half.revoke(offer)
