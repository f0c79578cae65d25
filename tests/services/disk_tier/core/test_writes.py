"""The disk tier's core: every path of a write."""

from __future__ import annotations

import pytest
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MAX_MS, PAUSE_MS
from kvbm_common.wire.events import Removed
from kvbm_common.wire.verbs import LeaseReply
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import (
    AppendJournal,
    AskHostSnapshot,
    LeaseHost,
    ReadSlots,
    ReleaseHost,
    WriteSlots,
)
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Operation
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import ArenaKnown, HostEventsLost, Journaled, Leased, Tick
from kvbm_disk_tier.core.pending import TRIES_MAX

from tests.services.disk_tier.helpers import (
    ARENA_SLOTS,
    EPOCH,
    HOST_EPOCH,
    SLOT_BYTES,
    Disk,
    arena,
    asked,
    leased_slot,
    name,
    numbers,
    of,
    one,
    writing,
)


def journaling(disk: Disk, *wanted: int) -> AppendJournal:
    """A write whose records are on their way."""
    release = one(disk.written(writing(disk, *wanted)), ReleaseHost)
    return one(disk.released(release), AppendJournal)


def test_a_block_is_announced_only_after_its_lease_its_bytes_and_its_record() -> None:
    """The whole way of a chain, step by step: nothing is announced before the last one."""
    disk = Disk()
    lease = one(disk.host_stored(1, 2), LeaseHost)
    assert asked(lease) == [1, 2]
    assert lease.request.epoch == HOST_EPOCH
    write = one(disk.leased(lease), WriteSlots)
    assert (write.epoch, write.sources, write.targets) == (HOST_EPOCH, (1, 2), (0, 1))
    release = one(disk.written(write), ReleaseHost)
    assert release.lease == lease.write
    append = one(disk.released(release), AppendJournal)
    assert [record.operation for record in append.records] == [Operation.COMMITTED] * 2
    assert disk.announced == set()
    disk.journaled(append)
    assert disk.announced == {1, 2}
    assert disk.recovered() == disk.on_disk() == {1: 0, 2: 1}
    assert disk.core.view.idle()
    assert disk.counts["offload_blocks_h2d"] == 2


def test_the_filter_declines_what_is_new_and_admits_what_is_wanted_again() -> None:
    """Once is not enough; a hit, or a second announcement, is."""
    disk = Disk(filtered=True)
    assert disk.host_stored(1, 2) == []
    assert disk.counts["filtered_blocks"] == 2
    assert asked(one(disk.hit(2), LeaseHost)) == [2]
    assert asked(one(disk.host_stored(1), LeaseHost)) == [1]


def test_what_is_here_or_on_its_way_is_not_counted() -> None:
    """Seen twice, block 1 waits, is written and is on disk: its hits meanwhile add nothing."""
    disk = Disk(filtered=True)
    disk.host_stored(1)
    effects = disk.hit(1)
    disk.hit(1)
    disk.finish(effects)
    disk.hit(1)
    disk.host_stored(1)
    assert disk.announced == {1}
    assert disk.filter.count(name(1), disk.now_ms) == 2


def test_the_filter_that_was_given_is_used_even_when_it_is_empty() -> None:
    """An empty filter has no length, and is false: `or` once put another in its place."""
    given = FrequencyFilter(enabled=False)
    assert not given
    core = DiskTierCore(host="h", instance="0", epoch=EPOCH, frequency_filter=given)
    assert core.pending.admission.filter is given
    assert DiskTierCore(host="h", instance="0", epoch=EPOCH).pending.admission.filter.enabled


def test_a_staging_arena_has_no_filter() -> None:
    """Disk only: the block is nowhere else. It counts as device to disk."""
    disk = Disk(filtered=True, staging=True)
    disk.store(1)
    assert disk.announced == {1}
    assert disk.counts["offload_blocks_d2d"] == 1


