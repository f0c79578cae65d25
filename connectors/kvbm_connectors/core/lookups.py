"""Lookups: the questions of the engine's requests to the host tier, their leases, and loads.

The states are those of `open_lookup.py`. The engine never waits: `lookup` returns the answer if it
is known, or None, which means "ask again".

An engine takes a hit some time after it has learned of it. If the host tier went away in between,
the engine gets a load that its worker will refuse, and no exception: it made no mistake.

A block that failed to load is not asked for again for a while (`avoid_ms`). After a failed load the
engine recomputes and asks again at once, and would get the same bad block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.failed_blocks import FailedBlocks
from kvbm_common.tier.kv_groups import GroupRun, indispensable
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.local import Found

from kvbm_connectors.core.answers import checksums_of, hit_of, is_sound, nothing, why_failed
from kvbm_connectors.core.asked_blocks import as_many_as_fit, without_failed
from kvbm_connectors.core.attachment import Attachment
from kvbm_connectors.core.messages import (
    ConnectorLimits,
    ConnectorMisuse,
    Hit,
    Load,
    LoadResult,
    Origin,
)
from kvbm_connectors.core.offered_lately import OfferedLately
from kvbm_connectors.core.open_lookup import LOOKUP, LookupState, OpenLookup
from kvbm_connectors.core.outbox import Outbox

CAREFUL_MAX = 256
"""Requests in `_careful` at most: each asks again in the engine's next step, and leaves."""
STORY_MOVES_MAX = 256
"""Moves of lookups that are remembered for stories."""


