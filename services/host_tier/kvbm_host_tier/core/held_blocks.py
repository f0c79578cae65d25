"""The blocks that this tier holds, and the announcements of every one that comes or goes.

Three kinds of blocks are told apart. Most are *announced*. A *guest* was brought from a peer and
used once: it is not announced, and is the first to be evicted. In a staging arena a block may be
evicted only when a disk tier has it, because it exists nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from kvbm_common.eviction import make_policy
from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.tier.announcer import PAGE_BLOCKS, Announcer, BlocksNow
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.former_blocks import FormerBlocks, horizon_for
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.reclaim import ANOTHER_SIZE
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.tier.tenants import Tenant, Tenants, shares_of

from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.first_blocks import FirstBlocks
from kvbm_host_tier.core.guests import Guests
from kvbm_host_tier.core.hit_reports import HitReports
from kvbm_host_tier.core.known_runs import KnownRuns
from kvbm_host_tier.core.late_demotions import LateDemotions
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.lower_tier_view import Namespaces
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import Publish
from kvbm_host_tier.core.session_pins import SessionPins

DEMOTED = "demoted"
"""The policy that an eviction reports for a block that an agent has demoted."""
YIELDING_MAX = 16
"""Sessions whose pins one shortage of room ends at most."""
SEARCHED_PER_MS = 200
"""Idle blocks for which a search of a staging arena that has found too little pauses for a
millisecond. They take 50 µs: searches are a twentieth of the time, at most."""


class HeldBlocks:
    """The committed blocks of one arena, what became of those that left, and the announcements."""

    def __init__(
        self,
        announcer: Announcer,
        below: LowerTiers,
        former: FormerBlocks,
        findable: Findable,
        means: Means,
        *,
        policy: str,
        staging: bool,
    ) -> None:
        self._staging = staging
        self._policy_name = policy
        self._limits = means.limits
        self.tenants = Tenants(shares_of(means.limits.tenant_shares))
        make = partial(make_policy, self.policy_name)
        self.table = SlotTable(Layout.unsized(0), make, self.tenants)
        self.diary = Diary()
        self.first_blocks = FirstBlocks(means.limits.history_entries)
        """The prompts that were looked up last."""
        self.former = former
        """The names of blocks that left before those in `departures`."""
        self.departures = Departures(means.limits.history_entries, former)
        """Times and reasons of the blocks that have left last."""
        self.unpin_ended: Callable[[], None] = lambda: None
        """Unpins the blocks of leases that have ended."""
        self.let_go: Callable[[Iterable[int]], None] = lambda slots: None
        """Unpins what operators have pinned in slots whose blocks leave."""
        self.draining = False
        """An operator wants no new blocks here."""
        self._announcer = announcer
        self._below = below
        self._findable = findable
        self._counts, self._emit = means.counts, means.emit
        self.guests = Guests()
        self.demoted = Guests()
        """Announced blocks that leave before others, because a hint of an agent says so."""
        self.late = LateDemotions(means.counts)
        """Blocks that a hint has demoted, and that are still on their way."""
        self.session_pins = SessionPins(
            self.table, means.counts, part_max=means.limits.hint_pin_percent / 100
        )
        self.known = KnownRuns(self.table, means.limits.stretch_blocks)
        """The answers to earlier lookups, for blocks that are looked up again."""
        self.hits = HitReports(self.table, below, means)
        self._search_at_ms: dict[tuple[int, Tenant], int] = {}
        """Block size and tenant → when a staging arena may be searched again for room for them.
        Entries whose time has passed go with the next one."""
        for reason in ("evicted", "corrupt"):  # An alert sees no first loss in a late series.
            self._counts[f"evictions.{reason}"] = 0

    # --- the slots --------------------------------------------------------------------------

    def lay_out(self, layout: Layout) -> None:
        """Give the empty table its slots, once."""
        assert layout.slot_count > 0, f"an arena without slots: {layout}"
        below_count = self._limits.below_count(layout.slot_bytes)
        self.former.set_horizon(horizon_for(layout.slot_count, below_count))
        self.departures.size_for(layout.slot_count)
        self.first_blocks.size_for(layout.slot_count)
        self._below.size_for(layout.slot_count)
        self.table.lay_out(layout, partial(make_policy, self.policy_name))
        self._findable.lay_out(layout.slot_count)

    @property
    def policy_name(self) -> str:
        """Return the eviction policy; a staging arena walks the free blocks by age."""
        return "lru" if self._staging else self._policy_name

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims; False in a staging arena."""
        assert name, "a policy has a name"
        if self._staging:
            return False
        self._policy_name = name
        self.table.use_policy(partial(make_policy, name))
        return True

    def call_tenants(self, namespaces: Iterable[Namespace]) -> None:
        """Learn the names of tenants from an engine's namespaces, for figures."""
        for namespace in namespaces:
            if isinstance(namespace.tenant, str):
                self.tenants.call(namespace.tenant)

    # --- coming -----------------------------------------------------------------------------

    def stage(
        self, names: Sequence[SequenceHash], block_bytes: int, why: str, now_ms: int
    ) -> list[int]:
        """Take a slot for each of these blocks, for which room was made; returns the slots."""
        assert names, "slots are staged for blocks"
        slots = self.table.stage_all(names, block_bytes)
        self._note(now_ms, f"staged in slot {{slot}} {why}", names, slots)
        return slots

    def commit(self, arrived: Sequence[tuple[int, Block]], now_ms: int) -> None:
        """Make staged blocks findable, free to be evicted, and announce them."""
        assert arrived, "a commit is of blocks"
        self.table.register_all(arrived)
        blocks = [block for _, block in arrived]
        names, slots = [block.hash for block in blocks], [slot for slot, _ in arrived]
        self._findable.add(names, in_tables=True)
        self._note(now_ms, "committed in slot {slot}", names, slots)
        self.announce(blocks)
        self.session_pins.arrived(names)
        self.demote(self.late.arrived(blocks, now_ms))

    def register(self, slot: int, block: Block) -> None:
        """Make a block findable that was brought for lookups."""
        self.table.register(slot, block)
        assert self.table.find(block.hash) == slot, self.story(block.hash)
        self._findable.add((block.hash,), in_tables=True)
        self.session_pins.arrived((block.hash,))

    def landed(self, arrived: Sequence[tuple[int, Block]], source: str, now_ms: int) -> None:
        """Note where blocks came from that are committed, and perhaps leased already."""
        names, slots = [block.hash for _, block in arrived], [slot for slot, _ in arrived]
        self._note(now_ms, f"came from {source} to slot {{slot}}", names, slots)

    def _note(
        self, now_ms: int, what: str, names: Sequence[SequenceHash], slots: Sequence[int]
    ) -> None:
        self.diary.note_all(now_ms, what, names, self.table.places(slots))

    def announce(self, blocks: Sequence[Block]) -> None:
        """Announce blocks that have been committed."""
        assert self._announcer.seq > 0, "blocks are announced before this life"
        for event in self._announcer.stored(blocks):
            self._emit(Publish(event))

    def not_stored(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remember why an offload failed, to explain later misses of these blocks."""
        assert reason, "an offload fails for a reason"
        self.departures.note(names, "offload", now_ms, detail=reason)

    # --- guests -----------------------------------------------------------------------------

    def add_guest(self, block: Block, slot: int) -> None:
        """Hold a block of a peer as a guest in this slot, where it is about to be registered."""
        assert not self.table.holds(block.hash), f"it is here already: {self.story(block.hash)}"
        tenant = self.tenants.of(block.namespace)
        self.guests.add(block.hash, self.table.slot_bytes(slot), tenant)

    def admit(self, names: Iterable[SequenceHash]) -> None:
        """Turn guests among these blocks into announced blocks: they were used again."""
        self.keep(names)
        if not self.guests.names:
            return
        admitted = [name for name in names if name in self.guests]
        self.guests.remove(admitted)
        self._counts["peer_admitted_blocks"] += len(admitted)
        found = [slot for name in admitted if (slot := self.table.find(name)) is not None]
        assert len(found) == len(admitted), f"a guest of {self.story(admitted[0])} is not here"
        self.announce([self.table.block(slot) for slot in found])

    # --- demoted blocks ---------------------------------------------------------------------

    def demote(self, names: Sequence[SequenceHash]) -> int:
        """Let blocks that are here leave before others, and tell the disk tier of those that it
        lacks. A block of several sessions stays. Returns how many are demoted now."""
        own = [name for name in names if not self.session_pins.is_shared(name)]
        new = [name for name in own if name not in self.demoted and name not in self.guests]
        for name in reversed(new):  # A leaf goes before its parent.
            slot = self.table.find(name)
            assert slot is not None, self.story(name)
            self.demoted.add(name, self.table.slot_bytes(slot), self.table.tenant_of(name))
        if new and self._below.instances():
            self.hits.tell_unwritten(self._below.missing(new))
        self._counts["hint_blocks_demoted"] += len(new)
        return len(new)

    def keep(self, names: Iterable[SequenceHash]) -> None:
        """End the demotion of these blocks: they leave in their turn again."""
        names = list(names)
        self.late.forget(names)
        if self.demoted.names:
            self.demoted.remove([name for name in names if name in self.demoted])

    def is_near(self, name: SequenceHash, own: Namespaces, now_ms: int) -> bool:
        """Tell whether a block is here or in a lower tier, or on its way."""
        is_here = self.table.holds(name) or self.table.is_staging(name)
        return is_here or self._below.usable(name, now_ms, own)

    def announced(self) -> list[Block]:
        """Return every committed block that is no guest."""
        announced = [block for part in self.announced_parts() for block in part()]
        known = len(announced) + len(self.guests)
        assert known == len(self.table), f"{len(self.guests)} guests, {len(announced)} others"
        return announced

    def announced_parts(self) -> list[BlocksNow]:
        """Return what lists those blocks, a page of a snapshot each."""
        return [partial(self._announced_in, part) for part in self.table.cut(PAGE_BLOCKS)]

    def _announced_in(self, slots: Sequence[range]) -> list[Block]:
        blocks, guests = self.table.unfolded_in(slots), self.guests.names
        assert len(blocks) <= len(self.table), f"{len(blocks)} of {len(self.table)} blocks"
        return [one for one in blocks if one.hash not in guests] if guests else blocks

    # --- going ------------------------------------------------------------------------------

    def make_room(self, count: int, block_bytes: int, now_ms: int, namespace: bytes = b"") -> int:
        """Evict for `count` blocks of this size and namespace; returns how many can be staged."""
        room = self.table.room_for(count, block_bytes)
        if room == count:
            return count
        search = block_bytes, self.tenants.of(namespace)
        if now_ms < self._search_at_ms.get(search, 0):
            return room
        self.unpin_ended()
        room = self._evict_for(count, block_bytes, now_ms, namespace)
        for _ in range(YIELDING_MAX):
            if room or self._staging:
                break
            claim = self.table.claim(count, block_bytes, namespace)
            if not self.session_pins.give_way(claim, block_bytes):
                break
            room = self._evict_for(count, block_bytes, now_ms, namespace)
        if self._staging and room < count:
            self.hits.ask_to_write(block_bytes)
            again_ms = now_ms + self.table.idle_count // SEARCHED_PER_MS
            later = {one: at_ms for one, at_ms in self._search_at_ms.items() if at_ms > now_ms}
            self._search_at_ms = later | {search: again_ms}
        return room

    def _evict_for(self, count: int, block_bytes: int, now_ms: int, namespace: bytes) -> int:
        """Evict unpinned blocks: guests first, then demoted ones, then the policy's choice."""
        assert count > 0, f"room for {count} blocks of {block_bytes} bytes"
        for first in (self.guests, self.demoted):
            short = count - self.table.room_for(count, block_bytes) if first.names else 0
            if short:
                self._evict_first(first, short, block_bytes, now_ms, namespace)
        may_leave = self._below.tester() if self._staging else None
        victims = self.table.victims(count, block_bytes, may_leave, namespace)
        self._evict(victims.chosen, self.policy_name, now_ms)
        if victims.emptied:
            self._counts["slabs_moved"] += 1
            self._evict(victims.emptied, ANOTHER_SIZE, now_ms)
        room = self.table.room_for(count, block_bytes)
        assert 0 <= room <= count, f"room for {room} of {count} blocks of {block_bytes} bytes"
        return room

    def _evict_first(
        self, first: Guests, count: int, block_bytes: int, now_ms: int, namespace: bytes
    ) -> None:
        slot_bytes = self.table.pool.layout.slot_bytes_of(block_bytes)
        tenants = list(self.tenants)
        if claim := self.table.claim(count, block_bytes, namespace):
            # A guest goes before the blocks of its own tenant, not before those of another.
            lost_bytes = count * block_bytes
            tenants = [one for one in claim.tenants if claim.may_lose(one, lost_bytes)]
        victims = list(islice(filter(self._is_free, first.of(slot_bytes, tenants)), count))
        assert len(victims) <= len(first), "a guest leaves once"
        if first is self.guests:
            self._announce_removed([self.table.evict(name) for name in victims], "guest", now_ms)
        else:
            self._evict(victims, DEMOTED, now_ms)

    def _is_free(self, name: SequenceHash) -> bool:
        slot = self.table.find(name)
        may_leave = slot is not None and not self.table.pin_count(slot)
        return may_leave and (not self._staging or name in self._below)

    def _evict(self, names: Sequence[SequenceHash], by: str, now_ms: int) -> None:
        evicted = [self.table.evict(name) for name in names]
        self._announce_removed(evicted, "evicted", now_ms, detail=by)

    def evict_idle(self, count: int, now_ms: int) -> int:
        """Evict up to `count` blocks of any size, for an operator; returns how many have left."""
        while not self._staging and self.table.idle_count < count:
            if not self.session_pins.give_way():
                break
        idle = self.table.longest_idle(self.table.idle_count if self._staging else count)
        if self._staging:
            self.hits.tell_unwritten([name for name in idle if name not in self._below])
            idle = [name for name in idle if name in self._below][:count]
        assert len(idle) <= count, f"{len(idle)} blocks are evicted for {count}"
        self._evict(idle, self.policy_name, now_ms)
        return len(idle)

    def tick(self, now_ms: int) -> None:
        """End what ends by time: hints of agents, and shares of tenants."""
        self.tenants.tick(now_ms)
        self.session_pins.tick(now_ms)
        self.late.tick(now_ms)

    def settle(self) -> None:
        """Remember the last answer, and tell the disk tier of blocks that were asked for again."""
        self.known.settle()
        self.hits.settle()

    def remove(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remove blocks: no lookup finds them again, and reads under way go to their end."""
        names = list(names)
        self.session_pins.left(names)
        self.let_go(slot for slot in self.table.find_all(names) if slot is not None)
        gone = [block for name in names if (block := self.table.discard(name)) is not None]
        self._announce_removed(gone, reason, now_ms)

    def _announce_removed(
        self, blocks: Sequence[Block], reason: str, now_ms: int, *, detail: str = ""
    ) -> None:
        assert reason, "blocks leave for a reason"
        self._counts[f"evictions.{reason}"] += len(blocks)
        if not blocks:
            return
        names = [block.hash for block in blocks]
        self._findable.remove(names, in_tables=True)
        self.keep(names)
        self.diary.note_all(now_ms, f"removed: {reason}", names)
        self.departures.note(names, reason, now_ms, detail=detail)
        if self.guests.names:
            guests = {block.hash for block in blocks if block.hash in self.guests}
            blocks = [block for block in blocks if block.hash not in guests]
            self.guests.remove(guests)
        for event in self._announcer.removed(blocks, reason):
            self._emit(Publish(event))

    # --- questions --------------------------------------------------------------------------

    def size_of(self, slots: Iterable[int | None], name: SequenceHash, own: Namespaces) -> int:
        """Return the size of the blocks of a run, as its blocks that are here say; 0: not known.

        `name`: the first block that lies below, in one of the namespaces `own`.
        """
        for slot in slots:
            if slot is not None:
                return self.table.block(slot).bytes
        sizes = list(self.table.pool.sizes)
        return self._below.block_bytes(name, own) or (sizes[0] if len(sizes) == 1 else 0)

    def story(self, name: SequenceHash) -> list[str]:
        """Return what happened to a block lately."""
        return self.diary.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.table.check()
        self.known.check()
        self.session_pins.check()
        self.guests.check(self.table)
        self.demoted.check(self.table, self.guests.names)
        self.late.check()