def test_what_is_on_disk_pending_or_being_written_is_not_written_twice() -> None:
    """A duplicate announcement at each stage of a write."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=1))
    lease = one(disk.host_stored(1, 2), LeaseHost)
    assert disk.host_stored(1, 2) == []
    effects = disk.leased(lease)
    assert disk.hit(1, 2) == []
    disk.finish(effects)
    assert disk.announced == {1, 2}
    assert disk.listed(1, 2) == []
    assert disk.host_stored(1) == []
    assert disk.core.view.idle()


def test_a_snapshot_does_not_count_what_was_announced_already() -> None:
    """The announcement and the snapshot tell of the same sight."""
    disk = Disk(filtered=True)
    disk.host_stored(1)
    assert disk.listed(1, 2) == []
    assert asked(one(disk.hit(2), LeaseHost)) == [2]


def test_after_lost_events_a_snapshot_tells_what_there_is() -> None:
    """Without an arena there is nobody to ask: it is asked when there is one."""
    disk = Disk(ready=False)
    assert disk.step(HostEventsLost()) == []
    disk.make_ready()
    assert disk.step(HostEventsLost()) == [AskHostSnapshot("0")]
    disk.finish(disk.listed(1, 2))
    assert disk.announced == {1, 2}


def test_writes_have_limits_and_as_many_are_leased_ahead() -> None:
    """Two batches are written and two leased, of one block each; the fifth block waits."""
    disk = Disk(slots=8, limits=DiskTierLimits(writes_max=2, batch_blocks_max=1, ahead_batches=0))
    leases = of(disk.host_stored(1, 2, 3, 4, 5), LeaseHost)
    assert [asked(lease) for lease in leases] == [[1], [2]]
    writes: list[WriteSlots] = []
    for lease in leases:
        effects = disk.leased(lease)
        writes += of(effects, WriteSlots)
        leases += of(effects, LeaseHost)
    assert [write.sources for write in writes] == [(1,), (2,)]
    assert [asked(lease) for lease in leases[2:]] == [[3], [4]]
    effects = disk.written(writes[0])
    assert one(effects, WriteSlots).sources == (3,), "the disk does not wait"
    assert asked(one(effects, LeaseHost)) == [5]
    disk.finish([*effects, *disk.written(writes[1])])
    assert disk.announced == {1, 2, 3, 4, 5}


def test_one_more_than_may_be_in_flight_waits_in_the_mover() -> None:
    """One batch may be written and one wait for it: of three that are leased two are handed over.
    Beside a read none waits, and of reads one does."""
    limits = DiskTierLimits(writes_max=1, batch_blocks_max=1, write_blocks_max=1, ahead_batches=1,
                    batch_transfers_max=1,
                    read_blocks_max=1)  # fmt: skip
    disk = Disk(slots=9, limits=limits)
    writes, effects = [], disk.host_stored(1, 2, 3)
    for _ in range(3):
        effects = disk.leased(one(effects, LeaseHost))
        writes += of(effects, WriteSlots)
    assert [write.sources for write in writes] == [(1,), (2,)]
    ended = disk.written(writes[0])
    assert one(ended, WriteSlots).sources == (3,)
    disk.finish([*ended, *disk.written(writes[1])])
    assert disk.announced == {1, 2, 3}

    reads = [*disk.fill(1), *disk.fill(2), *disk.fill(3)]
    assert [numbers(read.blocks) for read in of(reads, ReadSlots)] == [[1], [2]]
    first = one(disk.leased(one(disk.host_stored(4, 5), LeaseHost)), WriteSlots)
    assert first.sources == (4,)


def test_what_waits_for_the_journal_is_limited_too() -> None:
    """One is written, one leased ahead, and two confirm: nothing more is leased."""
    disk = Disk(slots=8, limits=DiskTierLimits(writes_max=1, batch_blocks_max=1, commits_max=2))
    effects = disk.host_stored(1, 2, 3, 4, 5, 6, 7)
    releases: list[ReleaseHost] = []
    leased = 0
    todo = list(effects)
    while todo:
        match todo.pop(0):
            case LeaseHost() as lease:
                leased += 1
                todo += disk.leased(lease)
            case WriteSlots() as write:
                todo += disk.written(write)
            case ReleaseHost() as release:
                releases.append(release)
            case _:
                pass
    assert leased == len(releases) == 3
    disk.finish(releases)
    assert disk.announced == {1, 2, 3, 4, 5, 6, 7}


def test_a_lease_that_waited_while_the_arena_changed_is_not_written() -> None:
    """Its turn comes in another life of the host tier: those slots are gone."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=1, ahead_batches=0))
    effects = disk.leased(one(disk.host_stored(1, 2), LeaseHost))
    disk.leased(one(effects, LeaseHost))
    disk.step(ArenaKnown(arena(epoch=HOST_EPOCH + 1)))
    effects = disk.written(one(effects, WriteSlots))
    assert of(effects, WriteSlots) == []
    for release in of(effects, ReleaseHost):
        disk.released(release, valid=False)
    assert disk.core.view.idle()
    assert disk.announced == set()


