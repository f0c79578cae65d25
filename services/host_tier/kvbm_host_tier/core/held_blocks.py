"""The blocks that this tier holds, and the announcements of every one that comes or goes.

Three kinds of blocks are told apart. Most are *announced*. A *guest* was brought from a peer and
used once: it is not announced, and is the first to be evicted. In a staging arena a block may be
evicted only when a disk tier has it, because it exists nowhere else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_common.wire.verbs import Hits

from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import Emit, Publish, TellHits

HITS_MAX = 1024
"""Hits that are told per lookup at most; the rest are told the next time."""
UNWRITTEN_TOLD_MAX = 256
"""The oldest unwritten blocks of a full staging arena; the next shortage tells of the next ones."""


class HeldBlocks:
    """The committed blocks of one arena, what became of those that left, and the announcements."""

    def __init__(
        self,
        announcer: Announcer,
        *,
        below: LowerTiers,
        counts: Counter[str],
        emit: Emit,
        policy: str,
        staging: bool,
    ) -> None:
        self._staging = staging
        self._policy_name = policy
        self.table = SlotTable(0, make_policy(self.policy_name))
        self.diary = Diary()
        self.departures = Departures()
        """What became of the blocks that have left."""
        self.draining = False
        """An operator wants no new blocks here."""
        self._announcer = announcer
        self._below = below
        self._counts = counts
        self._emit = emit
        self.guests: OrderedDict[SequenceHash, None] = OrderedDict()
        """The guests, the oldest first."""
        counts["evictions.evicted"] = 0

    # --- the slots --------------------------------------------------------------------------

    def make_slots(self, slot_count: int) -> None:
        """Give the empty table its slots, once."""
        assert slot_count > 0
        self.table.lay_out(slot_count, make_policy(self.policy_name, slot_count))

    @property
    def policy_name(self) -> str:
        """Return the eviction policy; a staging arena walks the free blocks by age."""
        return "lru" if self._staging else self._policy_name

    def use_policy(self, name: str) -> bool:
        """Have another policy choose victims; False in a staging arena."""
        assert name
        if self._staging:
            return False
        self._policy_name = name
        self.table.use_policy(make_policy(name, self.table.slot_count))
        return True

    # --- coming -----------------------------------------------------------------------------

    def stage(self, names: Sequence[SequenceHash], why: str, now_ms: int) -> list[int]:
        """Take a slot for each of these blocks, for which room was made; returns the slots."""
        assert len(names) <= self.table.reset_count, self.story(names[-1])
        slots = self.table.stage_all(names)
        self.diary.note_all(now_ms, f"staged in slot {{slot}} {why}", names, slots)
        return slots

    def commit(self, arrived: Sequence[tuple[int, Block]], now_ms: int) -> None:
        """Make staged blocks findable, free to be evicted, and announce them."""
        assert arrived
        self.table.register_all(arrived)
        blocks = [block for _, block in arrived]
        names, slots = [block.hash for block in blocks], [slot for slot, _ in arrived]
        self.diary.note_all(now_ms, "committed in slot {slot}", names, slots)
        self.announce(blocks)

    def announce(self, blocks: Sequence[Block]) -> None:
        """Announce blocks that have been committed."""
        for event in self._announcer.stored(blocks):
            self._emit(Publish(event))

    def not_stored(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remember why an offload failed, to explain later misses of these blocks."""
        assert reason
        self.departures.note(names, "offload", now_ms, detail=reason)

    # --- guests -----------------------------------------------------------------------------

    def add_guest(self, name: SequenceHash) -> None:
        """Hold a block of a peer as a guest."""
        assert name not in self.guests, self.story(name)
        self.guests[name] = None

    def admit(self, names: Iterable[SequenceHash]) -> None:
        """Turn the guests among these blocks into announced blocks: they were used again."""
        if not self.guests:
            return
        admitted = [name for name in names if name in self.guests]
        for name in admitted:
            del self.guests[name]
        self._counts["peer_admitted_blocks"] += len(admitted)
        found = [slot for name in admitted if (slot := self.table.find(name)) is not None]
        self.announce([self.table.block(slot) for slot in found])

    def announced(self) -> list[Block]:
        """Return every committed block that is no guest."""
        return [block for block in self.table.blocks() if block.hash not in self.guests]

    # --- going ------------------------------------------------------------------------------

    def make_room(self, count: int, now_ms: int) -> int:
        """Evict for `count` slots; returns how many can be staged now."""
        assert count >= 0
        if count > self.table.reset_count:
            self._evict_guests(count - self.table.reset_count, now_ms)
            short = count - self.table.reset_count
            evicted = self._evict_written(short) if self._staging else self.table.make_room(count)
            self._announce_removed(evicted, "evicted", now_ms)
        return min(count, self.table.reset_count)

    def _evict_guests(self, count: int, now_ms: int) -> None:
        if not self.guests:
            return
        free = (name for name in self.guests if self._is_free(name))
        victims = list(islice(free, count))
        self._announce_removed([self.table.evict(name) for name in victims], "guest", now_ms)

    def _is_free(self, name: SequenceHash) -> bool:
        slot = self.table.find(name)
        return slot is not None and not self.table.pin_count(slot)

    def _evict_written(self, count: int) -> list[Block]:
        if count <= 0:
            return []
        free = self.table.policy.victims(len(self.table.policy))
        written = [name for name in free if name in self._below][:count]
        if len(written) < count:
            self._ask_to_write([name for name in free if name not in self._below])
        return [self.table.evict(name) for name in written]

    def _ask_to_write(self, names: Sequence[SequenceHash]) -> None:
        """Have the disk tier write the oldest of these: announced hits make it write what it lacks.

        Without this a failed write, or an eviction on disk, would hold a slot without end.
        """
        by_namespace: dict[bytes, list[str]] = {}
        for name in names[:UNWRITTEN_TOLD_MAX]:
            slot = self.table.find(name)
            assert slot is not None, self.story(name)
            by_namespace.setdefault(self.table.block(slot).namespace, []).append(name.hex())
        for namespace, hashes in by_namespace.items():
            self._emit(TellHits(Hits(namespace=namespace.hex(), hashes=hashes)))

    def tell_hits(self, namespace: bytes, names: Iterable[SequenceHash]) -> None:
        """Tell the disk tier of blocks that it does not have and that were asked for again."""
        news = hashes_to_hex(self._below.missing(names)[:HITS_MAX])
        if news:
            self._emit(TellHits(Hits(namespace=namespace.hex(), hashes=news)))

    def remove(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remove blocks: no lookup finds them again, and reads under way go to their end."""
        gone = [block for name in names if (block := self.table.discard(name)) is not None]
        self._announce_removed(gone, reason, now_ms)

    def _announce_removed(self, blocks: Sequence[Block], reason: str, now_ms: int) -> None:
        assert reason
        self._counts[f"evictions.{reason}"] += len(blocks)
        if not blocks:
            return
        names = [block.hash for block in blocks]
        self.diary.note_all(now_ms, f"removed: {reason}", names)
        detail = self.policy_name if reason == "evicted" else ""
        self.departures.note(names, reason, now_ms, detail=detail)
        if self.guests:
            guests = {block.hash for block in blocks if block.hash in self.guests}
            blocks = [block for block in blocks if block.hash not in guests]
            for name in guests:
                del self.guests[name]
        for event in self._announcer.removed(blocks, reason):
            self._emit(Publish(event))

    # --- questions --------------------------------------------------------------------------

    def story(self, name: SequenceHash) -> list[str]:
        """Return what happened to a block lately."""
        return self.diary.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.table.check()
        for name in self.guests:
            assert self.table.find(name) is not None, f"a guest is not here: {self.story(name)}"
