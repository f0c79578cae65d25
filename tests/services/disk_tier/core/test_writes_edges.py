"""Writes at their edges: whole messages, exact limits, why a block was not written, counts."""

from __future__ import annotations

from typing import Any

import pytest
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MAX_MS
from kvbm_common.wire.verbs import LeaseReply, LeaseRequest
from kvbm_disk_tier.core.effects import AppendJournal, LeaseHost, ReleaseHost, WriteSlots
from kvbm_disk_tier.core.health import SLOW_MS, Cause
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import Journaled, Leased, Tick, WriteFailed, Written
from kvbm_disk_tier.core.pending import TRIES_MAX
from kvbm_disk_tier.core.write_budget import DAY_MS

from tests.services.disk_tier.helpers import (
    ARENA_SLOTS,
    BLOCK_BYTES,
    HOST_EPOCH,
    SLOT_BYTES,
    Disk,
    asked,
    block,
    leased_slot,
    name,
    of,
    one,
    writing,
)

LIMITS = DiskTierLimits()


def why(disk: Disk, number: int) -> tuple[int, str, str] | None:
    """When and why a block was not written."""
    fate = disk.core.inventory.departures.get(name(number))
    return None if fate is None else (fate.at_ms, fate.why, fate.detail)


def unwritten(disk: Disk, detail: str) -> tuple[int, str, str]:
    """What is remembered of a block that was not written just now."""
    return (disk.now_ms, "not_written", detail)


def dropped(disk: Disk) -> dict[str, int]:
    """What was dropped, by the name of the reason."""
    prefix = "dropped.write_"
    return {k.removeprefix(prefix): n for k, n in disk.counts.items() if k.startswith(prefix)}


def single(**limits: Any) -> DiskTierLimits:
    """One batch of one block at a time."""
    return DiskTierLimits(**({"writes_max": 1, "batch_blocks_max": 1, "ahead_batches": 0} | limits))


# --- messages -----------------------------------------------------------------------------------


def test_every_field_on_the_way_of_a_batch() -> None:
    disk = Disk()
    lease = one(disk.host_stored(1, 2), LeaseHost)
    request = LeaseRequest(owner="disk-tier-0", epoch=HOST_EPOCH, lease_ms=LIMITS.lease_ms,
                           hashes=[name(1).hex(), name(2).hex()])  # fmt: skip
    assert lease == LeaseHost(lease.write, "0", request)
    slots = [leased_slot(1), leased_slot(2)]
    write = one(disk.step(Leased(lease.write, LeaseReply(lease=77, slots=slots))), WriteSlots)
    assert write == WriteSlots(
        lease.write, HOST_EPOCH, (1, 2), (0, 1), (block(1), block(2)), SLOT_BYTES
    )
    assert one(disk.written(write), ReleaseHost) == ReleaseHost(lease.write, "0", 77)


def test_the_diary_follows_a_block() -> None:
    disk = Disk()
    write = writing(disk, 1)
    disk.now_ms += 10
    disk.finish(disk.written(write))
    assert disk.core.inventory.diary.entries(name(1)) == [
        (1_000, "being written to slot 0"), (1_010, "committed in slot 0"),
    ]  # fmt: skip


# --- admission ----------------------------------------------------------------------------------


def test_what_the_filter_declines_is_counted_each_time() -> None:
    disk = Disk(filtered=True)
    disk.host_stored(1, 2)
    disk.host_stored(3)
    assert disk.counts["filtered_blocks"] == 3
    assert asked(one(disk.host_stored(1, 2, 3), LeaseHost)) == [1, 2, 3]
    assert disk.counts["filtered_blocks"] == 3