def test_pending_blocks_are_bounded_and_the_newest_are_refused() -> None:
    """Three are to wait, two may: 3 is not taken."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=1, pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    disk.host_stored(1, 2, 3)
    assert disk.counts["dropped.write_pending_full"] == 1
    disk.finish([lease])
    assert disk.announced == {9, 1, 2}


def test_blocks_that_the_host_has_no_more_are_left_out_with_what_hangs_on_them() -> None:
    """2 was evicted before the lease: 1 is written, and 3 could not be reached."""
    disk = Disk()
    effects = disk.leased(one(disk.host_stored(1, 2, 3), LeaseHost), 2)
    assert one(effects, WriteSlots).sources == (1,)
    disk.finish(effects)
    assert disk.announced == {1}
    assert disk.counts["dropped.write_gone"] == disk.counts["dropped.write_cut_off"] == 1
    assert asked(one(disk.host_stored(2, 3), LeaseHost)) == [2, 3], "they may come back"


def test_an_empty_lease_is_given_back_and_nothing_is_written() -> None:
    """All of it was evicted."""
    disk = Disk()
    effects = disk.leased(one(disk.host_stored(1), LeaseHost), 1)
    assert of(effects, WriteSlots) == []
    disk.released(one(effects, ReleaseHost))
    assert disk.core.view.idle()
    assert disk.journal == []


def test_a_refused_lease_frees_its_blocks() -> None:
    """The host tier lives another life: the same question would get the same answer."""
    disk = Disk()
    disk.lease_failed(one(disk.host_stored(1, 2), LeaseHost), "stale_epoch")
    assert disk.counts["dropped.write_stale_epoch"] == 2
    assert disk.core.view.idle()
    disk.store(1, 2)
    assert disk.announced == {1, 2}


def test_what_waits_outlives_an_outage() -> None:
    """1. NATS is away, and says so at once. 2. After three tries there is a pause. 3. It is back.

    Every block that waited was once asked for in vain and forgotten, all in a moment.
    """
    disk = Disk(slots=8, limits=DiskTierLimits(writes_max=1, batch_blocks_max=1))
    effects = disk.host_stored(1, 2, 3, 4, 5)
    tried = 0
    while leases := of(effects, LeaseHost):
        tried += len(leases)
        effects = disk.lease_failed(leases[0], "bus_unavailable")
    assert tried == disk.counts["write_retries"] == FAILURES_MAX
    assert disk.wait(PAUSE_MS - 1) == []
    probe = one(disk.wait(1), LeaseHost)
    assert disk.lease_failed(probe, "deadline_exceeded") == []
    assert disk.wait(2 * PAUSE_MS - 1) == []
    disk.finish(disk.wait(1))
    assert disk.announced == {1, 2, 3, 4, 5}
    assert disk.core.view.idle()
    assert not [name for name in disk.counts if name.startswith("dropped.")]


def test_what_never_gets_an_answer_holds_up_nobody_and_is_given_up() -> None:
    """Block 1 is poison: the others go before it, and it is not asked for without end."""
    disk = Disk(slots=8, limits=DiskTierLimits(writes_max=1, batch_blocks_max=1))
    effects = disk.host_stored(1, 2, 3)
    tries = 0
    while not disk.core.view.idle():
        leases = of(effects, LeaseHost)
        for lease in leases:
            if asked(lease) == [1]:
                tries += 1
                effects = disk.lease_failed(lease, "deadline_exceeded")
            else:
                effects = disk.leased(lease)
                disk.finish([e for e in effects if not isinstance(e, LeaseHost)])
        if not leases:
            effects = disk.wait(PAUSE_MAX_MS)
    assert disk.announced == {2, 3}
    assert tries == TRIES_MAX
    assert disk.counts["write_retries"] == TRIES_MAX - 1
    assert disk.counts["dropped.write_deadline_exceeded"] == 1


def test_a_write_that_could_not_be_confirmed_is_written_again() -> None:
    """NATS went away between lease and release: whether the bytes are right is not known."""
    disk = Disk()
    release = one(disk.written(writing(disk, 1, 2)), ReleaseHost)
    effects = disk.released(release, valid=False, answered=False)
    assert disk.announced == set()
    assert asked(one(effects, LeaseHost)) == [1, 2]
    disk.finish(effects)
    assert disk.announced == {1, 2}
    assert disk.counts["write_retries"] == 2


def test_a_lease_that_ended_early_makes_the_copy_worthless() -> None:
    """The bytes may be another block's: never announced, never journaled, the slots are free."""
    disk = Disk()
    release = one(disk.written(writing(disk, 1, 2)), ReleaseHost)
    assert disk.released(release, valid=False) == []
    assert disk.announced == set()
    assert disk.journal == []
    assert disk.counts["dropped.write_lease_lost"] == 2
    assert disk.core.inventory.table.counts()["reset"] == 4


