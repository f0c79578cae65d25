"""Writes in flight: one phase each, and no move that the table does not have."""

from __future__ import annotations

import pytest
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MS
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.machine import InvalidTransition
from kvbm_disk_tier.core.effects import LeaseHost, ReleaseHost, WriteSlots
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.write_batch import Phase, Write, WritesInFlight
from kvbm_disk_tier.core.write_budget import DAY_MS
from kvbm_disk_tier.core.write_queue import Origin

from tests.services.disk_tier.helpers import HOST_EPOCH, SLOT_BYTES, Disk, asked, name, of, one

ORIGIN = Origin("0")


def in_flight(diary: Diary | None = None) -> WritesInFlight:
    """Writes 1 and 2, both waiting for their lease."""
    writes = WritesInFlight(diary or Diary())
    for number in (1, 2):
        writes.begin(Write(number, "0", HOST_EPOCH, [name(number)], ORIGIN))
    return writes


def test_a_write_is_in_one_phase_and_leaves_with_its_blocks() -> None:
    writes = in_flight()
    second = writes.find(2)
    writes.move(second, "leased")
    writes.check()
    assert [write.id for write in writes.in_phase(Phase.LEASING)] == [1]
    assert [write.id for write in writes.in_phase(Phase.LEASED)] == [2]
    writes.move(writes.find(1), "refused")
    writes.check()
    assert (list(writes.by_id), writes.names) == ([2], {name(2)})


def test_the_oldest_write_goes_first_whichever_was_leased_first() -> None:
    writes = in_flight()
    for number in (2, 1):
        writes.move(writes.find(number), "leased")
    assert [write.id for write in writes.in_phase(Phase.LEASED)] == [1, 2]


def test_a_move_beyond_the_table_raises_with_the_story_of_the_blocks() -> None:
    diary = Diary()
    diary.note(7, "was seen", name(1))
    writes = in_flight(diary)
    with pytest.raises(InvalidTransition, match=r"no 'written' in LEASING.*7 ms was seen"):
        writes.move(writes.find(1), "written")


def test_what_comes_back_twice_is_a_mistake() -> None:
    writes = in_flight()
    write = writes.find(1)
    writes.move(write, "unanswered")
    with pytest.raises(AssertionError, match="no write has id 1"):
        writes.find(1)
    with pytest.raises(AssertionError, match="a write that has ended"):
        writes.move(write, "unanswered")


def test_a_block_is_in_one_write() -> None:
    with pytest.raises(AssertionError, match="a block is in two writes"):
        in_flight().begin(Write(3, "0", HOST_EPOCH, [name(2)], ORIGIN))


# --- the share of a copier --------------------------------------------------------------------


def test_what_is_over_the_share_is_written_when_a_lease_has_ended() -> None:
    """1. Of blocks 1 and 2 the host tier lends one. 2. Nothing is asked for while it is out.

    3. It comes back: block 2 is asked for again. It once counted as gone, and was never written.
    """
    disk = Disk(staging=True, limits=DiskTierLimits(writes_max=2, batch_blocks_max=2))
    effects = disk.leased(one(disk.host_stored(1, 2), LeaseHost), over_share=[2])
    assert of(effects, LeaseHost) == []
    release = one(disk.written(one(effects, WriteSlots)), ReleaseHost)
    effects = disk.released(release)
    assert asked(one(of(effects, LeaseHost), LeaseHost)) == [2]
    disk.finish(effects)
    assert disk.announced == {1, 2}
    assert disk.core.view.idle()
    assert not [name for name in disk.counts if name.startswith("dropped.")]


def test_a_share_that_a_former_life_holds_is_asked_for_after_a_pause() -> None:
    """Nothing of ours will come back: the leases of the life before end by their deadline."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=2))
    effects, tried = disk.host_stored(1, 2), 0
    while leases := of(effects, LeaseHost):
        tried += 1
        effects = disk.leased(leases[0], over_share=asked(leases[0]))
        effects += disk.released(one(of(effects, ReleaseHost), ReleaseHost))
    assert tried == FAILURES_MAX
    assert disk.wait(PAUSE_MS - 1) == []
    disk.finish(disk.wait(1))
    assert disk.announced == {1, 2}


def test_a_lease_that_lends_nothing_waits_for_those_that_run() -> None:
    """1. Block 1 is being written. 2. Block 2 is over the share: it is not asked for at once."""
    disk = Disk(limits=DiskTierLimits(writes_max=2, batch_blocks_max=1))
    first, second = of(disk.host_stored(1, 2), LeaseHost)
    write = one(disk.leased(first), WriteSlots)
    release = one(disk.leased(second, over_share=[2]), ReleaseHost)
    assert disk.released(release) == []
    given_back = one(disk.written(write), ReleaseHost)
    assert asked(one(of(disk.released(given_back), LeaseHost), LeaseHost)) == [2]


def test_what_is_over_the_share_keeps_its_place_in_a_full_queue() -> None:
    """The newest makes room. Block 2 was dropped once, and with it what waits below it."""
    limits = DiskTierLimits(writes_max=1, batch_blocks_max=2, pending_max=2)
    disk = Disk(slots=9, limits=limits)
    lease = one(disk.host_stored(1, 2), LeaseHost)
    disk.host_stored(3, 4)
    effects = disk.leased(lease, over_share=[2])
    effects = disk.released(one(disk.written(one(effects, WriteSlots)), ReleaseHost))
    assert asked(one(effects, LeaseHost)) == [2, 3]
    assert disk.counts["dropped.write_pending_full"] == 1
    disk.finish(effects)
    assert disk.announced == {1, 2, 3}


def test_what_is_over_the_share_goes_with_the_block_before_it() -> None:
    """Block 1 has left: block 2 cannot be reached on disk, and is asked for no more."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=2))
    effects = disk.leased(one(disk.host_stored(1, 2), LeaseHost), 1, over_share=[2])
    assert of(disk.released(one(effects, ReleaseHost)), LeaseHost) == []
    assert disk.counts["dropped.write_cut_off"] == 1
    assert disk.core.view.idle()


def test_what_is_over_the_share_is_cut_off_when_its_turn_would_come() -> None:
    """1. Neither batch is answered. 2. Of the next tries the first finds 1, 2 gone, and the second
    has 3 over its share: 3 cannot be reached, nor can 4, and no tries are remembered of them."""
    disk = Disk(slots=9, limits=DiskTierLimits(writes_max=2, batch_blocks_max=2))
    leases = of(disk.host_stored(1, 2, 3, 4), LeaseHost)
    first, second = of([one for lease in leases for one in disk.lease_failed(lease)], LeaseHost)
    effects = disk.leased(first, 1, 2) + disk.leased(second, over_share=[3])
    for release in of(effects, ReleaseHost):
        assert of(disk.released(release), LeaseHost) == []
    assert disk.core.view.idle()
    assert disk.counts["dropped.write_cut_off"] == 2
    assert not disk.core.pending.retries.tries


def test_the_budget_is_charged_for_what_was_lent() -> None:
    """1. Blocks 1 and 2 are being written. 2. Of 3 and 4, which wait for a turn, one was lent."""
    limits = DiskTierLimits(writes_max=1, batch_blocks_max=2, ahead_batches=0)
    disk = Disk(slots=9, limits=limits, write_budget=96 * SLOT_BYTES)
    disk.core.pending.budget.take(0, disk.now_ms)
    disk.now_ms += DAY_MS
    effects = disk.leased(one(disk.host_stored(1, 2, 3, 4), LeaseHost))
    disk.leased(one(effects, LeaseHost), over_share=[4])
    assert disk.core.pending.budget.level == SLOT_BYTES
