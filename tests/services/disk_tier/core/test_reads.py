"""The disk tier's core: every path of a read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbm_common.wire.events import Removed
from kvbm_disk_tier.core.effects import Effect, LeaseHost, ReadSlots, WriteSlots
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import ArenaKnown, Depth, ReadFailed, ReadLanded

from tests.services.disk_tier.helpers import (
    ARENA_SLOTS,
    HOST_EPOCH,
    SLOT_BYTES,
    Disk,
    arena,
    block,
    filled,
    name,
    numbers,
    of,
    one,
    opened,
    refusal,
)


def test_a_fill_reads_what_is_there_into_the_lent_slots_and_names_what_is_gone() -> None:
    """1 and 2 are on disk, 7 never was."""
    disk = Disk()
    disk.store(1, 2)
    read = one(disk.fill(2, 7, 1, slots=[50, 51, 52]), ReadSlots)
    assert (read.epoch, read.sources, read.targets) == (HOST_EPOCH, (1, 0), (50, 52))
    assert disk.core.inventory.table.counts()["active"] == 2
    assert filled(disk.read(read)) == {2: "", 7: "gone", 1: ""}
    assert disk.core.inventory.table.counts()["active"] == 0
    assert (disk.counts["fill_blocks"], disk.counts["dropped.fill_gone"]) == (2, 1)


def test_a_fill_of_nothing_that_is_here_is_answered_at_once() -> None:
    """Nothing to read."""
    disk = Disk()
    assert filled(disk.fill(7, 8)) == {7: "gone", 8: "gone"}
    assert filled(disk.fill()) == {}


def test_wrong_bytes_are_a_miss_quarantined_and_announced() -> None:
    """1 is rotten: nobody finds it again, neither now nor after a restart."""
    disk = Disk()
    disk.store(1, 2)
    effects = disk.read(one(disk.fill(1, 2), ReadSlots), 1)
    assert filled(effects) == {1: "corrupt", 2: ""}
    assert disk.announced == {2}
    removed = one(disk.events, Removed)
    assert (removed.hashes, removed.reason) == ([name(1).hex()], "corrupt")
    assert disk.recovered() == disk.on_disk() == {2: 1}
    assert filled(disk.fill(1)) == {1: "gone"}
    disk.store(1)
    assert disk.announced == {1, 2}, "written anew, it is good again"


def test_two_reads_of_one_rotten_block_quarantine_it_once() -> None:
    """… and not the good copy that was written in between."""
    disk = Disk()
    disk.store(1)
    first, second = one(disk.fill(1), ReadSlots), one(disk.fill(1), ReadSlots)
    assert filled(disk.read(first, 1)) == {1: "corrupt"}
    disk.store(1)
    assert disk.on_disk() == {1: 1}, "the pinned slot is not reused"
    assert filled(disk.read(second, 1)) == {1: "corrupt"}
    assert disk.announced == {1}
    assert disk.recovered() == disk.on_disk()


def test_a_failed_read_is_a_miss_that_quarantines_nothing() -> None:
    """Late or broken: the block may be all right."""
    disk = Disk()
    disk.store(1)
    read = one(disk.fill(1, 7), ReadSlots)
    effects = disk.step(ReadFailed(read.read, "transfer_timeout"))
    assert filled(effects) == {1: "transfer_timeout", 7: "gone"}
    assert disk.announced == {1}
    assert disk.core.inventory.table.counts()["active"] == 0


@pytest.mark.parametrize(
    ("code", "request_of"),
    [
        ("stale_arena", lambda disk: disk.fill(1, epoch=HOST_EPOCH + 1)),
        ("too_late", lambda disk: disk.fill(1, until_ms=disk.now_ms)),
        ("bad_slot", lambda disk: disk.fill(1, slots=[ARENA_SLOTS])),
        ("duplicate", lambda disk: disk.fill(1, 2, slots=[5, 5])),
        ("duplicate", lambda disk: disk.fill(1, 1, slots=[5, 6])),
    ],
)
def test_a_fill_that_cannot_be_right_is_refused(code: str, request_of: object) -> None:
    """Typed, counted, and no slot is touched."""
    disk = Disk()
    disk.store(1, 2)
    assert callable(request_of)
    effects: list[Effect] = request_of(disk)
    assert refusal(effects) == code
    assert of(effects, ReadSlots) == []
    assert disk.counts[f"dropped.fill_{code}"] > 0


def test_reads_have_limits_and_a_fill_that_waited_too_long_is_refused() -> None:
    """One may be in flight, one may wait, the third is too many.

    The second's deadline passes meanwhile.
    """
    disk = Disk(limits=DiskTierLimits(reads_max=1, reads_waiting_max=1))
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    assert disk.fill(1, until_ms=disk.now_ms + 5) == []
    assert refusal(disk.fill(1)) == "busy"
    disk.now_ms += 5
    answers = disk.read(read)
    assert len(answers) == 2
    assert refusal(answers[1:]) == "too_late"
    assert disk.core.view.idle()


def test_what_the_disk_was_measured_to_take_is_in_flight() -> None:
    """Two blocks read and one written keep it busy: a fill more than that is begun, no second."""
    disk = Disk(slots=9, limits=DiskTierLimits(batch_blocks_max=2, ahead_batches=0), ready=False)
    disk.step(ArenaKnown(arena()))
    disk.step(replace(opened(9), depth=Depth(2, 1, 4096)))
    assert disk.counts["bytes.measuring"] == 4096
    leases = of(disk.host_stored(1, 2, 3, 4, 5), LeaseHost)
    first = disk.leased(leases[0])
    assert of(disk.leased(leases[1]), WriteSlots) == [], "one batch is in flight"
    disk.finish(first)
    assert disk.announced == {1, 2, 3, 4}
    one(disk.fill(1), ReadSlots)
    second = one(disk.fill(2, 3), ReadSlots)
    assert disk.fill(4) == []
    assert one(disk.read(second), ReadSlots).blocks == (block(4),)


def test_while_blocks_are_summed_up_the_disk_reads_others() -> None:
    """1. One block may be in flight: the second waits. 2. The first has landed: the second starts.
    3. It has landed, too: with two that are summed up the third waits. 4. The third starts when the
    first has ended; what lands after its end is no news."""
    disk = Disk(limits=DiskTierLimits(read_blocks_max=1, ahead_batches=0))
    disk.store(1, 2, 3)
    first = one(disk.fill(1), ReadSlots)
    assert disk.fill(2) == []
    second = one(disk.step(ReadLanded(first.read)), ReadSlots)
    assert disk.fill(3) == []
    assert disk.step(ReadLanded(second.read)) == []
    third = one(disk.read(first), ReadSlots)
    assert third.blocks == (block(3),)
    assert disk.step(ReadLanded(first.read)) == []
    disk.read(second)
    disk.read(third)
    assert disk.core.view.idle()


def test_what_was_moved_in_a_smaller_store_is_of_the_budget() -> None:
    """A slot was copied before the store was open."""
    disk = Disk(write_budget=48 * SLOT_BYTES, ready=False)
    replay = Replay({}, 1, 0, 0, moved_bytes=SLOT_BYTES)
    disk.step(replace(opened(9), replay=replay))
    disk.core.pending.budget.take(0, disk.now_ms)
    assert disk.core.pending.budget.level == -SLOT_BYTES


def test_what_was_written_to_measure_is_of_the_budget() -> None:
    """A day of 48 slots: the burst is two slots, and the measurement took one of them."""
    disk = Disk(write_budget=48 * SLOT_BYTES, ready=False)
    disk.step(ArenaKnown(arena()))
    disk.step(replace(opened(4), depth=Depth(None, None, SLOT_BYTES)))
    disk.core.pending.budget.take(0, disk.now_ms)
    assert disk.core.pending.budget.level == -SLOT_BYTES


def test_the_front_of_a_short_run_overtakes_the_tail_of_a_long_one() -> None:
    """One may be in flight. A run of three fills comes, then a short run.

    Its front goes before the tails of the long one, but none waits without end.
    """
    disk = Disk(slots=9, limits=DiskTierLimits(reads_max=1))
    disk.store(*range(1, 9))
    served = [one(disk.fill(1, ahead=0), ReadSlots)]
    for number, ahead in ((2, 16), (3, 32)):
        assert disk.fill(number, ahead=ahead) == []
    disk.now_ms += 1
    assert disk.fill(7, ahead=0) == []
    disk.now_ms += 20
    assert disk.fill(8, ahead=0) == []
    while len(served) < 5:
        served.append(one(disk.read(served[-1]), ReadSlots))
    assert [numbers(read.blocks) for read in served] == [[1], [7], [2], [8], [3]]
