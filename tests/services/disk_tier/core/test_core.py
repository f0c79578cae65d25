"""The disk tier's core: host tiers, the store, restarts, and the end."""

from __future__ import annotations

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Cleared, Removed, Stored
from kvbm_common.wire.verbs import FillRequest, FillSlot, Hits, SnapshotReply
from kvbm_disk_tier.core.effects import (
    AnnounceLater,
    AppendJournal,
    AskArena,
    AskHostSnapshot,
    Effect,
    LeaseHost,
    OpenStore,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    SayAccepting,
    WriteSlots,
)
from kvbm_disk_tier.core.journal_writer import REWRITE_PAUSE_MS
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import (
    AnnounceMore,
    ArenaFailed,
    ArenaKnown,
    FillAsked,
    HitsTold,
    HostEvent,
    HostJoined,
    HostLeft,
    JournalFailed,
    StoreFailed,
)
from kvbm_disk_tier.core.store_status import STORE_RETRY_MS

from tests.services.disk_tier.helpers import (
    EPOCH,
    HOST_EPOCH,
    SLOT_BYTES,
    Disk,
    arena,
    asked,
    block,
    filled,
    name,
    of,
    one,
    opened,
    refusal,
    writing,
)

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
    assert disk.core.view.idle()


# --- the host tier ------------------------------------------------------------------------------


def test_the_arena_is_asked_for_until_it_is_cut() -> None:
    """A host tier without an engine has no slots yet; an event or a tick asks again, once."""
    disk = Disk(ready=False)
    assert one(disk.step(HostJoined("0")), AskArena).instance == "0"
    assert disk.step(HostJoined("0")) == []
    assert disk.step(ArenaFailed("0")) == []
    assert len(of(disk.wait(1_000), AskArena)) == 1
    assert disk.step(ArenaKnown(arena(slot_bytes=0))) == []
    assert len(of(disk.host_stored(1), AskArena)) == 1
    effects = disk.step(ArenaKnown(arena()))
    assert one(effects, OpenStore).slot_bytes == SLOT_BYTES
    assert one(effects, AskHostSnapshot).instance == "0"
    assert asked(one(disk.step(opened(4)), LeaseHost)) == [1], "what waited goes"


def test_an_arena_that_is_not_cut_is_asked_for_seldom() -> None:
    """No engine has come. A tick asks once in five seconds, a fill and an event at once."""
    disk = Disk(ready=False)
    disk.step(HostJoined("0"))
    disk.step(ArenaKnown(arena(slot_bytes=0)))
    asked_at = []
    for second in range(1, 12):
        if of(disk.wait(1_000), AskArena):
            asked_at.append(second)
            disk.step(ArenaKnown(arena(slot_bytes=0)))
    assert asked_at == [1, 6, 11]
    assert len(of(disk.step(HostJoined("0")), AskArena)) == 1, "the registry tells that it is cut"
    disk.step(ArenaKnown(arena(slot_bytes=0)))
    assert len(of(disk.host_stored(1), AskArena)) == 1


def test_a_new_life_of_the_host_has_another_arena() -> None:
    """A write of the old life comes to nothing; the blocks on disk stay, fills are refused."""
    disk = Disk()
    disk.store(1)
    old = one(disk.host_stored(2), LeaseHost)
    disk.step(HostLeft("0"))
    assert refusal(disk.fill(1)) == "stale_arena"
    disk.step(HostJoined("0"))
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
    disk = Disk(ready=False, slots=slots, limits=DiskTierLimits(announced_blocks_max=at_once))
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
    snapshot = disk.core.view.snapshot()
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
    disk.took(disk.core.stop())
    assert of(disk.step(AnnounceMore()), AnnounceLater) == []
    assert isinstance(disk.events[-1], Cleared)


def snapshot_numbers(snapshot: SnapshotReply) -> set[int]:
    """The blocks in a snapshot."""
    return {int(text, 16) for part in snapshot.parts for run in part.runs for text in run.hashes}


def test_a_store_of_another_slot_size_is_made_once_nothing_is_in_flight() -> None:
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
    stats = disk.core.view.statistics()
    assert (stats.ready, stats.reasons) == (False, ["no room for 4 bytes"])
    assert disk.host_stored(1) == []
    assert disk.wait(STORE_RETRY_MS - 1) == []
    assert len(of(disk.wait(1), OpenStore)) == 1
    effects = disk.step(opened(4))
    assert SayAccepting(True) in effects
    disk.finish(effects)
    assert disk.core.view.statistics().ready
    assert disk.announced == {1}


