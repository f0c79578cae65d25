"""A disk among others: which blocks it writes, how much, and what becomes of it when it fails."""

from __future__ import annotations

from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MS
from kvbm_disk_tier.core.effects import (
    AppendJournal,
    LeaseHost,
    ProbeStore,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    SayAccepting,
    WriteSlots,
)
from kvbm_disk_tier.core.health import SLOW_MS, STALLED_MS
from kvbm_disk_tier.core.journal_writer import REWRITE_PAUSE_MS
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import (
    JournalFailed,
    JournalRewritten,
    ReadFailed,
    Synchronised,
    WritersKnown,
)
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
    assert disk.wait(1) == [ProbeStore()]
    assert refusal(disk.fill(1)) == "disk_bypassed", "until the probe has ended"
    effects = disk.probed()
    assert SayAccepting(True) in effects
    disk.finish(effects)
    assert disk.announced == {1, 2}
    assert disk.core.view.statistics().figures["disk_bypassed"] == 0
    assert one(disk.fill(1), ReadSlots)


def test_a_probe_that_fails_bypasses_it_for_longer() -> None:
    disk = Disk()
    disk.store(1)
    fail_reads(disk, FAILURES_MAX)
    assert disk.wait(PAUSE_MS) == [ProbeStore()]
    assert disk.probed(read_failure="io") == []
    assert disk.wait(PAUSE_MS) == []
    assert refusal(disk.fill(1)) == "disk_bypassed"
    assert disk.wait(PAUSE_MS) == [ProbeStore()]
    assert disk.probed() == [SayAccepting(True)]
    assert one(disk.fill(1), ReadSlots)


def test_a_disk_that_fails_again_after_a_probe_is_bypassed_for_longer() -> None:
    """A probe is small, and may succeed where blocks fail: only a block resets the pause."""
    disk = Disk()
    disk.store(1)
    for pause_ms in (PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS):
        fail_reads(disk, FAILURES_MAX)
        assert disk.wait(pause_ms - 1) == []
        disk.finish(disk.wait(1))
    disk.finish(disk.fill(1))
    fail_reads(disk, FAILURES_MAX)
    assert disk.wait(PAUSE_MS) == [ProbeStore()]


# --- writes and the journal ---------------------------------------------------------------------


def fail_commits(disk: Disk, *wanted: int) -> list[object]:
    """Blocks are written well, each in a batch of its own, and no record of them can be."""
    said: list[object] = []
    for number in wanted:
        write = one(disk.leased(one(disk.host_stored(number), LeaseHost)), WriteSlots)
        append = one(disk.released(one(disk.written(write), ReleaseHost)), AppendJournal)
        said += disk.step(JournalFailed(append.write, "journal", "No space left on device"))
    return said


def reasons(disk: Disk) -> list[str]:
    """Why it is not ready."""
    return disk.core.view.statistics().reasons


def test_a_journal_that_fails_stops_the_writes_though_every_block_is_written_well() -> None:
    """What is on the disk is read as before; the reason is what the system said."""
    disk = Disk(slots=9)
    disk.store(1)
    assert SayAccepting(False) in fail_commits(disk, *range(11, 11 + 2 * FAILURES_MAX, 2))
    assert reasons(disk) == [
        "the disk takes no blocks: the journal cannot be written: No space left on device"
    ]
    assert not disk.core.view.statistics().ready
    assert of(disk.host_stored(7), LeaseHost) == []
    read = one(disk.fill(1), ReadSlots)
    disk.finish([read])
    assert disk.announced == {1}
    assert disk.wait(PAUSE_MS) == [ProbeStore()]
    disk.finish(disk.probed(write_failure="No space left on device"))
    assert disk.announced == {1}
    disk.finish(disk.wait(2 * PAUSE_MS))
    assert disk.announced == {1, 7}
    assert reasons(disk) == []


def test_reads_that_fail_are_noticed_between_writes_that_go_well() -> None:
    disk = Disk(slots=9)
    disk.store(1)
    for number in range(FAILURES_MAX):
        assert reasons(disk) == []
        fail_reads(disk, 1)
        disk.store(2 + number)
    assert reasons(disk) == ["the disk is bypassed: blocks cannot be read: transfer_failed"]


