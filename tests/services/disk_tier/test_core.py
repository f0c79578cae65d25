"""The disk tier's core: every path of a write and of a read, restarts, and what goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbm_common.breaker import FAILURES_MAX, PAUSE_MAX_MS, PAUSE_MS
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Cleared, Removed, Stored
from kvbm_common.wire.verbs import FillRequest, FillSlot, Hits, LeaseReply, SnapshotReply
from kvbm_disk_tier.core import DiskTierCore, Limits
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.journal import Operation
from kvbm_disk_tier.messages import (
    AnnounceLater,
    AnnounceMore,
    AppendJournal,
    ArenaFailed,
    ArenaKnown,
    AskArena,
    AskHostSnapshot,
    Depth,
    Effect,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostLost,
    HostSeen,
    Leased,
    LeaseHost,
    OpenStore,
    ReadFailed,
    ReadLanded,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    SayAccepting,
    StoreFailed,
    WriteSlots,
)
from kvbm_disk_tier.retries import TRIES_MAX
from kvbm_disk_tier.tier import STORE_RETRY_MS

from tests.services.disk_tier.helpers import (
    ARENA_SLOTS,
    EPOCH,
    HOST_EPOCH,
    SLOT_BYTES,
    Disk,
    arena,
    asked,
    block,
    filled,
    leased_slot,
    name,
    numbers,
    of,
    one,
    opened,
    refusal,
)


def writing(disk: Disk, *wanted: int) -> WriteSlots:
    """A write whose bytes are on their way."""
    return one(disk.leased(one(disk.host_stored(*wanted), LeaseHost)), WriteSlots)


def journaling(disk: Disk, *wanted: int) -> AppendJournal:
    """A write whose records are on their way."""
    release = one(disk.written(writing(disk, *wanted)), ReleaseHost)
    return one(disk.released(release), AppendJournal)


# --- writes -------------------------------------------------------------------------------------


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
    assert disk.core.idle()
    assert disk.counts["offload_blocks_h2d"] == 2


def test_the_filter_declines_what_is_new_and_admits_what_is_wanted_again() -> None:
    """Once is not enough; a hit, or a second announcement, is."""
    disk = Disk(filtered=True)
    assert disk.host_stored(1, 2) == []
    assert disk.counts["filtered_blocks"] == 2
    assert asked(one(disk.hit(2), LeaseHost)) == [2]
    assert asked(one(disk.host_stored(1), LeaseHost)) == [1]


def test_the_filter_that_was_given_is_used_even_when_it_is_empty() -> None:
    """An empty filter has no length, and is false: `or` once put another in its place."""
    given = FrequencyFilter(enabled=False)
    assert not given
    core = DiskTierCore(host="h", instance="0", epoch=EPOCH, frequency_filter=given)
    assert core.writes.filter is given
    assert DiskTierCore(host="h", instance="0", epoch=EPOCH).writes.filter.enabled


def test_a_staging_arena_has_no_filter() -> None:
    """Disk only: the block is nowhere else. It counts as device to disk."""
    disk = Disk(filtered=True, staging=True)
    disk.store(1)
    assert disk.announced == {1}
    assert disk.counts["offload_blocks_d2d"] == 1


def test_what_is_on_disk_pending_or_being_written_is_not_written_twice() -> None:
    """A duplicate announcement at each stage of a write."""
    disk = Disk(limits=Limits(writes_max=1, batch_blocks_max=1))
    lease = one(disk.host_stored(1, 2), LeaseHost)
    assert disk.host_stored(1, 2) == []
    effects = disk.leased(lease)
    assert disk.hit(1, 2) == []
    disk.finish(effects)
    assert disk.announced == {1, 2}
    assert disk.listed(1, 2) == []
    assert disk.host_stored(1) == []
    assert disk.core.idle()


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
    disk = Disk(slots=8, limits=Limits(writes_max=2, batch_blocks_max=1, ahead_batches=0))
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


def test_one_more_than_may_fly_waits_in_the_mover() -> None:
    """One batch may be written and one wait for it: of three that are leased two are handed over.
    Beside a read none waits, and of reads one does."""
    limits = Limits(writes_max=1, batch_blocks_max=1, write_blocks_max=1, ahead_batches=1,
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
    disk = Disk(slots=8, limits=Limits(writes_max=1, batch_blocks_max=1, commits_max=2))
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
    disk = Disk(limits=Limits(writes_max=1, batch_blocks_max=1, ahead_batches=0))
    effects = disk.leased(one(disk.host_stored(1, 2), LeaseHost))
    disk.leased(one(effects, LeaseHost))
    disk.step(ArenaKnown(arena(epoch=HOST_EPOCH + 1)))
    effects = disk.written(one(effects, WriteSlots))
    assert of(effects, WriteSlots) == []
    for release in of(effects, ReleaseHost):
        disk.released(release, valid=False)
    assert disk.core.idle()
    assert disk.announced == set()


def test_pending_blocks_are_bounded_and_the_oldest_go() -> None:
    """No slot is free of pins: nothing starts, three wait, two may."""
    disk = Disk(limits=Limits(writes_max=1, batch_blocks_max=1, pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    disk.host_stored(1, 2, 3)
    assert disk.counts["dropped.write_pending_full"] == 1
    disk.finish([lease])
    assert disk.announced == {9, 2, 3}


def test_blocks_that_the_host_has_no_more_are_left_out() -> None:
    """2 was evicted before the lease: 1 and 3 are written."""
    disk = Disk()
    effects = disk.leased(one(disk.host_stored(1, 2, 3), LeaseHost), 2)
    assert one(effects, WriteSlots).sources == (1, 3)
    disk.finish(effects)
    assert disk.announced == {1, 3}
    assert disk.counts["dropped.write_gone"] == 1
    assert asked(one(disk.host_stored(2), LeaseHost)) == [2], "it may come back"


def test_an_empty_lease_is_given_back_and_nothing_is_written() -> None:
    """All of it was evicted."""
    disk = Disk()
    effects = disk.leased(one(disk.host_stored(1), LeaseHost), 1)
    assert of(effects, WriteSlots) == []
    disk.released(one(effects, ReleaseHost))
    assert disk.core.idle()
    assert disk.journal == []


def test_a_refused_lease_frees_its_blocks() -> None:
    """The host tier lives another life: the same question would get the same answer."""
    disk = Disk()
    disk.lease_failed(one(disk.host_stored(1, 2), LeaseHost), "stale_epoch")
    assert disk.counts["dropped.write_stale_epoch"] == 2
    assert disk.core.idle()
    disk.store(1, 2)
    assert disk.announced == {1, 2}


def test_what_waits_outlives_an_outage() -> None:
    """1. NATS is away, and says so at once. 2. After three tries there is a pause. 3. It is back.

    Every block that waited was once asked for in vain and forgotten, all in a moment.
    """
    disk = Disk(slots=8, limits=Limits(writes_max=1, batch_blocks_max=1))
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
    assert disk.core.idle()
    assert not [name for name in disk.counts if name.startswith("dropped.")]


def test_what_never_gets_an_answer_holds_up_nobody_and_is_given_up() -> None:
    """Block 1 is poison: the others go before it, and it is not asked for without end."""
    disk = Disk(slots=8, limits=Limits(writes_max=1, batch_blocks_max=1))
    effects = disk.host_stored(1, 2, 3)
    tries = 0
    while not disk.core.idle():
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
    assert disk.core.table.counts()["reset"] == 4


@pytest.mark.parametrize(
    "change", [{"slot": ARENA_SLOTS}, {"bytes": SLOT_BYTES + 1}, {"checksum": 2**64},
               {"checksum": -1}],
)  # fmt: skip
def test_a_leased_slot_that_cannot_be_is_not_written(change: dict[str, int]) -> None:
    """A peer's mistake costs its block: 2 is written."""
    disk = Disk()
    lease = one(disk.host_stored(1, 2), LeaseHost)
    reply = LeaseReply(lease=5, slots=[leased_slot(1, **change), leased_slot(2)])
    disk.finish(disk.step(Leased(lease.write, reply)))
    assert disk.announced == {2}
    assert disk.counts["dropped.write_bad_lease"] == 1
    assert "dropped.write_gone" not in disk.counts


