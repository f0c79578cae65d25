"""Answers to lookups: what was found is leased to the engine, counted, and sent.

An engine gets blocks of its own namespaces only. Whichever way a block has come (it was here, or
from a lower tier, or a peer), its namespace is compared here, where every answer passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from kvbm_common.checksum import SUM_BYTES
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.leases import LeaseTable
from kvbm_common.tier.parts import PARTS_MAX
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.admin import PrefetchReply
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX
from kvbm_common.wire.explain import REQUEST_CHARS_MAX
from kvbm_common.wire.local import Found, Lookup

from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.known_runs import KnownRuns, part_sums_of
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.messages import Answer, EngineId, ToEngine
from kvbm_host_tier.core.miss_reason import Looked
from kvbm_host_tier.core.open_lookup import Medium, OpenLookup
from kvbm_host_tier.core.presence import blocks_here

OPERATOR = EngineId("operator", "")
"""The owner of prefetches; no engine has an empty incarnation."""
HINTED = -1
"""Instead of a request to reply to: an agent's hint has asked for a prefetch."""

ANSWER_BYTES_MAX = MESSAGE_BYTES_MAX
ENTRY_BYTES = 32
"""Bytes of a block in an answer, without the sums of its parts: slot, checksum, source."""

OTHER_NAMESPACE = "other_namespace"
"""The reason of a run that ends before a block that its engine may not have."""

# Compared in C: a lookup has hundreds of blocks.
_NAMESPACE = attrgetter("namespace")


