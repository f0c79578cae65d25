"""The blocks of a large tier: what the search for those that may leave takes, whoever asks."""

from __future__ import annotations

from collections import Counter
from time import process_time

from kvbm_common.identity import Namespace, of_tenant
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.slots import Block
from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.held_blocks import SEARCHED_PER_MS, HeldBlocks
from kvbm_host_tier.core.hit_reports import UNWRITTEN_TOLD_MAX
from kvbm_host_tier.core.limits import HostTierLimits, Means
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import Effect, TellHits

from tests.services.host_tier.helpers import NAMESPACE, name, of

GOLD, SILVER = of_tenant(NAMESPACE, "gold"), of_tenant(NAMESPACE, "silver")
COUNT = 20_000
"""Blocks of one tenant: a walk over all of them takes some tens of milliseconds."""
OFFERED = 16
"""Blocks that are to find room."""


class Tier:
    """The blocks of a host tier of some slots, whose effects go nowhere."""

    def __init__(self, slot_count: int, *, staging: bool = False) -> None:
        self.below = LowerTiers()
        announcer = Announcer(host="h", source="host-tier-0", tier="host", epoch=1)
        announcer.cleared("start")
        self.disk = Announcer(host="h", source="disk-tier-0", tier="disk", epoch=1)
        limits, self.effects = HostTierLimits(), list[Effect]()
        self.held = HeldBlocks(
            announcer, self.below, FormerBlocks(), Findable(limits),
            Means(limits, Counter(), self.effects.append), policy="lru", staging=staging,
        )  # fmt: skip
        self.held.lay_out(Layout(UNIT_BYTES, slot_count, 1024))

    def store(self, numbers: range, namespace: Namespace = NAMESPACE) -> None:
        """Commit blocks, for which there is room."""
        names = [name(number) for number in numbers]
        slots = self.held.stage(names, UNIT_BYTES, "in a test", 0)
        blocks = [Block(one, name(0), namespace.digest, 1, UNIT_BYTES) for one in names]
        self.held.commit(list(zip(slots, blocks, strict=True)), 0)

    def take_guests(self, numbers: range, namespace: Namespace = NAMESPACE) -> list[int]:
        """Take blocks of other hosts, for which there is room; returns their slots."""
        names = [name(number) for number in numbers]
        slots = self.held.stage(names, UNIT_BYTES, "in a test", 0)
        for one, slot in zip(names, slots, strict=True):
            block = Block(one, name(0), namespace.digest, 1, UNIT_BYTES)
            self.held.add_guest(block, slot)
            self.held.register(slot, block)
        return slots

    def write(self, numbers: range) -> None:
        """Have the disk tier announce blocks."""
        blocks = [Block(name(number), name(0), NAMESPACE.digest, 1, 4096) for number in numbers]
        for event in self.disk.stored(blocks):
            self.below.views["disk"].apply("0", event)

    def make_room(self, namespace: Namespace = NAMESPACE, now_ms: int = 0) -> int:
        """Have blocks leave for those of an offer; returns how many can come."""
        return self.held.make_room(OFFERED, UNIT_BYTES, now_ms, namespace.digest)


def test_demoted_blocks_of_one_tenant_are_not_walked_for_another() -> None:
    """All of gold's are demoted, and within its share. A hundred offers of silver cost silver's."""
    silvers = 2 * COUNT
    tier = Tier(COUNT + silvers)
    tier.store(range(1, COUNT + 1), GOLD)
    tier.store(range(COUNT + 1, COUNT + silvers + 1), SILVER)
    assert tier.held.demote([name(number) for number in range(1, COUNT + 1)]) == COUNT
    started_s = process_time()
    for offer in range(100):
        assert tier.make_room(SILVER) == OFFERED
        first = COUNT + silvers + 1 + offer * OFFERED
        tier.store(range(first, first + OFFERED), SILVER)
    assert process_time() - started_s < 0.5
    assert len(tier.held.demoted) == COUNT
    assert tier.held.demote([name(1)]) == 0
    tier.held.check()


def test_the_oldest_guests_leave_whichever_tenant_was_seen_first() -> None:
    """Goal: silver, first seen and far below its share, does not lose its fresh guests."""
    tier = Tier(1_000)
    tier.store(range(1, 11), SILVER)
    tier.store(range(11, 611), GOLD)
    tier.take_guests(range(1_001, 1_301), GOLD)
    tier.take_guests(range(2_001, 2_091), SILVER)
    assert tier.make_room(SILVER) == OFFERED
    gone = [number for number in range(1_001, 1_301) if name(number) not in tier.held.guests]
    assert gone == list(range(1_001, 1_001 + OFFERED))
    assert all(name(number) in tier.held.guests for number in range(2_001, 2_091))
    tier.held.check()


def test_guests_that_are_pinned_hide_none_behind_them() -> None:
    """Goal: a free guest leaves before a block that engines of its own tenant have asked for."""
    tier = Tier(4_000)
    for slot in tier.take_guests(range(1, 2_501)):
        tier.held.table.pin(slot)
    tier.store(range(10_001, 11_001), GOLD)
    tier.take_guests(range(20_001, 20_501), GOLD)
    assert tier.make_room(GOLD) == OFFERED
    assert all(tier.held.table.holds(name(number)) for number in range(10_001, 11_001))
    assert len(tier.held.guests) == 3_000 - OFFERED


def test_a_full_staging_arena_is_not_searched_for_each_offer() -> None:
    """Nothing is written yet: 200 offers are refused, and one of them has searched. What the disk
    has written leaves when the pause is over, which grows with what a search takes."""
    tier = Tier(COUNT, staging=True)
    tier.store(range(1, COUNT + 1))
    started_s = process_time()
    assert [tier.make_room() for _ in range(200)] == [0] * 200
    assert process_time() - started_s < 0.5
    [told] = of(tier.effects, TellHits)
    oldest = range(COUNT, COUNT - UNWRITTEN_TOLD_MAX, -1)  # A leaf is older than its parent.
    assert told.hits.hashes == [name(number).hex() for number in oldest]
    tier.write(range(1, OFFERED + 1))
    pause_ms = COUNT // SEARCHED_PER_MS
    assert tier.make_room(now_ms=pause_ms - 1) == 0
    assert tier.make_room(now_ms=pause_ms) == OFFERED
    tier.held.check()


def test_a_tenant_that_finds_no_room_keeps_no_other_from_searching() -> None:
    """What is written is gold's, and within its share: silver may not have it, but gold may."""
    tier = Tier(COUNT, staging=True)
    tier.store(range(1, COUNT // 2 + 1), GOLD)
    tier.store(range(COUNT // 2 + 1, COUNT + 1), SILVER)
    tier.write(range(1, COUNT // 2 + 1))
    assert tier.make_room(SILVER) == 0
    assert tier.make_room(GOLD) == OFFERED
    tier.held.check()