def test_a_failed_write_keeps_nothing_and_gives_the_lease_back() -> None:
    """Which part has arrived is not known."""
    disk = Disk()
    release = one(disk.write_failed(writing(disk, 1, 2)), ReleaseHost)
    assert disk.core.table.counts()["staged"] == 0
    assert disk.released(release) == []
    assert disk.counts["dropped.write_transfer_failed"] == 2
    assert disk.announced == set()
    assert disk.core.idle()


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
    """Onboarding goes ahead: beside a read one batch flies, not four."""
    disk = Disk(slots=8, limits=Limits(batch_blocks_max=1))
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    assert len(of(disk.host_stored(2, 3, 4), LeaseHost)) == 1
    assert len(of(disk.read(read), LeaseHost)) == 2


# --- reads --------------------------------------------------------------------------------------


def test_a_fill_reads_what_is_there_into_the_lent_slots_and_names_what_is_gone() -> None:
    """1 and 2 are on disk, 7 never was."""
    disk = Disk()
    disk.store(1, 2)
    read = one(disk.fill(2, 7, 1, slots=[50, 51, 52]), ReadSlots)
    assert (read.epoch, read.sources, read.targets) == (HOST_EPOCH, (1, 0), (50, 52))
    assert disk.core.table.counts()["active"] == 2
    assert filled(disk.read(read)) == {2: "", 7: "gone", 1: ""}
    assert disk.core.table.counts()["active"] == 0
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
    assert disk.core.table.counts()["active"] == 0


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
    """One may fly, one may wait, the third is too many; the second's deadline passes meanwhile."""
    disk = Disk(limits=Limits(reads_max=1, reads_waiting_max=1))
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    assert disk.fill(1, until_ms=disk.now_ms + 5) == []
    assert refusal(disk.fill(1)) == "busy"
    disk.now_ms += 5
    answers = disk.read(read)
    assert len(answers) == 2
    assert refusal(answers[1:]) == "too_late"
    assert disk.core.idle()