class Answers:
    """The answers to lookups and prefetches, with their leases and counts."""

    def __init__(
        self,
        table: SlotTable,
        leases: LeaseTable,
        departures: Departures,
        *,
        epoch: int,
        known: KnownRuns,
        answered: Callable[[Looked], None],
        means: Means,
    ) -> None:
        """Start without hits; `answered` keeps a lookup until its misses are explained."""
        assert means.limits.hit_window >= 0, means.limits
        self._table = table
        self._leases = leases
        self._departures = departures
        self._epoch = epoch
        self._known = known
        self._answered = answered
        self._counts, self._emit = means.counts, means.emit
        self._hit_window: deque[tuple[int, int, int, int]] = deque(maxlen=means.limits.hit_window)
        """(asked, host, disk, object) blocks of the last lookups."""

    def give(self, lookup: OpenLookup, now_ms: int) -> None:
        """Lease the blocks that are here to the engine, and send it their slots.

        A lookup over several KV groups falls back on what is here.
        """
        self._cut_discarded(lookup)
        if lookup.reply_to:
            self._answer_prefetch(lookup)
            return
        self.keep_own(lookup)
        if lookup.plan is not None:
            if lookup.run_blocks < len(lookup.hashes):
                fall_back(lookup, lookup.plan, self._table)
            lookup.unpin_fallback(self._table)
            self._note_others(lookup, lookup.plan)
        self._cut_to_fit(lookup)
        self._emit(ToEngine(lookup.connection, self._leased(lookup)))
        self.explain(lookup, now_ms)

    def _leased(self, lookup: OpenLookup) -> Found:
        """Lease the blocks of a run, and count them; returns the answer to the engine."""
        blocks, slots = lookup.blocks, lookup.slots_here()
        assert len(slots) == len(blocks) == lookup.run_blocks <= len(lookup.hashes), lookup.owner
        lease_id = 0
        if slots:
            lease_id = self._leases.grant(
                lookup.owner, "onboard", tuple(slots), deadline_ms=lookup.lease_until_ms
            ).id
        disk, objects = _came_from(lookup, "disk"), _came_from(lookup, "object")
        remote = _came_from(lookup, "remote")
        here = lookup.run_blocks - len(disk) - len(objects) - len(remote)
        assert here >= 0, f"{lookup.owner}: {lookup.run_blocks} blocks came from {lookup.came_from}"
        plan = lookup.plan
        asked = len(lookup.hashes) if plan is None else plan.asked
        only_asks = lookup.asked is not None and lookup.asked.only_asks
        boundary, shared = (0, 0) if plan is None else (plan.reach.tokens, plan.reach.shared)
        columns = lookup.known.columns_of(self._table, slots, blocks)
        if not only_asks:
            self.count(asked, here, len(disk), len(objects), len(remote))
            self._counts["matched_tokens"] += boundary or lookup.run_blocks * lookup.block_tokens
            self._counts["bytes.h2d"] += columns.bytes
        if lookup.asked is not None and plan is None:
            self._known.answered(lookup.asked.hashes, slots, blocks)
        return Found(
            lookup=lookup.number,
            epoch=self._epoch,
            lease=lease_id,
            slots=columns.places,
            checksums=columns.checksums,
            part_sums=b"" if columns.are_plain else part_sums_of(blocks),
            block_bytes=blocks[0].bytes if blocks else 0,
            disk_blocks=disk,
            object_blocks=objects,
            remote_blocks=remote,
            reason=lookup.why_short,
            boundary=boundary,
            shared=shared,
        )

    def _cut_discarded(self, lookup: OpenLookup) -> None:
        """End a run before the first block that was discarded while the lookup waited."""
        at = self._table.first_discarded(lookup.slots)
        if at is not None:
            left = self._departures.get(lookup.hashes[at])
            reason = "corrupt" if left is not None and left.why == "corrupt" else "removed"
            lookup.cut(at, reason, self._table, "host")
        assert self._table.first_discarded(lookup.slots) is None, lookup.owner

    def _cut_to_fit(self, lookup: OpenLookup) -> None:
        """End a run where its answer fills a message. Only very long prompts reach that, of engines
        whose blocks have many parts."""
        if lookup.run_blocks * (ENTRY_BYTES + SUM_BYTES * PARTS_MAX) <= ANSWER_BYTES_MAX:
            return
        blocks_max = ANSWER_BYTES_MAX // (ENTRY_BYTES + SUM_BYTES * lookup.blocks[0].part_count)
        if lookup.run_blocks <= blocks_max:
            return
        if lookup.plan is None:
            lookup.cut(blocks_max, "too_long", self._table, "host")
        else:
            fall_back(lookup, lookup.plan, self._table, blocks_max)
            lookup.reason, lookup.failed_at = "too_long", "host"

    def keep_own(self, lookup: OpenLookup) -> None:
        """End an engine's run before the first block of another namespace, among those here."""
        own = lookup.namespaces
        if not lookup.blocks and own >= lookup.known.namespaces:
            lookup.blocks += lookup.known.blocks[: len(lookup.slots)]
        known = len(lookup.blocks)
        if known == len(lookup.slots) or lookup.reply_to:
            return
        blocks = self._table.blocks_in([slot for slot in lookup.slots[known:] if slot is not None])
        if not own.issuperset(map(_NAMESPACE, blocks)):
            count = next(i for i, block in enumerate(blocks) if block.namespace not in own)
            lookup.cut(known + count, OTHER_NAMESPACE, self._table, "host")
            del blocks[count:]
        lookup.blocks += blocks

    def _note_others(self, lookup: OpenLookup, plan: GroupPlan) -> None:
        """Note that a plan is short of a block that is here, but is not its engine's."""
        missed = plan.missed() if not lookup.reason else []
        here = [name for name in missed if self._table.holds(name)]
        if 0 in blocks_here(self._table, lookup.namespaces)(here):
            lookup.reason, lookup.failed_at = OTHER_NAMESPACE, "host"

    def explain(self, lookup: OpenLookup, now_ms: int) -> None:
        """Keep why the run of an engine's lookup ended where it did."""
        assert lookup.run_blocks <= len(lookup.hashes), lookup.owner
        asked = lookup.asked
        if asked is not None and not asked.only_asks:
            hashes, reason = lookup.hashes, lookup.reason
            if lookup.plan is not None:
                hashes, reason = [*hashes, *lookup.plan.missed()], lookup.why_short
            self._answered(
                Looked(
                    asked.request[:REQUEST_CHARS_MAX], asked.engine, now_ms,
                    hashes, lookup.run_blocks, lookup.came_from, reason, lookup.failed_at,
                    content=asked.content, namespace=asked.namespace, avoided=asked.avoided,
                    trace=asked.trace, detail=lookup.detail,
                )
            )  # fmt: skip

    def _answer_prefetch(self, lookup: OpenLookup) -> None:
        self._table.unpin(slot for slot in lookup.slots if slot is not None)
        reply = PrefetchReply(
            blocks=lookup.run_blocks,
            filled=len(lookup.came_from.keys() & set(range(lookup.run_blocks))),
            reason=lookup.why_short,
        )
        assert reply.filled <= reply.blocks, f"{reply.filled} of {reply.blocks} blocks were filled"
        self._counts["prefetched_blocks"] += reply.filled
        if lookup.reply_to != HINTED:
            self._emit(Answer(lookup.reply_to, reply))

    def refuse(
        self,
        connection: bytes,
        asked: Lookup,
        hashes: list[SequenceHash],
        reason: str,
        now_ms: int,
    ) -> None:
        """Answer a lookup with no blocks, for this reason."""
        assert reason, f"{asked.request} is refused for a reason"
        looked = Looked(
            asked.request[:REQUEST_CHARS_MAX], asked.engine, now_ms, hashes, 0, {}, reason,
            avoided=asked.avoided, trace=asked.trace,
        )  # fmt: skip
        if not asked.only_asks:
            self._answered(looked)
        found = Found(
            lookup=asked.lookup, epoch=self._epoch, lease=0, slots=[],
            checksums=[], block_bytes=0, reason=reason,
        )  # fmt: skip
        self._emit(ToEngine(connection, found))

    def tell_usable(self, connection: bytes, asked: Lookup, usable: int) -> None:
        """Answer a lookup that only asks: nothing is leased, brought or counted for it."""
        assert asked.only_asks, f"lookup {asked.lookup} wants its blocks"
        assert usable > 0, f"lookup {asked.lookup} has no block"
        found = Found(
            lookup=asked.lookup, epoch=self._epoch, lease=0, slots=[],
            checksums=[], block_bytes=0, usable=usable,
        )  # fmt: skip
        self._emit(ToEngine(connection, found))

    def count(self, asked: int, host: int, disk: int, objects: int, remote: int) -> None:
        """Count a lookup by where the blocks that it asked for came from."""
        missing = asked - host - disk - objects - remote
        assert missing >= 0, f"{asked} asked for, {host} + {disk} + {objects} + {remote} found"
        counts = self._counts
        counts["lookups"] += 1
        counts["lookup_blocks.host"] += host
        counts["lookup_blocks.disk"] += disk
        counts["lookup_blocks.object"] += objects
        counts["lookup_blocks.remote"] += remote
        counts["lookup_blocks.miss"] += missing
        counts["onboard_blocks_h2d"] += host
        counts["onboard_blocks_d2d"] += disk
        counts["onboard_blocks_o2d"] += objects
        self._hit_window.append((asked, host, disk, objects))

    def hit_rates(self) -> dict[str, float]:
        """Return the shares of the last lookups' blocks that this host's tiers had, and how many
        lookups these were."""
        window = self._hit_window
        asked = sum(entry[0] for entry in window) or 1  # No blocks, no hits.
        return {
            "host_cache_hit_rate": sum(entry[1] for entry in window) / asked,
            "disk_cache_hit_rate": sum(entry[2] for entry in window) / asked,
            "object_cache_hit_rate": sum(entry[3] for entry in window) / asked,
            "lookups_windowed": float(len(window)) if any(entry[0] for entry in window) else 0.0,
        }


def fall_back(
    lookup: OpenLookup, plan: GroupPlan, table: SlotTable, blocks_max: int | None = None
) -> None:
    """Have a lookup over several groups reach as far as blocks of its engine are here, and pin
    those: at most `blocks_max`."""

    came_from = {lookup.hashes[index]: tier for index, tier in lookup.came_from.items()}
    table.unpin(slot for slot in lookup.slots if slot is not None)
    plan.fall_back(blocks_here(table, lookup.namespaces), blocks_max)
    lookup.hashes = plan.needed()
    slots = table.pin_prefix(lookup.hashes)
    lookup.slots, lookup.blocks = [*slots], table.blocks_in(slots)
    lookup.run_blocks = len(slots)
    assert lookup.run_blocks == len(lookup.hashes), lookup.owner
    found = enumerate(lookup.hashes)
    lookup.came_from = {index: came_from[name] for index, name in found if name in came_from}


def _came_from(lookup: OpenLookup, tier: Medium) -> list[int]:
    """Return the indices of the run whose blocks came from this medium, in order."""
    if not lookup.came_from:
        return []
    return sorted(
        i for i, source in lookup.came_from.items() if source == tier and i < lookup.run_blocks
    )