class Lookups:
    """All requests' lookups, and the leases of loads in flight."""

    def __init__(
        self,
        outbox: Outbox,
        attachment: Attachment,
        lately: OfferedLately,
        limits: ConnectorLimits,
        counts: Counter[str],
    ) -> None:
        self._outbox, self._attachment, self._lately = outbox, attachment, lately
        self._limits, self._counts = limits, counts
        self._requests: dict[str, OpenLookup] = {}
        self._request_of: dict[int, str] = {}
        """Number of a lookup in ASKED → its request."""
        self._loading: set[int] = set()
        """Leases of loads in flight; their requests may have ended."""
        self._failed = FailedBlocks(limits.avoid_max)
        self._careful: OrderedDict[str, bool] = OrderedDict()
        """Requests whose answer needed a failed block: their next question needs none."""
        self._moves: deque[tuple[str, int, str]] = deque(maxlen=STORY_MOVES_MAX)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def under_way(self) -> bool:
        """Return whether the host tier still has to answer, or has leased blocks to us."""
        waiting = any(lookup.state is not LookupState.LOST for lookup in self._requests.values())
        return waiting or bool(self._loading)

    # --- questions and answers --------------------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        now_ms: int,
        *,
        onboard_deadline_ms: int,
        origin: Origin,
        groups: Sequence[GroupRun] = (),
        is_absent: bool | None = None,
        prefill: PrefillCost | None = None,
        only_asks: bool = False,
    ) -> Hit | None:
        """Return the hit of a request that has its answer; None: ask again."""
        assert request, "a lookup without a request"
        assert onboard_deadline_ms >= 0, f"{request} waits {onboard_deadline_ms} ms"
        lookup = self._requests.get(request)
        over = lookup is not None and lookup.state in (LookupState.LOST, LookupState.LOADING)
        is_another = lookup is not None and not _are_the_same(lookup.hashes, hashes)
        if over or is_another:
            self.forget(request)  # A load in flight goes on; this is another lookup.
            lookup = None
        if lookup is None:
            return self._ask(
                request, hashes, now_ms, onboard_deadline_ms, origin, groups, is_absent, prefill,
                only_asks=only_asks,
            )  # fmt: skip
        if lookup.state is LookupState.ASKED:
            if now_ms < lookup.answer_by_ms:
                return None
            self._counts["lookups_unanswered"] += 1
            if not lookup.only_asks:
                self._tell(request, lookup.number, "no_answer", len(lookup.asked))
            self._move(request, "no answer")
            return Hit(0, reason="no_answer")
        assert lookup.found is not None, self.story(request)
        if now_ms < lookup.lease_until_ms:
            return hit_of(lookup.found)
        self._counts["lookups_outlived_lease"] += 1
        self._tell(request, lookup.number, "lease_ended", len(lookup.found.slots))
        self._end(request, "lease ended")
        return Hit(0, reason="lease_ended")

    def _ask(
        self,
        request: str,
        hashes: Sequence[SequenceHash],
        now_ms: int,
        onboard_deadline_ms: int,
        origin: Origin,
        groups: Sequence[GroupRun],
        is_absent: bool | None,
        prefill: PrefillCost | None,
        *,
        only_asks: bool,
    ) -> Hit | None:
        if refusal := self._attachment.refusal:
            self._counts["lookups_passed_through"] += 1
            return Hit(0, reason=refusal)
        hashes = tuple(hashes)  # A slice of all of it is the same object.
        wanted, groups = as_many_as_fit(hashes, groups)
        fitting = len(wanted)
        if fitting < len(hashes):
            self._counts["blocks_not_asked_for"] += len(hashes) - fitting
            self._tell(request, 0, "too_long", len(hashes) - fitting)
        is_careful = self._careful.pop(request, False)
        wanted, groups = without_failed(wanted, groups, self._failed, now_ms, is_careful=is_careful)
        avoided = fitting - len(wanted)
        assert avoided >= 0, f"{request} asks for {len(wanted)} of {fitting} blocks"
        self._counts["avoided_blocks"] += avoided
        if not wanted:
            if hashes and not only_asks:
                self._tell(request, 0, "avoided", avoided)
            return Hit(0, reason="avoided" if hashes else "")
        number, lease_ms = self._outbox.new_id(), onboard_deadline_ms + self._limits.lease_ms
        if is_absent and self._lately.has_any(indispensable(groups, wanted)):
            is_absent = None
        lookup = OpenLookup(
            number,
            hashes,
            tuple(wanted),
            answer_by_ms=now_ms + onboard_deadline_ms + self._limits.answer_margin_ms,
            lease_until_ms=now_ms + lease_ms,
            state=LOOKUP.next(None, "filter says no" if is_absent else "asked"),
            groups=tuple(groups),
            is_hoped_for=is_absent is False,
            only_asks=only_asks,
        )
        self._counts["lookups"] += 1
        name = request if self._attachment.explains and not only_asks else ""
        if is_absent:
            self._counts["lookups_at_once"] += 1
            lookup.found = nothing(number, self._attachment.epoch, "not_stored")
            self._begin(request, lookup, "filter says no")
            is_told = only_asks or self._outbox.miss(
                number, lookup.asked, avoided=avoided, request=name, origin=origin, groups=groups
            )
            self._counts["misses_not_told"] += not is_told
            return hit_of(lookup.found)
        self._begin(request, lookup, "asked")
        self._outbox.ask(
            number,
            wanted,
            lease_ms=lease_ms,
            onboard_deadline_ms=onboard_deadline_ms,
            avoided=avoided,
            request=name,
            origin=origin,
            groups=groups,
            prefill=prefill,
            only_asks=only_asks,
        )
        return None

    def _begin(self, request: str, lookup: OpenLookup, event: str) -> None:
        assert lookup.number not in self._request_of, f"lookup {lookup.number} was asked before"
        assert len(lookup.asked) <= len(lookup.hashes), f"{request} asks for more than it has"
        if request in self._requests:
            self._move(request, "asked again")
        self._requests[request] = lookup
        if lookup.state is LookupState.ASKED:
            self._request_of[lookup.number] = request
        self._moves.append((request, lookup.number, event))

    def found(self, found: Found) -> None:
        """Take an answer; the lease of one that comes too late or unasked goes back at once."""
        request = self._request_of.get(found.lookup)
        lookup = self._requests[request] if request is not None else None
        if found.epoch != self._attachment.epoch:
            # Its lease ended with that life; an id may mean another lease by now.
            self._counts["answers_unwanted"] += 1
            if request is not None:
                self.forget(request)  # The engine asks again, and is answered by this life.
        elif request is None or lookup is None:
            self._counts["answers_unwanted"] += 1
            self._give_back(found.lease)
        elif not is_sound(found, len(lookup.asked), lookup.groups, only_asks=lookup.only_asks):
            self._counts["answers_malformed"] += 1
            self._tell(request, found.lookup, "malformed", len(found.slots))
            self._give_back(found.lease)
            lookup.found = nothing(found.lookup, found.epoch, "malformed")
            self._move(request, "found")
        elif self._needs_failed(lookup, found):
            self._give_back(found.lease)
            self._move(request, "forgotten")
            self._careful[request] = True  # The engine asks again.
            while len(self._careful) > CAREFUL_MAX:
                self._careful.popitem(last=False)
        else:
            lookup.found = found
            self._move(request, "found")
            if lookup.is_hoped_for and not (found.slots or found.usable):
                self._counts["lookups_in_vain"] += 1
                self._outbox.asked_in_vain()

    def _needs_failed(self, lookup: OpenLookup, found: Found) -> bool:
        """Tell whether a hit over KV groups, smaller than was asked for, needs a block that has
        failed lately: see `without_failed`."""
        if not lookup.groups or not len(self._failed):
            return False
        return any(name in self._failed for name in lookup.names_of(found))

    def _give_back(self, lease: int) -> None:
        """Give back an unwanted lease; but a second answer must not end the first one's lease."""
        found = (lookup.found for lookup in self._requests.values() if lookup.found is not None)
        if lease not in self._loading and all(lease != answer.lease for answer in found):
            self._outbox.release(lease)

    # --- loads ------------------------------------------------------------------------------

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        """Return the load of the first `len(blocks)` found blocks; over several KV groups, of all.

        Raises ConnectorMisuse.
        """
        lookup = self._requests.get(request)
        if lookup is None or not LOOKUP.has(lookup.state, "taken") or lookup.found is None:
            raise ConnectorMisuse(f"request {request} has nothing to load")
        found, count = lookup.found, len(blocks)
        is_part = count < len(found.slots) and not lookup.groups
        if not count or not (is_part or count == len(found.slots)):
            raise ConnectorMisuse(f"request {request}: {count} of {len(found.slots)} blocks")
        assert found.lease, self.story(request)
        self._move(request, "taken")
        self._loading.add(found.lease)
        self._counts["loads"] += 1
        return Load(
            request=request,
            lookup=found.lookup,
            epoch=found.epoch,
            lease=found.lease,
            slots=tuple(found.slots[:count]),
            blocks=tuple(blocks),
            hashes=lookup.names_of(found)[:count],
            checksums=checksums_of(found)[:count],
            block_bytes=found.block_bytes,
            deadline_ms=lookup.lease_until_ms,
            whole=bool(lookup.groups),
        )

    def load_ended(self, result: LoadResult, now_ms: int) -> None:
        """Give the lease of a load back, and avoid the blocks that failed."""
        load, epoch = result.load, self._attachment.epoch
        assert len(result.intact) == len(load.hashes), self.story(load.request)
        self._loading.discard(load.lease)
        usable = sum(result.intact)
        failed = len(result.intact) - usable
        assert 0 <= failed <= len(load.blocks), self.story(load.request)
        self._counts["loaded_blocks"] += usable
        self._counts["load_failed_blocks"] += failed
        if failed and load.epoch == epoch:
            self._tell(load.request, load.lookup, why_failed(result), failed)
            for name, ok in zip(load.hashes, result.intact, strict=True):
                if not ok:
                    self._failed.add(name, now_ms + self._limits.avoid_ms)
        lookup = self._requests.get(load.request)
        if lookup is not None and lookup.found is not None and lookup.found.lease == load.lease:
            self._move(load.request, "load ended")
        if load.epoch == epoch:
            self._outbox.release(load.lease, result.corrupt)

    # --- ends -------------------------------------------------------------------------------

    def forget(self, request: str) -> None:
        """End a lookup that the engine does not need, but for a load in flight."""
        self._careful.pop(request, None)
        lookup = self._requests.get(request)
        if lookup is not None and LOOKUP.has(lookup.state, "forgotten"):
            self._end(request, "forgotten")

    def _end(self, request: str, event: str) -> None:
        """End a lookup and give its lease back."""
        found = self._requests[request].found
        self._move(request, event)
        assert request not in self._requests, self.story(request)
        if found is not None and found.epoch == self._attachment.epoch:
            self._outbox.release(found.lease)

    def host_tier_gone(self, reason: str) -> None:
        """End every lookup; a hit that the engine knows of stays as a load that will fail."""
        assert reason, "lookups are dropped without a reason"
        self._counts[f"lookups_dropped.{reason}"] += len(self._requests)
        for request in list(self._requests):
            self._move(request, "host tier gone")
        assert not self._request_of, f"asked of a host tier that is gone: {self._request_of}"

    def other_arena(self) -> None:
        """Ask for failed blocks again: they had failed in another arena."""
        self._failed.clear()

    def tick(self, now_ms: int) -> None:
        """Ask for failed blocks again when their time is over."""
        self._failed.tick(now_ms)

    def _tell(self, request: str, number: int, reason: str, blocks: int) -> None:
        """Report a miss to the host tier that only the connector knows, if it explains lookups."""
        assert reason, self.story(request)
        if self._attachment.explains and self._attachment.epoch:
            self._outbox.tell(request, number, reason, blocks)

    def _move(self, request: str, event: str) -> None:
        """Move a lookup by the table; one that has ended is forgotten."""
        lookup = self._requests[request]
        if not LOOKUP.has(lookup.state, event):
            story = "; ".join(self.story(request))
            raise InvalidTransition(LOOKUP.refusal(lookup.state, event, story))
        if lookup.state is LookupState.ASKED:
            del self._request_of[lookup.number]
        self._moves.append((request, lookup.number, event))
        target = LOOKUP.transitions[lookup.state, event]
        if target is None:
            del self._requests[request]
        else:
            lookup.state = target

    def story(self, request: str) -> list[str]:
        """Return the last moves of a request's lookups, newest last."""
        return [
            f"lookup {number} of {name}: {event}"
            for name, number, event in self._moves
            if name == request
        ]

    def check(self) -> None:
        """Assert every invariant of the lookups."""
        asked = {
            lookup.number: request
            for request, lookup in self._requests.items()
            if lookup.state is LookupState.ASKED
        }
        assert asked == self._request_of
        for request, lookup in self._requests.items():
            is_asked = lookup.state is LookupState.ASKED
            assert (lookup.found is None) == is_asked, self.story(request)
            if not self._attachment.epoch:
                assert lookup.state is LookupState.LOST, self.story(request)


def _are_the_same(known: tuple[SequenceHash, ...], hashes: Sequence[SequenceHash]) -> bool:
    """Tell whether a lookup is asked for again: mostly with the same object."""
    return known is hashes or known == tuple(hashes)
