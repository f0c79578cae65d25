"""A disk among others: which blocks it writes, how much, and what becomes of it when it fails."""

from __future__ import annotations

from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MS
from kvbm_disk_tier.core.disk_breaker import SLOW_MS
from kvbm_disk_tier.core.effects import LeaseHost, ReadSlots, SayAccepting, WriteSlots
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import ReadFailed, WritersKnown
from kvbm_disk_tier.core.shards import Shards
from kvbm_disk_tier.core.write_budget import DAY_MS

from tests.services.disk_tier.helpers import (
    BLOCK_BYTES,
    SLOT_BYTES,
    Disk,
    asked,
    name,
    of,
    one,
    refusal,
)

HOUR_MS = DAY_MS // 24


def fail_reads(disk: Disk, number: int, reason: str = "transfer_failed") -> list[object]:
    """So many reads of a block in a row, of which nothing comes back."""
    said: list[object] = []
    for _ in range(number):
        read = one(disk.fill(1), ReadSlots)
        said += of(disk.step(ReadFailed(read.read, reason)), SayAccepting)
    return said


def test_of_several_disks_each_writes_its_own_blocks() -> None:
    disk, other = Disk(slots=9), Shards("1")
    other.set({"0", "1"})
    disk.step(WritersKnown(frozenset({"0", "1"})))
    wanted = range(1, 9)
    ours = [number for number in wanted if not other.owned([name(number)])]
    assert 0 < len(ours) < 8
    lease = one(disk.host_stored(*wanted), LeaseHost)
    assert asked(lease) == ours
    disk.finish([lease])
    # The other one is gone: from now on all are ours, and what is there is not written again.
    disk.step(WritersKnown(frozenset({"0"})))
    assert sorted(asked(one(disk.hit(*wanted), LeaseHost))) == sorted(set(wanted) - set(ours))


def test_who_is_not_among_the_writers_writes_nothing_and_is_read_from() -> None:
    disk = Disk()
    disk.store(1)
    disk.step(WritersKnown(frozenset({"1"})))
    assert disk.host_stored(2) == []
    assert one(disk.fill(1), ReadSlots)


def test_a_disk_that_fails_is_bypassed_and_gets_another_chance() -> None:
    disk = Disk(slots=4)
    disk.store(1)
    assert fail_reads(disk, FAILURES_MAX) == [SayAccepting(False)]
    assert refusal(disk.fill(1)) == "disk_bypassed"
    assert disk.host_stored(2) == [], "it waits"
    assert disk.core.view.statistics().figures["disk_bypassed"] == 1
    assert disk.wait(PAUSE_MS - 1) == []
    effects = disk.wait(1)
    assert SayAccepting(True) in effects
    disk.finish(effects)
    assert disk.announced == {1, 2}, "the first write was the probe"
    assert disk.core.view.statistics().figures["disk_bypassed"] == 0
    assert one(disk.fill(1), ReadSlots)


def test_a_probe_that_fails_bypasses_it_for_longer() -> None:
    disk = Disk()
    disk.store(1)
    fail_reads(disk, FAILURES_MAX)
    disk.wait(PAUSE_MS)
    assert fail_reads(disk, 1) == [SayAccepting(False)]
    disk.wait(PAUSE_MS)
    assert refusal(disk.fill(1)) == "disk_bypassed"
    disk.wait(PAUSE_MS)
    assert one(disk.fill(1), ReadSlots)
    assert disk.counts["disk_bypasses"] == 2


def test_writes_that_fail_count_too() -> None:
    disk = Disk(slots=9)
    for number in range(1, FAILURES_MAX + 1):
        write = one(disk.leased(one(disk.host_stored(number), LeaseHost)), WriteSlots)
        effects = disk.write_failed(write)
        disk.finish(effects)
    assert SayAccepting(False) in effects


def test_what_is_leased_for_a_bypassed_disk_is_given_back() -> None:
    limits = DiskTierLimits(writes_max=FAILURES_MAX, batch_blocks_max=1, ahead_batches=0)
    disk = Disk(slots=9, limits=limits)
    leases = of(disk.host_stored(*range(1, 8)), LeaseHost)
    effects = [effect for lease in leases for effect in disk.leased(lease)]
    writes, ahead = of(effects, WriteSlots), of(effects, LeaseHost)
    assert len(writes) == len(ahead) == FAILURES_MAX
    assert [disk.leased(lease) for lease in ahead] == [[], [], []]
    ends = [effect for write in writes for effect in disk.write_failed(write)]
    assert SayAccepting(False) in ends
    assert len(of(ends, WriteSlots)) == FAILURES_MAX - 1, "until the last of them has failed"
    disk.finish(ends)
    assert disk.counts["dropped.write_bypassed"] == 2, "the third, and a seventh leased meanwhile"
    assert len(disk.core.writes.flying.by_id) == 0


def test_short_deadlines_and_old_arenas_say_nothing_of_the_disk() -> None:
    disk = Disk()
    disk.store(1)
    for reason in ("transfer_timeout", "stale_arena"):
        assert fail_reads(disk, 2 * FAILURES_MAX, reason) == []
    assert "disk_troubles.failed" not in disk.counts


def test_a_slow_disk_is_bypassed_as_well() -> None:
    disk = Disk()
    disk.store(1)
    for _ in range(FAILURES_MAX):
        read = one(disk.fill(1), ReadSlots)
        disk.now_ms += SLOW_MS
        effects = disk.read(read)
    assert SayAccepting(False) in effects
    assert disk.counts["disk_troubles.slow"] == FAILURES_MAX


def test_without_budget_blocks_wait() -> None:
    """24 slots a day: one bucket holds one slot, and fills in an hour and some."""
    disk = Disk(slots=4, write_budget=24 * SLOT_BYTES)
    assert disk.host_stored(1) == []
    assert disk.wait(HOUR_MS) == []
    disk.finish(disk.wait(HOUR_MS))
    assert disk.announced == {1}
    assert disk.host_stored(2) == []
    disk.finish(disk.wait(2 * HOUR_MS))
    assert disk.announced == {1, 2}


def test_what_was_not_written_does_not_cost() -> None:
    disk = Disk(slots=4, write_budget=24 * SLOT_BYTES)
    disk.host_stored(1)
    lease = one(disk.wait(2 * HOUR_MS), LeaseHost)
    assert disk.lease_failed(lease, "stale_epoch") == []
    lease = one(disk.host_stored(2), LeaseHost)
    disk.finish(disk.leased(lease, 2))
    disk.finish(disk.host_stored(3))
    assert disk.announced == {3}


def test_the_amplification_of_writes_is_known() -> None:
    disk = Disk(slots=4)
    assert disk.core.view.statistics().figures["write_amplification"] == 1.0
    disk.store(1, 2)
    written = 2 * (SLOT_BYTES + 128)
    figures = disk.core.view.statistics().figures
    assert figures["write_amplification"] == written / (2 * BLOCK_BYTES)