@pytest.mark.parametrize(
    "change", [{"slot": ARENA_SLOTS}, {"slot": ARENA_SLOTS - 1, "bytes": SLOT_BYTES + 1},
               {"bytes": 0}, {"checksum": 2**64}, {"checksum": -1}],
)  # fmt: skip
def test_a_leased_slot_that_cannot_be_is_not_written(change: dict[str, int]) -> None:
    """A peer's mistake costs its block: 3 is written."""
    disk = Disk()
    lease = one(disk.host_stored(1, 3), LeaseHost)
    reply = LeaseReply(lease=5, slots=[leased_slot(1, **change), leased_slot(3)])
    disk.finish(disk.step(Leased(lease.write, reply)))
    assert disk.announced == {3}
    assert disk.counts["dropped.write_bad_lease"] == 1
    assert "dropped.write_gone" not in disk.counts


def test_a_failed_write_keeps_nothing_and_gives_the_lease_back() -> None:
    """Which part has arrived is not known."""
    disk = Disk()
    release = one(disk.write_failed(writing(disk, 1, 2)), ReleaseHost)
    assert disk.core.inventory.table.counts()["staged"] == 0
    assert disk.released(release) == []
    assert disk.counts["dropped.write_transfer_failed"] == 2
    assert disk.announced == set()
    assert disk.core.view.idle()


@pytest.mark.parametrize("torn", [False, True])
def test_a_failed_journal_takes_its_records_back(torn: bool) -> None:
    """The record may be in the journal nevertheless: a restart must not believe it."""
    disk = Disk()
    append = journaling(disk, 1, 2)
    taken_back = one(disk.journal_failed(append, torn=torn), AppendJournal)
    assert taken_back.write is None
    assert [record.operation for record in taken_back.records] == [Operation.REMOVED] * 2
    assert disk.announced == set()
    assert disk.recovered() == {}
    assert disk.counts["dropped.write_journal"] == 2
    disk.store(1)
    assert disk.announced == {1}


def test_a_full_disk_evicts_the_least_recently_used_leaves_first() -> None:
    """Three slots with the chain 1, 2, 3: block 9 takes the place of the leaf."""
    disk = Disk(slots=3)
    disk.store(1, 2, 3)
    disk.store(9)
    assert disk.announced == {1, 2, 9}
    assert one(disk.events, Removed).reason == "evicted"
    assert disk.recovered() == disk.on_disk()