def test_a_disk_that_only_reads_is_bypassed_when_reads_fail_as_well() -> None:
    """1. No block can be written. 2. None can be read, either. 3. The probe before says nothing."""
    disk = Disk(slots=9)
    disk.store(1)
    fail_commits(disk, *range(11, 11 + 2 * FAILURES_MAX, 2))
    assert disk.wait(PAUSE_MS) == [ProbeStore()]
    fail_reads(disk, FAILURES_MAX)
    assert disk.probed() == []
    assert refusal(disk.fill(1)) == "disk_bypassed"
    assert disk.wait(2 * PAUSE_MS) == [ProbeStore()]
    disk.probed(write_failure="Read-only file system")
    assert one(disk.fill(1), ReadSlots), "reads are back first"
    assert reasons(disk) == [
        "the disk takes no blocks: blocks cannot be written: Read-only file system"
    ]


def test_a_commit_that_does_not_come_back_counts_while_it_lasts() -> None:
    """A stalled disk answers nothing: the ticks find it."""
    disk = Disk(slots=9)
    write = one(disk.leased(one(disk.host_stored(1), LeaseHost)), WriteSlots)
    append = one(disk.released(one(disk.written(write), ReleaseHost)), AppendJournal)
    disk.wait(STALLED_MS - 1)
    assert reasons(disk) == []
    for _ in range(FAILURES_MAX):
        disk.wait(1)
    stalled = f"{STALLED_MS // 1000} s without an answer"
    assert reasons(disk) == [f"the disk is bypassed: it is too slow: {stalled}"]
    disk.journaled(append)
    assert disk.announced == {1}
    disk.finish(disk.wait(PAUSE_MS))
    assert reasons(disk) == []


def test_synchronising_that_fails_stops_the_writes_until_it_works() -> None:
    """KVBM_DISK_SYNC=interval: each block is written well, and nothing is durable."""
    disk = Disk(slots=9)
    for number in range(FAILURES_MAX):
        disk.store(1 + number)
        disk.step(Synchronised("Input/output error"))
    [reason] = reasons(disk)
    assert reason.endswith("what was written cannot be synchronised: Input/output error")
    disk.step(Synchronised())
    disk.finish(disk.wait(PAUSE_MS))
    assert reasons(disk) == []


def test_a_removal_that_is_not_in_the_journal_makes_it_be_rewritten() -> None:
    """Else what an operator has reset would be back after a restart."""
    disk = Disk(slots=2)
    disk.store(1, 2)
    disk.store(3)
    rewrite = one(disk.step(JournalFailed(None, "journal", "io")), RewriteJournal)
    assert {record.place: record.block.hash for record in rewrite.records} == {
        slot: name(number) for number, slot in disk.on_disk().items()
    }
    assert disk.step(JournalRewritten("io")) == []
    assert disk.wait(REWRITE_PAUSE_MS - 1) == []
    assert one(disk.wait(1), RewriteJournal).records
    disk.step(JournalRewritten())
    assert disk.wait(REWRITE_PAUSE_MS) == []


def test_a_journal_that_cannot_be_shortened_is_tried_again_and_reported() -> None:
    disk = Disk(slots=4)
    disk.store(1)
    found = of(disk.step(JournalFailed(None, "journal", "io")), RewriteJournal)
    for number in range(FAILURES_MAX):
        assert len(found) == 1
        assert of(disk.step(JournalRewritten("No space left on device")), RewriteJournal) == []
        found = of(disk.wait(REWRITE_PAUSE_MS), RewriteJournal)
        assert bool(reasons(disk)) == (number == FAILURES_MAX - 1)
    assert "the journal cannot be shortened: No space left on device" in reasons(disk)[0]
    disk.step(JournalRewritten())
    disk.probed()
    assert reasons(disk) == []


def test_writes_that_fail_count_too() -> None:
    disk = Disk(slots=9)
    for number in range(1, 2 * FAILURES_MAX, 2):
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
    assert len(disk.core.writes.in_flight.by_id) == 0


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
    lease = one(disk.host_stored(3), LeaseHost)
    disk.finish(disk.leased(lease, 3))
    disk.finish(disk.host_stored(5))
    assert disk.announced == {5}


def test_the_amplification_of_writes_is_known() -> None:
    disk = Disk(slots=4)
    assert disk.core.view.statistics().figures["write_amplification"] == 1.0
    disk.store(1, 2)
    written = 2 * (SLOT_BYTES + 128)
    figures = disk.core.view.statistics().figures
    assert figures["write_amplification"] == written / (2 * BLOCK_BYTES)