def test_a_block_is_waiting_from_its_admission_to_its_end() -> None:
    """1 is being written, 2 is pending, 3 is neither."""
    disk = Disk(limits=single())
    write = writing(disk, 1)
    disk.host_stored(2, 3)
    writes = disk.core.writes
    assert [writes.is_waiting(name(n)) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert (len(writes.in_flight.by_id), len(writes.pending.waiting)) == (2, 1)
    assert writes.staged_slots() == set(write.targets)
    disk.finish([*disk.written(write)])
    assert not writes.is_waiting(name(1))


def test_the_newest_are_refused_and_remembered() -> None:
    """Two may wait while one is written: of four the third is refused, and the fourth with it."""
    disk = Disk(limits=single(pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    disk.host_stored(1, 2, 3, 4)
    assert dropped(disk) == {"pending_full": 1, "cut_off": 1}
    assert why(disk, 3) == unwritten(disk, "too many blocks were waiting")
    assert why(disk, 4) == unwritten(disk, "a block before it was not written")
    assert why(disk, 2) is None
    disk.finish([lease])
    assert disk.announced == {9, 1, 2}


def test_blocks_that_were_found_in_the_store_are_not_written() -> None:
    """2 waits and is found; 7 is news."""
    disk = Disk(limits=single())
    lease = one(disk.host_stored(1, 2, 3), LeaseHost)
    disk.core.writes.pending.found([name(2), name(7)])
    assert len(disk.core.writes.pending.waiting) == 1
    disk.finish([lease])
    assert disk.announced == {1, 3}


def test_what_waits_is_forgotten_with_its_reason() -> None:
    """Twice, so that the count adds up."""
    disk = Disk(limits=single())
    disk.host_stored(1, 2, 3)
    disk.core.writes.pending.forget("stopping", disk.now_ms)
    assert dropped(disk) == {"stopping": 2}
    assert why(disk, 2) == why(disk, 3) == unwritten(disk, "stopping")
    assert (why(disk, 1), len(disk.core.writes.pending.waiting)) == (None, 0)
    disk.host_stored(5)
    disk.core.writes.pending.forget("stopping", disk.now_ms)
    assert dropped(disk) == {"stopping": 3}


# --- limits -------------------------------------------------------------------------------------


def test_a_batch_has_as_many_blocks_as_are_allowed() -> None:
    """Three at a time: of five, three and then two."""
    limits = DiskTierLimits(
        writes_max=2, batch_blocks_max=3, batch_transfers_max=1, ahead_batches=0
    )
    disk = Disk(slots=8, limits=limits)
    leases = of(disk.host_stored(1, 2, 3, 4, 5), LeaseHost)
    assert [asked(lease) for lease in leases] == [[1, 2, 3], [4, 5]]


def test_beside_reads_fewer_are_leased_and_written() -> None:
    """Two may be written, beside a read only one: the second waits until the read has ended."""
    limits = DiskTierLimits(
        writes_max=2, batch_blocks_max=1, batch_transfers_max=1, ahead_batches=0
    )
    disk = Disk(slots=8, limits=limits)
    disk.store(1)
    read = disk.fill(1)
    leases = of(disk.host_stored(11, 12, 13), LeaseHost)
    assert [asked(lease) for lease in leases] == [[11]]
    write = one(disk.leased(leases[0]), WriteSlots)
    assert write.sources == (11,)
    disk.finish([*read, *disk.written(write)])
    disk.finish(disk.wait(1))


def test_without_a_free_slot_nothing_is_leased() -> None:
    """Both slots are pinned by reads; when one has ended its block makes way."""
    disk = Disk(slots=2, limits=single())
    disk.store(1, 2)
    reads = disk.fill(1, 2)
    assert of(disk.host_stored(11), LeaseHost) == []
    effects: list[object] = []
    for read in reads:
        effects += disk.read(read)  # type: ignore[arg-type]
    assert asked(one([*effects, *disk.wait(1)], LeaseHost)) == [11]


# --- leases -------------------------------------------------------------------------------------


def test_blocks_that_have_left_the_host_are_counted_and_remembered() -> None:
    """3 of three is gone; 1 came into the store by itself meanwhile is no loss."""
    disk = Disk()
    write = one(disk.leased(one(disk.host_stored(1, 3, 5), LeaseHost), 3), WriteSlots)
    assert write.sources == (1, 5)
    assert dropped(disk) == {"gone": 1}
    assert why(disk, 3) == unwritten(disk, "it had left host memory when its turn came")
    assert why(disk, 1) is None
    disk.finish(disk.written(write))
    lease = one(disk.host_stored(11, 13, 15, 17), LeaseHost)
    disk.leased(lease, 13, 17)
    assert dropped(disk) == {"gone": 3}


@pytest.mark.parametrize(
    ("change", "is_sound"),
    [
        ({"slot": ARENA_SLOTS - 1}, True), ({"slot": ARENA_SLOTS}, False),
        ({"slot": ARENA_SLOTS - 1, "bytes": SLOT_BYTES}, True),
        ({"slot": ARENA_SLOTS - 1, "bytes": SLOT_BYTES + 1}, False),
        ({"bytes": 0}, False),
        ({"checksum": 2**64 - 1}, True), ({"checksum": 2**64}, False),
        ({"checksum": 0}, True), ({"checksum": -1}, False),
    ],
)  # fmt: skip
def test_a_leased_slot_is_sound_up_to_the_very_bound(
    change: dict[str, int], is_sound: bool
) -> None:
    disk = Disk()
    lease = one(disk.host_stored(1, 3), LeaseHost)
    slots = [leased_slot(1, **change), leased_slot(3)]
    write = one(disk.step(Leased(lease.write, LeaseReply(lease=5, slots=slots))), WriteSlots)
    assert len(write.blocks) == 1 + is_sound
    assert dropped(disk) == ({} if is_sound else {"bad_lease": 1})


def test_blocks_that_were_not_asked_for_are_not_written() -> None:
    """The host tier names a stranger beside 1; the order is that of the question."""
    disk = Disk()
    lease = one(disk.host_stored(1, 2), LeaseHost)
    slots = [leased_slot(9), leased_slot(2), leased_slot(1)]
    write = one(disk.step(Leased(lease.write, LeaseReply(lease=5, slots=slots))), WriteSlots)
    assert (write.sources, write.blocks) == ((1, 2), (block(1), block(2)))
    assert dropped(disk) == {}


def test_a_lease_that_is_refused_is_counted_by_its_blocks_and_remembered() -> None:
    disk = Disk()
    for times in (1, 2):
        disk.lease_failed(one(disk.host_stored(1, 2), LeaseHost), "stale_epoch")
        assert dropped(disk) == {"stale_epoch": 2 * times}
    assert why(disk, 1) == why(disk, 2) == unwritten(disk, "stale_epoch")
    assert disk.core.view.idle()


def test_retries_are_counted_by_their_blocks() -> None:
    """Two blocks, unanswered twice."""
    disk = Disk()
    effects = disk.host_stored(1, 2)
    for times in (1, 2):
        effects = disk.lease_failed(one(effects, LeaseHost), "deadline_exceeded")
        assert disk.counts["write_retries"] == 2 * times
    assert asked(one(effects, LeaseHost)) == [1, 2]
    assert dropped(disk) == {}


# --- the disk -----------------------------------------------------------------------------------


def test_a_failed_write_is_counted_remembered_and_held_against_the_disk() -> None:
    """An arena that is another one is not the disk's fault."""
    disk = Disk()
    for times, reason in ((1, "transfer_failed"), (1, "stale_arena")):
        write = writing(disk, 1, 2)
        release = one(disk.step(WriteFailed(write.write, reason)), ReleaseHost)
        disk.released(release)
        assert dropped(disk)[reason] == 2 * times
        assert why(disk, 1) == why(disk, 2) == unwritten(disk, reason)
    assert disk.counts["disk_troubles.failed"] == 1
    assert disk.core.inventory.table.counts()["reset"] == 4
    assert disk.core.view.idle()


def test_a_slow_write_is_held_against_the_disk() -> None:
    """One millisecond less is not."""
    disk = Disk(slots=8)
    for waited, slow in ((SLOW_MS - 1, 0), (SLOW_MS, 1)):
        write = writing(disk, 10 + slow)
        disk.now_ms += waited
        disk.finish(disk.written(write))
        assert disk.counts.get("disk_troubles.slow", 0) == slow


def test_blocks_that_the_store_did_not_take_are_given_up_one_by_one() -> None:
    """Of four, the first and the third are lost: 2 and 4 are announced."""
    disk = Disk()
    write = writing(disk, 1, 2, 3, 4)
    disk.finish(disk.step(Written(write.write, (0, 2))))
    assert disk.announced == {2, 4}
    assert dropped(disk) == {"lost": 2}
    assert disk.core.inventory.table.counts()["reset"] == 2
    assert disk.on_disk() == {2: write.targets[1], 4: write.targets[3]}


def test_what_is_leased_when_the_disk_is_bypassed_is_given_up() -> None:
    """Batches that wait for their turn are dropped, counted, remembered and their leases end."""
    limits = DiskTierLimits(
        writes_max=1, batch_blocks_max=2, batch_transfers_max=1, ahead_batches=0
    )
    disk = Disk(slots=8, limits=limits)
    effects = disk.leased(one(disk.host_stored(1, 2, 3, 4), LeaseHost))
    write = one(effects, WriteSlots)
    waiting = one(effects, LeaseHost)
    assert of(disk.leased(waiting), WriteSlots) == []
    for _ in range(FAILURES_MAX):
        disk.core.health.trouble(Cause.READ, "io", disk.now_ms)
    releases = of(disk.wait(1), ReleaseHost)
    assert [release.lease for release in releases] == [waiting.write]
    assert dropped(disk) == {"bypassed": 2}
    assert why(disk, 3) == why(disk, 4) == unwritten(disk, "bypassed")
    disk.released(releases[0])
    disk.released(one(disk.written(write), ReleaseHost))


# --- the journal --------------------------------------------------------------------------------


def test_a_journal_that_fails_takes_its_records_back() -> None:
    disk = Disk()
    for times in (1, 2):
        release = one(disk.written(writing(disk, 1, 2)), ReleaseHost)
        append = one(disk.released(release), AppendJournal)
        assert [entry[1] for entry in disk.core.writes.committing()] == [block(1), block(2)]
        disk.journal_failed(append)
        assert dropped(disk) == {"journal": 2 * times}
        assert disk.counts["disk_troubles.failed"] == times
    assert why(disk, 1) == why(disk, 2) == unwritten(disk, "journal")
    assert disk.announced == set()
    assert disk.recovered() == {}
    assert disk.core.writes.committing() == []


def test_records_wait_for_those_that_follow_and_no_longer() -> None:
    """1 is released while 2 is written: its record goes after `journal_wait_ms`."""
    disk = Disk(limits=DiskTierLimits(writes_max=2, batch_blocks_max=1, ahead_batches=0))
    first, second = (
        one(disk.leased(lease), WriteSlots) for lease in of(disk.host_stored(1, 2), LeaseHost)
    )
    release = one(disk.written(first), ReleaseHost)
    assert of(disk.released(release), AppendJournal) == []
    assert of(disk.wait(LIMITS.journal_wait_ms - 1), AppendJournal) == []
    append = one(disk.wait(1), AppendJournal)
    disk.journaled(append)
    assert disk.announced == {1}
    disk.finish(disk.written(second))
    assert disk.announced == {1, 2}


def test_batches_that_are_journaled_together_are_announced_together() -> None:
    """Counts add up over both."""
    disk = Disk(limits=DiskTierLimits(writes_max=2, batch_blocks_max=1, ahead_batches=0))
    leases = of(disk.host_stored(1, 2), LeaseHost)
    writes = [one(disk.leased(lease), WriteSlots) for lease in leases]
    releases = [one(disk.written(write), ReleaseHost) for write in writes]
    appends = []
    for release in releases:
        appends += of(disk.released(release), AppendJournal)
    for append in appends:
        disk.journal += append.records
    disk.step(Journaled(tuple(a.write for a in appends if a.write is not None)))
    assert disk.announced == {1, 2}
    for times in (1, 2):
        assert disk.counts["offload_blocks_h2d"] == 2 * times
        assert disk.counts["bytes.written"] == 2 * times * SLOT_BYTES
        assert disk.counts["bytes.payload"] == 2 * times * BLOCK_BYTES
        if times == 1:
            disk.store(11, 12)


def test_what_was_asked_for_too_often_is_given_up_and_remembered() -> None:
    """Two blocks, unanswered until they are given up: the reason is the last answer's."""
    disk = Disk()
    effects = disk.host_stored(1, 2)
    for _ in range(TRIES_MAX):
        while not (leases := of(effects, LeaseHost)):
            effects = disk.wait(PAUSE_MAX_MS)
        effects = disk.lease_failed(leases[0], "no_responder")
    assert dropped(disk) == {"no_responder": 2}
    assert disk.counts["write_retries"] == 2 * (TRIES_MAX - 1)
    assert why(disk, 1) == why(disk, 2) == unwritten(disk, "no_responder")
    assert disk.core.view.idle()


def test_writes_that_were_never_confirmed_are_given_up_as_lost_leases() -> None:
    """Leased and written each time, and the release never answered."""
    disk = Disk()
    effects = disk.host_stored(1, 2)
    for _ in range(TRIES_MAX):
        while not (leases := of(effects, LeaseHost)):
            effects = disk.wait(PAUSE_MAX_MS)
        write = one(disk.leased(leases[0]), WriteSlots)
        release = one(disk.written(write), ReleaseHost)
        effects = disk.released(release, valid=False, answered=False)
    assert dropped(disk) == {"lease_lost": 2}
    assert why(disk, 1) == unwritten(disk, "lease_lost")
    assert disk.core.inventory.table.counts()["reset"] == 4


def test_a_batch_that_is_aborted_is_counted_by_what_was_written_of_it() -> None:
    """Of three asked for two were there; then the lease was lost."""
    disk = Disk()
    write = one(disk.leased(one(disk.host_stored(1, 3, 5), LeaseHost), 3), WriteSlots)
    disk.released(one(disk.written(write), ReleaseHost), valid=False)
    assert dropped(disk) == {"gone": 1, "lease_lost": 2}
    assert why(disk, 1) == why(disk, 5) == unwritten(disk, "lease_lost")


def test_losses_and_failures_add_up() -> None:
    """Each twice."""
    disk = Disk(slots=8)
    for times in (1, 2):
        write = writing(disk, 10 * times, 10 * times + 1)
        disk.finish(disk.step(Written(write.write, (1,))))
        failing = writing(disk, 30 * times)
        disk.released(one(disk.step(WriteFailed(failing.write, "why")), ReleaseHost))
        assert dropped(disk) == {"lost": times, "why": times}


def test_a_listed_block_is_leased_from_the_host_tier_that_listed_it() -> None:
    disk = Disk()
    assert one(disk.listed(1), LeaseHost).instance == "0"
    assert disk.core.writes.pending.waiting == {}


def test_no_batch_leaves_a_debt_that_a_restart_would_forget() -> None:
    """A full bucket pays for 2 blocks of a slot each: 3 waits, though a batch has room for it."""
    disk = Disk(slots=4, write_budget=2 * 24 * SLOT_BYTES)
    assert disk.host_stored(1, 2, 3) == []
    disk.now_ms += DAY_MS
    [lease] = of(disk.step(Tick()), LeaseHost)
    assert asked(lease) == [1, 2]
    assert disk.core.pending.budget.level == 0


def test_the_budget_that_was_not_used_is_given_back() -> None:
    """A lease that fails, one of which nothing is left, a batch of two of which one is there."""
    disk = Disk(slots=4, write_budget=48 * 100 * SLOT_BYTES)
    budget = disk.core.pending.budget
    budget.take(0, disk.now_ms)
    disk.now_ms += DAY_MS
    budget.take(0, disk.now_ms)  # A day later the bucket is full.
    full = budget.level
    disk.lease_failed(one(disk.host_stored(1, 2), LeaseHost), "stale_epoch")
    assert budget.level == full
    lease = one(disk.host_stored(11, 12), LeaseHost)
    assert budget.level == full - 2 * SLOT_BYTES
    write = one(disk.leased(lease, 12), WriteSlots)
    assert budget.level == full - SLOT_BYTES
    disk.finish(disk.written(write))
    assert budget.level == full - SLOT_BYTES