def test_a_read_block_outlives_one_that_nobody_wanted() -> None:
    """1 is read, so 2 goes."""
    disk = Disk(slots=2)
    disk.store(1)
    disk.store(2)
    disk.finish(disk.fill(1))
    disk.store(3)
    assert disk.announced == {1, 3}


def test_when_everything_is_pinned_what_does_not_fit_is_dropped() -> None:
    """One of two slots is being read: of two new blocks one fits."""
    disk = Disk(slots=2)
    disk.store(1, 2)
    read = one(disk.fill(1), ReadSlots)
    disk.store(3, 4)
    assert disk.announced == {1, 3}
    assert disk.counts["dropped.write_no_room"] == 1
    disk.read(read)


def test_no_room_at_all_means_no_lease() -> None:
    """Every slot is being read: the block waits, and goes when a read has ended."""
    disk = Disk(slots=1)
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    assert disk.host_stored(2) == []
    disk.finish(disk.read(read))
    assert disk.announced == {2}


def test_reads_hold_writes_back() -> None:
    """Onboarding goes ahead: beside a read one batch is in flight, not four."""
    disk = Disk(slots=8, limits=DiskTierLimits(batch_blocks_max=1, batch_transfers_max=1))
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    assert len(of(disk.host_stored(2, 3, 4), LeaseHost)) == 1
    assert len(of(disk.read(read), LeaseHost)) == 2


@pytest.mark.parametrize("slow", [False, True])
def test_while_more_is_written_records_wait_for_each_other(slow: bool) -> None:
    """1. Three batches are in flight. 2. Two are written, and wait for the third; or, where that
    takes its time, as long as a record may."""
    disk = Disk(slots=8, limits=DiskTierLimits(batch_blocks_max=1, batch_transfers_max=1))
    leases = of(disk.host_stored(1, 2, 3), LeaseHost)
    writes = [one(disk.leased(lease), WriteSlots) for lease in leases]
    releases = [one(disk.written(write), ReleaseHost) for write in writes[:2]]
    assert disk.released(releases[0]) == []
    disk.now_ms += DiskTierLimits().journal_wait_ms - 1
    assert disk.released(releases[1]) == []
    if slow:
        disk.now_ms += 1
        disk.finish(disk.step(Tick()))
        assert disk.announced == {1, 2}
        disk.finish(disk.written(writes[2]))
    else:
        release = one(disk.written(writes[2]), ReleaseHost)
        together = of(disk.released(release), AppendJournal)
        records = [record for append in together for record in append.records]
        assert numbers(record.block for record in records) == [1, 2, 3]
        disk.finish(together)
    assert disk.announced == {1, 2, 3}


def test_a_lost_lease_leaves_nobody_waiting() -> None:
    """The batch that the other one's record waits for comes to nothing."""
    disk = Disk(slots=8, limits=DiskTierLimits(batch_blocks_max=1, batch_transfers_max=1))
    leases = of(disk.host_stored(1, 2), LeaseHost)
    writes = [one(disk.leased(lease), WriteSlots) for lease in leases]
    releases = [one(disk.written(write), ReleaseHost) for write in writes]
    assert disk.released(releases[0]) == []
    disk.finish(disk.released(releases[1], valid=False))
    assert disk.announced == {1}


def test_what_became_durable_together_is_announced_together() -> None:
    """Two batches, one event; and one that failed beside them is not in it."""
    disk = Disk(slots=8)
    appends = [journaling(disk, number) for number in (1, 2, 3)]
    disk.journal_failed(appends[2])
    said = len(disk.events)
    disk.journal += [record for append in appends[:2] for record in append.records]
    disk.step(Journaled(tuple(append.write or 0 for append in appends[:2])))
    assert len(disk.events) == said + 1
    assert disk.announced == {1, 2} == set(disk.on_disk())