def test_what_the_disk_was_measured_to_take_is_in_flight() -> None:
    """Two blocks read and one written keep it busy: a fill more than that is begun, no second."""
    disk = Disk(slots=9, limits=Limits(batch_blocks_max=2, ahead_batches=0), ready=False)
    disk.step(ArenaKnown(arena()))
    disk.step(replace(opened(9), depth=Depth(2, 1, 4096)))
    assert disk.counts["bytes.measuring"] == 4096
    leases = of(disk.host_stored(1, 2, 3, 4, 5), LeaseHost)
    first = disk.leased(leases[0])
    assert of(disk.leased(leases[1]), WriteSlots) == [], "one batch flies"
    disk.finish(first)
    assert disk.announced == {1, 2, 3, 4}
    one(disk.fill(1), ReadSlots)
    second = one(disk.fill(2, 3), ReadSlots)
    assert disk.fill(4) == []
    assert one(disk.read(second), ReadSlots).blocks == (block(4),)


def test_while_blocks_are_summed_up_the_disk_reads_others() -> None:
    """1. One block may fly: the second waits. 2. The first has landed: the second flies. 3. It has
    landed, too: with two that are summed up the third waits. 4. It flies when the first has ended;
    what lands after its end is no news."""
    disk = Disk(limits=Limits(read_blocks_max=1, ahead_batches=0))
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
    assert disk.core.idle()


def test_what_was_written_to_measure_is_of_the_budget() -> None:
    """A day of 48 slots: the burst is two slots, and the measurement took one of them."""
    disk = Disk(write_budget=48 * SLOT_BYTES, ready=False)
    disk.step(ArenaKnown(arena()))
    disk.step(replace(opened(4), depth=Depth(None, None, SLOT_BYTES)))
    disk.core.writes.budget.take(0, disk.now_ms)
    assert disk.core.writes.budget.level == -SLOT_BYTES