def test_a_long_journal_is_rewritten_with_what_is_live_and_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store of one slot, limit 4 records: each block costs a record, and one for the last."""
    monkeypatch.setattr("kvbm_disk_tier.core.journal_writer.JOURNAL_RECORDS_MIN", 0)
    disk = Disk(slots=1, limits=DiskTierLimits(journal_records_per_slot=4))
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
    monkeypatch.setattr("kvbm_disk_tier.core.journal_writer.JOURNAL_RECORDS_MIN", 0)
    disk = Disk(slots=1, limits=DiskTierLimits(journal_records_per_slot=4))
    disk.store(1)
    disk.store(2)
    effects = disk.released(one(disk.written(writing(disk, 3)), ReleaseHost))
    assert of(effects, RewriteJournal)
    disk.journal_failed(one(effects, AppendJournal))
    assert disk.recovered() == disk.on_disk()
    assert 3 not in disk.recovered()


def test_a_rewrite_in_parts_knows_what_comes_and_goes_meanwhile() -> None:
    """Three slots, a part for each. Before each part ends a block takes the place of another, in a
    slot that was written and in one that was not."""
    disk = Disk(slots=3, limits=DiskTierLimits(rewritten_slots_max=1))
    disk.store(1, 2, 3)
    part = one(disk.step(JournalFailed(None, "journal", "io")), RewriteJournal)
    seen = [part]
    for number in (4, 5, 6):
        disk.store(number)
        assert disk.recovered() == disk.on_disk(), "a crash in the middle of a rewrite"
        follows = of(disk.rewritten(part), RewriteJournal)
        seen += follows
        part = follows[0] if follows else part
    assert [(one.is_first, one.is_last) for one in seen] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert [len(one.records) for one in seen] == [1, 1, 1]
    assert disk.recovered() == disk.on_disk()
    assert len(disk.on_disk()) == 3


def test_a_rewrite_that_fails_in_a_later_part_begins_again() -> None:
    """Goal: the long journal stays, with what came since, and is rewritten from the first slot."""
    disk = Disk(slots=3, limits=DiskTierLimits(rewritten_slots_max=1))
    disk.store(1, 2, 3)
    first = one(disk.step(JournalFailed(None, "journal", "io")), RewriteJournal)
    assert of(disk.rewritten(first), RewriteJournal)
    disk.store(4)
    disk.rewrite_failed()
    assert disk.recovered() == disk.on_disk()
    disk.store(5)
    again = one(disk.wait(REWRITE_PAUSE_MS), RewriteJournal)
    assert again.is_first
    disk.finish([again])
    assert disk.recovered() == disk.on_disk()


def test_another_store_ends_the_rewrite_under_way() -> None:
    """A part is in flight when blocks of another size come: no other part follows, and none of the
    new store, however that part has ended."""
    for ends_well in (True, False):
        disk = Disk(slots=3, limits=DiskTierLimits(rewritten_slots_max=1))
        disk.store(1, 2, 3)
        part = one(disk.step(JournalFailed(None, "journal", "io")), RewriteJournal)
        larger = arena(epoch=HOST_EPOCH + 1, slot_bytes=2 * SLOT_BYTES)
        assert of(disk.step(ArenaKnown(larger)), OpenStore)
        late = disk.rewritten(part) if ends_well else disk.rewrite_failed()
        assert of(late, RewriteJournal) == []
        assert of(disk.step(opened(3)), RewriteJournal) == []
        assert of(disk.wait(REWRITE_PAUSE_MS), RewriteJournal) == []


def test_a_rewrite_keeps_the_order_in_which_blocks_came() -> None:
    """Goal: after a restart roots leave before their leaves no more than before a rewrite.

    The former life has committed slot 1 before slot 0; then a block comes to slot 2.
    """
    limits = DiskTierLimits(rewritten_slots_max=2, announced_blocks_max=1)
    disk = Disk(slots=4, limits=limits, ready=False)
    disk.step(opened(4, {1: block(7), 0: block(8)}))
    disk.step(AnnounceMore())
    disk.step(ArenaKnown(arena()))
    disk.store(9)
    disk.finish(disk.step(JournalFailed(None, "journal", "io")))
    by_order = sorted(disk.journal, key=lambda record: record.order)
    assert [(record.place, record.block) for record in by_order] == [
        (1, block(7)), (0, block(8)), (2, block(9)),
    ]  # fmt: skip


# --- the end ------------------------------------------------------------------------------------


def test_after_the_last_cleared_nothing_is_announced_or_begun() -> None:
    """What is in flight ends in silence, and is back after the restart."""
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=1, batch_transfers_max=1))
    disk.store(1)
    effects = disk.leased(one(disk.host_stored(2, 3, 4), LeaseHost))
    write, ahead = one(effects, WriteSlots), one(effects, LeaseHost)
    read = one(disk.fill(1), ReadSlots)
    last = disk.core.stop()
    disk.took(last)
    assert disk.announced == set()
    assert disk.core.view.snapshot().parts == []
    assert refusal(disk.fill(1)) == "stopping"
    assert filled(disk.read(read)) == {1: ""}
    disk.lease_failed(ahead)
    disk.finish(disk.written(write))
    assert len(disk.events) == disk.core.view.snapshot().seq
    assert disk.core.view.idle()
    assert disk.counts["dropped.write_stopping"] == 2
    assert sorted(disk.recovered()) == [1, 2]


def test_the_snapshot_is_what_was_announced() -> None:
    """Same blocks, same position."""
    disk = Disk()
    disk.store(1, 2)
    snapshot = disk.core.view.snapshot()
    names = {SequenceHash(bytes.fromhex(text)) for part in snapshot.parts for run in part.runs
             for text in run.hashes}  # fmt: skip
    assert names == {name(1), name(2)}
    assert (snapshot.epoch, snapshot.seq) == (EPOCH, len(disk.events))


def test_a_block_has_a_story() -> None:
    """For the assertion messages, and for `kvbm` to tell."""
    disk = Disk()
    disk.store(1)
    assert any("committed in slot 0" in line for line in disk.core.story(name(1)))