def test_the_front_of_a_short_run_overtakes_the_tail_of_a_long_one() -> None:
    """One may fly. A run of three fills comes, then a short run: its front goes before the tails
    of the long one, but nobody waits for ever."""
    disk = Disk(slots=9, limits=Limits(reads_max=1))
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


# --- malformed ----------------------------------------------------------------------------------


def test_names_that_are_no_hashes_are_counted_and_answered() -> None:
    """The wire checks hashes in bulk only here: nothing changes, and a fill gets its error."""
    disk = Disk()
    for event in disk.host.stored([block(1)]):
        run = event.runs[0]
        bad = type(event)(**{key: getattr(event, key) for key in event.__struct_fields__} | {
            "runs": [type(run)(parent=run.parent, hashes=["zz"])]})  # fmt: skip
        assert disk.step(HostEvent("0", bad)) == []
    assert disk.step(HitsTold("", Hits(namespace="0" * 64, hashes=["1"]))) == []
    request = FillRequest(epoch=HOST_EPOCH, until_ms=9_999, slots=[FillSlot(hash="x", slot=1)])
    assert refusal(disk.step(FillAsked(1, request))) == "bad_identity"
    assert disk.counts["dropped.malformed"] == 3
    assert disk.core.idle()


# --- the host tier ------------------------------------------------------------------------------


def test_the_arena_is_asked_for_until_it_is_cut() -> None:
    """A host tier without an engine has no slots yet; an event or a tick asks again, once."""
    disk = Disk(ready=False)
    assert one(disk.step(HostSeen("0")), AskArena).instance == "0"
    assert disk.step(HostSeen("0")) == []
    assert disk.step(ArenaFailed("0")) == []
    assert len(of(disk.wait(1_000), AskArena)) == 1
    assert disk.step(ArenaKnown(arena(slot_bytes=0))) == []
    assert len(of(disk.host_stored(1), AskArena)) == 1
    effects = disk.step(ArenaKnown(arena()))
    assert one(effects, OpenStore).slot_bytes == SLOT_BYTES
    assert one(effects, AskHostSnapshot).instance == "0"
    assert asked(one(disk.step(opened(4)), LeaseHost)) == [1], "what waited goes"


def test_a_new_life_of_the_host_has_another_arena() -> None:
    """A write of the old life comes to nothing; the blocks on disk stay, fills are refused."""
    disk = Disk()
    disk.store(1)
    old = one(disk.host_stored(2), LeaseHost)
    disk.step(HostLost("0"))
    assert refusal(disk.fill(1)) == "stale_arena"
    disk.step(HostSeen("0"))
    effects = disk.step(ArenaKnown(arena(epoch=HOST_EPOCH + 1)))
    assert one(effects, AskHostSnapshot).instance == "0"
    effects = disk.leased(old)
    assert of(effects, WriteSlots) == []
    disk.released(one(effects, ReleaseHost), valid=False)
    assert disk.announced == {1}
    assert refusal(disk.fill(1)) == "stale_arena"
    assert len(of(disk.fill(1, epoch=HOST_EPOCH + 1), ReadSlots)) == 1


def test_an_event_of_a_newer_life_asks_for_its_arena() -> None:
    """The registry may be slower than the events."""
    disk = Disk()
    disk.host.epoch += 1
    assert len(of(disk.host_stored(1), AskArena)) == 1


# --- the store ----------------------------------------------------------------------------------


def test_a_warm_restart_announces_what_the_journal_says() -> None:
    """… before any arena is known; its blocks can be read as soon as one is."""
    disk = Disk(ready=False)
    disk.step(opened(4, {0: block(1), 3: block(2)}))
    assert disk.announced == {1, 2}
    assert one(disk.events, Stored).seq == 2
    assert disk.counts["recovered_blocks"] == 2
    assert of(disk.step(ArenaKnown(arena())), OpenStore) == []
    assert one(disk.fill(1, 2), ReadSlots).sources == (0, 3)
    disk.store(5)
    assert disk.on_disk() == {1: 0, 2: 3, 5: 1}


def in_steps(slots: int, *there: int, at_once: int = 2) -> tuple[Disk, list[Effect]]:
    """After a restart with these blocks in slots 0, 1, …, the first of which are announced."""
    disk = Disk(ready=False, slots=slots, limits=Limits(announced_blocks_max=at_once))
    disk.step(ArenaKnown(arena()))
    effects = disk.step(opened(slots, {slot: block(number) for slot, number in enumerate(there)}))
    return disk, effects


def test_a_warm_restart_is_announced_in_steps_and_serves_meanwhile() -> None:
    """1. Five blocks, two at once. 2. What nobody was told of is read, too. 3. A snapshot between
    two steps is what was announced so far. 4. The last step asks for no other.
    """
    disk, effects = in_steps(5, 1, 2, 3, 4, 5)
    assert disk.announced == {1, 2}
    assert of(effects, AnnounceLater) == [AnnounceLater()]
    disk.finish(disk.fill(5, 1))
    snapshot = disk.core.snapshot()
    assert snapshot_numbers(snapshot) == {1, 2}
    assert snapshot.seq == len(disk.events)
    assert of(disk.step(AnnounceMore()), AnnounceLater) == [AnnounceLater()]
    assert disk.announced == {1, 2, 3, 4}
    assert of(disk.step(AnnounceMore()), AnnounceLater) == []
    assert disk.announced == {1, 2, 3, 4, 5}
    assert disk.step(AnnounceMore()) == []


def test_what_leaves_before_it_is_announced_is_never_heard_of() -> None:
    """Evicted for another block, found to be rotten, and discarded while it is read."""
    disk, _ = in_steps(4, 1, 3, 5, 7)
    assert disk.announced == {1, 3}
    disk.finish(disk.fill(1, 3))  # Used just now: the others leave before them.
    [reading] = of(disk.fill(7), ReadSlots)
    disk.store(9)
    assert disk.announced == {1, 3, 9}
    disk.read(reading, 7)
    assert disk.counts["evictions.evicted"] == disk.counts["evictions.corrupt"] == 1
    disk.step(AnnounceMore())
    assert disk.announced == {1, 3, 9}
    assert of(disk.events, Removed) == []
    disk.store(5)
    assert disk.announced == {1, 3, 5, 9}


def test_a_store_that_is_made_anew_removes_what_was_announced_only() -> None:
    """Another model's arena is known before all of the former life's blocks are announced."""
    disk, _ = in_steps(4, 1, 3, 5, 7)
    disk.step(ArenaKnown(arena(epoch=HOST_EPOCH + 1, slot_bytes=2 * SLOT_BYTES)))
    assert one(disk.events, Removed).hashes == [name(1).hex(), name(3).hex()]
    assert disk.counts["dropped.store_reformatted"] == 4
    assert disk.step(AnnounceMore()) == []


def test_who_stops_while_it_announces_is_silent_afterwards() -> None:
    """The last `cleared` is the last event, and the blocks are there after the next restart."""
    disk, _ = in_steps(4, 1, 3, 5, 7)
    disk._take(disk.core.stop())
    assert of(disk.step(AnnounceMore()), AnnounceLater) == []
    assert isinstance(disk.events[-1], Cleared)


def snapshot_numbers(snapshot: SnapshotReply) -> set[int]:
    """The blocks in a snapshot."""
    return {int(text, 16) for part in snapshot.parts for run in part.runs for text in run.hashes}


def test_a_store_of_another_slot_size_is_made_anew_once_nothing_flies() -> None:
    """A model with other blocks has come: what was there is announced as removed first."""
    disk = Disk()
    disk.store(1)
    read = one(disk.fill(1), ReadSlots)
    larger = arena(epoch=HOST_EPOCH + 1, slot_bytes=2 * SLOT_BYTES)
    assert of(disk.step(ArenaKnown(larger)), OpenStore) == []
    assert one(disk.read(read), OpenStore).slot_bytes == 2 * SLOT_BYTES
    assert disk.announced == set()
    assert one(disk.events, Removed).reason == "reformatted"
    assert disk.counts["dropped.store_reformatted"] == 1
    assert refusal(disk.fill(1, epoch=HOST_EPOCH + 1)) == "stale_arena"


def test_a_store_that_cannot_be_made_is_said_and_tried_again() -> None:
    """A full disk: not ready, with the reason, alive; ready when there is room."""
    disk = Disk(ready=False)
    disk.step(ArenaKnown(arena()))
    assert disk.step(StoreFailed("no room for 4 bytes")) == [SayAccepting(False)]
    stats = disk.core.statistics()
    assert (stats.ready, stats.reasons) == (False, ["no room for 4 bytes"])
    assert disk.host_stored(1) == []
    assert disk.wait(STORE_RETRY_MS - 1) == []
    assert len(of(disk.wait(1), OpenStore)) == 1
    effects = disk.step(opened(4))
    assert SayAccepting(True) in effects
    disk.finish(effects)
    assert disk.core.statistics().ready
    assert disk.announced == {1}


def test_a_long_journal_is_rewritten_with_what_is_live_and_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store of one slot, limit 4 records: each block costs a record, and one for the last."""
    monkeypatch.setattr("kvbm_disk_tier.tier.JOURNAL_RECORDS_MIN", 0)
    disk = Disk(slots=1, limits=Limits(journal_records_per_slot=4))
    disk.store(1)
    disk.store(2)
    effects = disk.released(one(disk.written(writing(disk, 3)), ReleaseHost))
    assert [type(effect) for effect in effects] == [AppendJournal, RewriteJournal]
    rewrite = one(effects, RewriteJournal)
    assert [record.block for record in rewrite.records] == [block(3)]
    disk.finish(effects[:1])
    assert disk.recovered() == disk.on_disk() == {3: 0}


def test_a_rewrite_keeps_what_fails_later_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The append of a block fails after it has been rewritten into the journal."""
    monkeypatch.setattr("kvbm_disk_tier.tier.JOURNAL_RECORDS_MIN", 0)
    disk = Disk(slots=2, limits=Limits(journal_records_per_slot=0))
    disk.store(1, 2)
    effects = disk.released(one(disk.written(writing(disk, 3)), ReleaseHost))
    assert of(effects, RewriteJournal)
    disk.journal_failed(one(effects, AppendJournal))
    assert disk.recovered() == disk.on_disk()
    assert 3 not in disk.recovered()


# --- the end ------------------------------------------------------------------------------------


def test_after_the_last_cleared_nothing_is_announced_or_begun() -> None:
    """What flies ends in silence, and is back after the restart."""
    disk = Disk(limits=Limits(writes_max=1, batch_blocks_max=1, writes_beside_reads_max=1))
    disk.store(1)
    effects = disk.leased(one(disk.host_stored(2, 3, 4), LeaseHost))
    write, ahead = one(effects, WriteSlots), one(effects, LeaseHost)
    read = one(disk.fill(1), ReadSlots)
    last = disk.core.stop()
    disk._take(last)
    assert disk.announced == set()
    assert disk.core.snapshot().parts == []
    assert refusal(disk.fill(1)) == "stopping"
    assert filled(disk.read(read)) == {1: ""}
    disk.lease_failed(ahead)
    disk.finish(disk.written(write))
    assert len(disk.events) == disk.core.snapshot().seq
    assert disk.core.idle()
    assert disk.counts["dropped.write_stopping"] == 2
    assert sorted(disk.recovered()) == [1, 2]


def test_the_snapshot_is_what_was_announced() -> None:
    """Same blocks, same position."""
    disk = Disk()
    disk.store(1, 2)
    snapshot = disk.core.snapshot()
    names = {SequenceHash(bytes.fromhex(text)) for part in snapshot.parts for run in part.runs
             for text in run.hashes}  # fmt: skip
    assert names == {name(1), name(2)}
    assert (snapshot.epoch, snapshot.seq) == (EPOCH, len(disk.events))


def test_a_block_has_a_story() -> None:
    """For the assertion messages, and for `kvbm` to tell."""
    disk = Disk()
    disk.store(1)
    assert any("committed in slot 0" in line for line in disk.core.story(name(1)))
