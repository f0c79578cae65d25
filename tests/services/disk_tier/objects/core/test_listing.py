"""The object tier's core: what listings do to the table, with a bucket made of a dictionary."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tenant_tag import digest_end
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.breaker import PAUSE_MS
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Removed, Stored
from kvbm_common.wire.verbs import FillReply, FillRequest, FillSlot, LeaseReply
from kvbm_disk_tier.core.effects import (
    Answer,
    AppendJournal,
    Effect,
    LeaseHost,
    OpenStore,
    ProbeStore,
    Publish,
    ReadSlots,
    ReleaseHost,
    WriteSlots,
)
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.journal import Operation, Replay
from kvbm_disk_tier.core.messages import (
    ArenaKnown,
    FillAsked,
    HostEvent,
    Journaled,
    Leased,
    ReadDone,
    Released,
    StoreDown,
    StoreOpened,
    StoreProbed,
    StoreUp,
    Tick,
    Written,
)
from kvbm_disk_tier.objects.core.core import FIRST_LISTING_MS, ObjectTierCore
from kvbm_disk_tier.objects.core.messages import (
    GoneLost,
    ListedBlock,
    ListingBegun,
    ListingEnded,
    ListingStalled,
    ObjectsListed,
    RangeListed,
    SlotsCompared,
)
from kvbm_disk_tier.objects.core.ranges import Ranges

from tests.services.disk_tier.helpers import (
    HOST_EPOCH,
    SLOT_BYTES,
    arena,
    asked,
    block,
    leased_slot,
    name,
    numbers,
    one,
)


class Bucket:
    """A bucket with its ages, and one host's core that lists it."""

    def __init__(
        self,
        *,
        slots: int = 4,
        ttl_ms: int = 0,
        objects: dict[Block, int] | None = None,
        listed: bool = True,
    ):
        self.objects: dict[Block, int] = objects if objects is not None else {}
        """Object → age."""
        self.core = ObjectTierCore(
            host="h", instance="0", epoch=7, ttl_ms=ttl_ms,
            frequency_filter=FrequencyFilter(enabled=False),
        )  # fmt: skip
        self.core.start()
        self.now_ms = 1_000_000
        self.announced: set[int] = set()
        self.effects: list[Effect] = []
        self.host = Announcer(host="h", source="host-tier-0", tier="host", epoch=HOST_EPOCH)
        assert one(self.step(Tick()), OpenStore) is not None, "opened without an arena"
        self.step(StoreOpened(Layout.unsized(slots), Replay({}, 1, 0, 0)))
        if listed:
            self.list()

    def step(self, event: object) -> list[Effect]:
        """One input; deletes take effect at once."""
        effects = list(self.core.step(event, self.now_ms))  # type: ignore[arg-type]
        self.core.check()
        for effect in effects:
            match effect:
                case Publish(Stored(runs=runs)):
                    stored = {int(text, 16) for run in runs for text in run.hashes}
                    assert not stored & self.announced, "announced twice"
                    self.announced |= stored
                case Publish(Removed(hashes=hashes)):
                    removed = {int(text, 16) for text in hashes}
                    assert removed <= self.announced
                    self.announced -= removed
                case AppendJournal(records=records):
                    for record in records:
                        if record.operation is Operation.REMOVED:
                            self.objects.pop(record.block, None)
                case _:
                    pass
        assert self.announced == set(self.here()), "the events say something else than the table"
        return effects

    def here(self) -> list[int]:
        """What this host would read."""
        return sorted(numbers(self.core.inventory.table.blocks()))

    def stored(self) -> list[int]:
        """What the bucket holds."""
        return sorted(numbers(self.objects))

    def list(
        self, *, page: int = 2, complete: bool = True, digits: int = 0, is_whole: bool = True
    ) -> None:
        """One listing, in the order of the names."""
        ranges = Ranges(digits)
        self.step(ListingBegun(ranges))
        entries = [
            ListedBlock(block, age)
            for block, age in sorted(self.objects.items(), key=lambda e: (e[0].hash, e[0].checksum))
        ]
        for number in range(ranges.count):
            mine = [entry for entry in entries if ranges.of(entry.block.hash) == number]
            for start in range(0, len(mine), page):
                self.step(ObjectsListed(tuple(mine[start : start + page]), number))
            if complete:
                self.step(RangeListed(number, is_whole))
        if complete:
            self.compare()
        else:
            self.step(ListingStalled())

    def compare(self) -> None:
        """The end of a listing: the table is looked at, some slots at a time."""
        slots = range(0, self.core.inventory.table.slot_count, 3)
        for first in slots:
            self.step(SlotsCompared(first, 3))
        self.step(ListingEnded())
        for first in slots:
            self.step(GoneLost(first, 3))

    def put(self, *wanted: int, age_ms: int = 0) -> None:
        """Another host stores blocks."""
        self.objects |= {block(number): age_ms for number in wanted}


def other(number: int, which: int = 1) -> Block:
    """The same block, computed with other rounding on another host."""
    known = block(number)
    return Block(known.hash, known.parent, known.namespace, known.checksum + which, known.bytes)


def test_a_listing_is_the_table() -> None:
    """Whoever has stored it; again, it changes nothing."""
    bucket = Bucket()
    bucket.put(1, 2, 3)
    bucket.list()
    assert bucket.here() == [1, 2, 3]
    bucket.list()
    assert bucket.here() == [1, 2, 3]
    assert bucket.core.counts["listed_blocks"] == 3
    assert bucket.core.view.statistics().figures["listing"] == 0


def test_what_others_have_deleted_is_gone_after_a_complete_listing_only() -> None:
    """A listing that broke off proves nothing."""
    bucket = Bucket()
    bucket.put(1, 2, 3)
    bucket.list()
    del bucket.objects[block(2)]
    bucket.list(complete=False)
    assert bucket.here() == [1, 2, 3]
    bucket.list()
    assert bucket.here() == [1, 3]
    assert bucket.core.counts["evictions.gone"] == 1


def test_what_a_listing_could_not_read_is_not_gone() -> None:
    """One that has left out a folder proves nothing of its range."""
    bucket = Bucket()
    bucket.put(1, 2, 3)
    bucket.list()
    del bucket.objects[block(2)]
    for _ in range(3):
        bucket.list(is_whole=False)
        assert bucket.here() == [1, 2, 3]
    bucket.list()
    assert bucket.here() == [1, 3]


def test_what_a_listing_could_not_read_is_not_missed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many are missing, two listings must miss them that have read all."""
    monkeypatch.setattr("kvbm_disk_tier.objects.core.listing.DOUBTED_MIN", 0)
    bucket = Bucket()
    bucket.put(1, 2)
    bucket.list()
    bucket.objects.clear()
    for is_whole in (False, True):
        bucket.list(is_whole=is_whole)
        assert bucket.here() == [1, 2]
    bucket.list()
    assert bucket.here() == []


def test_a_block_that_was_stored_during_a_listing_is_not_gone() -> None:
    """1. the listing has passed the place of block 1 2. block 1 is evicted and stored again."""
    bucket = Bucket(slots=1)
    bucket.put(1)
    bucket.list()
    bucket.step(ListingBegun())
    bucket.core.inventory.lose([(0, block(1))], "evicted", 0)
    offload(bucket, 1)
    bucket.step(RangeListed())
    bucket.compare()
    assert bucket.here() == [1]


def test_a_block_that_was_discarded_while_it_was_read_is_not_lost_again() -> None:
    """1. block 1 is read 2. it is lost 3. it is stored again, in another slot: that one stays."""
    bucket = Bucket()
    bucket.step(ArenaKnown(arena()))
    bucket.put(1)
    bucket.list()
    assert one(fill(bucket, 1), ReadSlots).sources == (0,)
    bucket.core.inventory.lose([(0, block(1))], "corrupt", 0)
    bucket.step(Tick())
    bucket.put(1)
    bucket.list()
    assert bucket.here() == [1]


def test_a_bucket_beyond_its_capacity_loses_its_oldest_everywhere() -> None:
    """Two hosts that know different halves delete the same objects, not each the other's."""
    shared: dict[Block, int] = {}
    first, second = Bucket(slots=2, objects=shared), Bucket(slots=2, objects=shared)
    first.put(1, 2, age_ms=1_000)
    first.list()
    for known in (block(1), block(2)):
        del shared[known]
    second.put(3, age_ms=500)
    second.put(4, age_ms=5_000)
    second.list()
    first.put(1, 2, age_ms=1_000)
    first.list()
    assert first.stored() == [2, 3]
    second.list()
    assert second.stored() == first.here() == second.here() == [2, 3]


def test_with_the_same_age_the_names_decide() -> None:
    """Nothing else may: two hosts would differ."""
    bucket = Bucket(slots=2)
    bucket.put(5, 3, 4, 1, age_ms=1_000)
    bucket.list()
    assert bucket.stored() == [4, 5]


def test_a_tenant_within_its_share_keeps_its_oldest() -> None:
    """Another tenant's hosts have stored too much between two listings."""
    bucket = Bucket(slots=4)
    bucket.put(1, 2, age_ms=86_000_000)
    noisy = bytes(20) + digest_end("noisy")
    for number in range(3, 9):
        bucket.objects[msgspec.structs.replace(block(number), namespace=noisy)] = 1_000 * number
    bucket.list()
    assert bucket.stored() == bucket.here() == [1, 2, 3, 4]


def test_expired_objects_are_deleted_known_or_not() -> None:
    """By the store's clock alone."""
    bucket = Bucket(ttl_ms=10_000)
    bucket.put(1, 2, age_ms=9_000)
    bucket.put(3, age_ms=11_000)
    bucket.list()
    assert bucket.here() == bucket.stored() == [1, 2]
    bucket.objects[block(1)] = 12_000
    bucket.list()
    assert bucket.here() == bucket.stored() == [2]
    assert bucket.core.counts["evictions.expired"] == 2


def test_of_two_objects_of_a_block_one_stays_and_it_is_the_same_for_all() -> None:
    """Whichever this host had stored, and in which order they are listed."""
    for mine in (block(1), other(1)):
        bucket = Bucket()
        bucket.objects = {mine: 0}
        bucket.list()
        bucket.objects = {other(1): 0, block(1): 0}
        bucket.list(page=1)
        assert list(bucket.objects) == [block(1)]
        assert bucket.core.inventory.table.blocks() == [block(1)]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("digits", [0, 1])
def test_two_objects_of_a_block_may_have_one_age(slots: int, digits: int) -> None:
    """Two hosts have stored it in one second, S3's finest. Full or not, one object is left."""
    bucket = Bucket(slots=slots)
    bucket.objects = dict.fromkeys((block(1), other(1), block(2), other(2)), 1_000)
    for _ in range(2):
        bucket.list(page=4, digits=digits)
    assert bucket.objects
    assert len({found.hash for found in bucket.objects}) == len(bucket.objects)
    assert bucket.core.inventory.table.blocks() == list(bucket.objects)


@given(
    objects=st.dictionaries(
        st.builds(other, st.integers(1, 6), st.integers(0, 2)), st.sampled_from((0, 1_000))
    ),
    slots=st.integers(1, 8),
    page=st.integers(1, 18),
    digits=st.integers(0, 1),
)
def test_hosts_agree_whatever_has_one_age(
    objects: dict[Block, int], slots: int, page: int, digits: int
) -> None:
    """1. Two hosts list one bucket in turn. 2. Each has what it holds, each block once."""
    hosts = [Bucket(slots=slots, objects=objects, listed=False) for _ in range(2)]
    for _ in range(3):
        for host in hosts:
            host.list(page=page, digits=digits)
    held = [set(host.core.inventory.table.blocks()) for host in hosts]
    assert len({found.hash for found in objects}) == len(objects)
    assert len(objects) <= Ranges(digits).share(slots)
    assert held[0] <= set(objects)
    assert len(held[0]) == len(held[1]) == min(slots, len(objects))
    if digits == 0:
        assert held[0] == held[1] == set(objects)


def test_a_full_table_makes_room_by_eviction_when_it_writes() -> None:
    """The evicted object is deleted; capacity holds without a listing."""
    bucket = Bucket(slots=2)
    bucket.put(1, 2)
    bucket.list()
    offload(bucket, 3)
    assert len(bucket.here()) == 2
    assert 3 in bucket.here()
    assert len(bucket.objects) == 1, "the new one is put by the medium"


def test_a_lost_lease_does_not_matter_and_lost_objects_do() -> None:
    """What is written was verified; what could not be written is not announced."""
    bucket = Bucket()
    offload(bucket, 1, 2, 3, valid=False, lost=(1,))
    assert bucket.here() == [1, 3]
    assert bucket.core.counts["offload_blocks_d2o"] == 2
    assert bucket.core.counts["dropped.write_lost"] == 1


def test_each_block_of_a_fill_has_its_own_fate() -> None:
    """Gone and corrupt are lost, a failure may pass: the block stays."""
    bucket = Bucket()
    bucket.put(1, 2, 3, 4)
    bucket.list()
    bucket.step(ArenaKnown(arena()))
    read = one(fill(bucket, 1, 2, 3, 4), ReadSlots)
    reasons = ("", "gone", "corrupt", "transfer_failed")
    effects = bucket.step(ReadDone(read.read, (True, False, False, False), reasons))
    reply = one(effects, Answer).reply
    assert isinstance(reply, FillReply)
    assert [slot.reason for slot in reply.slots] == list(reasons)
    assert bucket.here() == [1, 4]
    assert bucket.stored() == [1, 2, 4], "what is gone need not be deleted, what is corrupt must"


def test_while_the_store_is_down_nothing_is_begun() -> None:
    """Fills are refused at once, writes wait; the reason is said."""
    bucket = Bucket()
    bucket.put(1)
    bucket.list()
    bucket.step(ArenaKnown(arena()))
    bucket.step(StoreDown("DYN_KVBM_OBJECT_ENDPOINT is away"))
    assert bucket.core.view.statistics().ready is False
    assert bucket.core.view.statistics().reasons == ["DYN_KVBM_OBJECT_ENDPOINT is away"]
    assert not isinstance(one(fill(bucket, 1), Answer).reply, FillReply)
    assert not [e for e in seen(bucket, 2) if isinstance(e, LeaseHost)]
    up = bucket.step(StoreUp())
    assert one(up, LeaseHost).request.hashes == [name(2).hex()]
    assert bucket.core.view.statistics().ready
    assert one(fill(bucket, 1), ReadSlots).sources == (bucket.core.inventory.table.find(name(1)),)


def test_a_store_that_only_takes_no_blocks_is_read_from() -> None:
    """1. No block of three batches could be put. 2. A fill is served. 3. A probe puts an object."""
    bucket = Bucket()
    bucket.step(ArenaKnown(arena()))
    bucket.put(1)
    bucket.list()
    for number in (2, 4, 6):
        lease = one(seen(bucket, number), LeaseHost)
        reply = LeaseReply(lease=1, slots=[leased_slot(number)])
        write = one(bucket.step(Leased(lease.write, reply)), WriteSlots)
        assert bucket.core.view.statistics().ready
        bucket.step(Written(write.write, (0,), "away"))
    told = bucket.core.view.statistics()
    assert told.reasons == ["the object store takes no blocks: blocks cannot be written: away"]
    assert not [e for e in seen(bucket, 8) if isinstance(e, LeaseHost)]
    assert one(fill(bucket, 1), ReadSlots).sources == (bucket.core.inventory.table.find(name(1)),)
    bucket.now_ms += PAUSE_MS
    assert one(bucket.step(Tick()), ProbeStore)
    assert one(bucket.step(StoreProbed()), LeaseHost).request.hashes == [name(8).hex()]
    assert bucket.core.view.statistics().ready


def test_a_store_that_is_opened_and_takes_no_blocks_says_so() -> None:
    """Keys that may not put, or a file system that was full before: it is read from."""
    core = ObjectTierCore(host="h", instance="0", epoch=7)
    core.start()
    core.step(Tick(), 0)
    opened = StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0), write_failure="denied")
    core.step(opened, 0)
    core.check()
    told = core.view.statistics()
    assert told.reasons == ["the object store takes no blocks: blocks cannot be written: denied"]
    assert core.health.reads
    core.step(Tick(), PAUSE_MS)
    core.step(StoreProbed(), PAUSE_MS)
    assert core.view.statistics().ready


def test_after_goodbye_pages_change_nothing() -> None:
    """A listing may still run while the service ends."""
    bucket = Bucket()
    bucket.put(1)
    bucket.step(ListingBegun())
    bucket.core.stop()
    for event in (ObjectsListed((ListedBlock(block(1), 0),)), RangeListed(), GoneLost(0, 4)):
        effects = bucket.core.step(event, bucket.now_ms)
        assert not [effect for effect in effects if isinstance(effect, Publish | OpenStore)]
    assert not len(bucket.core.inventory.table)


def seen(bucket: Bucket, *wanted: int) -> list[Effect]:
    """The host tier announces blocks."""
    effects: list[Effect] = []
    for event in bucket.host.stored([block(number) for number in wanted]):
        effects += bucket.step(HostEvent("0", event))
    return effects


def test_a_block_that_a_listing_finds_before_it_is_written_is_not_gone() -> None:
    """Another host has put 1 while it was leased here: 2 is written, and nothing was dropped."""
    bucket = Bucket()
    bucket.step(ArenaKnown(arena()))
    lease = one(seen(bucket, 1, 2), LeaseHost)
    bucket.objects[block(1)] = 0
    bucket.list()
    assert bucket.here() == [1]
    reply = LeaseReply(lease=1, slots=[leased_slot(1), leased_slot(2)])
    assert numbers(one(bucket.step(Leased(lease.write, reply)), WriteSlots).blocks) == [2]
    assert "dropped.write_gone" not in bucket.core.counts


def offload(bucket: Bucket, *wanted: int, valid: bool = True, lost: Iterable[int] = ()) -> None:
    """All the way of a batch."""
    if not bucket.core.arenas.usable:
        bucket.step(ArenaKnown(arena()))
    lease = one(seen(bucket, *wanted), LeaseHost)
    slots = [leased_slot(number) for number in asked(lease)]
    write = one(bucket.step(Leased(lease.write, LeaseReply(lease=1, slots=slots))), WriteSlots)
    assert numbers(write.blocks) == list(wanted)
    assert write.unit_bytes == SLOT_BYTES
    release = one(bucket.step(Written(write.write, tuple(lost))), ReleaseHost)
    journal = bucket.step(Released(release.write, valid))
    bucket.step(Journaled((one(journal, AppendJournal).write or 0,)))


def fill(bucket: Bucket, *wanted: int) -> list[Effect]:
    """The host tier asks for blocks."""
    request = FillRequest(
        epoch=HOST_EPOCH, until_ms=bucket.now_ms + 1_000,
        slots=[FillSlot(hash=name(number).hex(), slot=number) for number in wanted],
        slot_bytes=SLOT_BYTES,
    )  # fmt: skip
    return bucket.step(FillAsked(1, request))


def test_a_block_that_is_listed_while_it_waits_for_its_write_is_not_written() -> None:
    """1. a write is leased 2. the listing names one of its blocks 3. only the other is written."""
    bucket = Bucket()
    bucket.step(ArenaKnown(arena()))
    lease = one(seen(bucket, 1, 2), LeaseHost)
    bucket.put(1)
    bucket.list()
    slots = [leased_slot(number) for number in asked(lease)]
    write = one(bucket.step(Leased(lease.write, LeaseReply(lease=1, slots=slots))), WriteSlots)
    assert numbers(write.blocks) == [2]
    assert bucket.here() == [1]


def test_nothing_is_written_before_the_first_listing_has_ended() -> None:
    """After a restart the host tier tells of blocks that the bucket has: they are not put again."""
    bucket = Bucket(listed=False)
    bucket.put(1)
    bucket.step(ArenaKnown(arena()))
    assert not [e for e in seen(bucket, 1, 2) if isinstance(e, LeaseHost)]
    bucket.step(ListingBegun())
    bucket.step(ObjectsListed((ListedBlock(block(1), 0),)))
    lease = one(bucket.step(ListingStalled()), LeaseHost)
    assert lease.request.hashes == [name(2).hex()]


# --- many at once -------------------------------------------------------------------------------


def many(count: int, *, slots: int = 400) -> Bucket:
    """A bucket of `count` objects that are known since the listing before last."""
    bucket = Bucket(slots=slots)
    bucket.put(*range(1, count + 1))
    bucket.list(page=100)
    assert len(bucket.here()) == count
    return bucket


def test_a_listing_that_misses_much_is_believed_when_the_next_one_says_the_same() -> None:
    """An empty bucket where 200 blocks were: all are read as before, until it is said twice."""
    bucket = many(200)
    stored = dict(bucket.objects)
    bucket.objects.clear()
    bucket.list()
    assert len(bucket.here()) == 200
    assert bucket.core.counts["listings_doubted"] == 1
    assert bucket.core.view.statistics().figures["listing_doubted_blocks"] == 200
    bucket.objects.update(stored)
    bucket.list(page=100)
    assert bucket.core.view.statistics().figures["listing_doubted_blocks"] == 0
    bucket.objects.clear()
    bucket.list()
    assert len(bucket.here()) == 200, "what was missed once before has been named since"
    bucket.list()
    assert bucket.here() == []
    assert bucket.core.counts["evictions.gone"] == 200


def test_of_two_doubted_listings_only_what_both_miss_is_gone() -> None:
    bucket = many(300)
    stored = dict(bucket.objects)
    for number in range(1, 151):
        del bucket.objects[block(number)]
    bucket.list(page=100)
    assert len(bucket.here()) == 300
    bucket.objects.clear()
    bucket.objects.update({one: age for one, age in stored.items() if one.hash <= name(50)})
    bucket.list(page=100)
    gone = set(range(51, 151))
    assert set(bucket.here()) == set(range(1, 301)) - gone


def test_a_few_missing_blocks_are_gone_at_once() -> None:
    """One in eight, or 64 of a small store: other hosts evict as well."""
    bucket = many(200)
    for number in range(1, 65):
        del bucket.objects[block(number)]
    bucket.list(page=100)
    assert len(bucket.here()) == 200 - 64
    assert bucket.core.counts["listings_doubted"] == 0


def test_ranges_are_judged_like_the_whole() -> None:
    """1. Sixteen ranges, of which the blocks are in one. 2. What is gone there is gone."""
    bucket = Bucket(slots=8)
    bucket.put(1, 2, 3)
    bucket.list(digits=1)
    assert bucket.here() == [1, 2, 3]
    del bucket.objects[block(2)]
    bucket.list(digits=1)
    assert bucket.here() == [1, 3]


def test_a_range_beyond_its_share_loses_its_oldest_while_it_is_listed() -> None:
    """Forty slots for sixteen ranges are three each, and five by chance: with the first page."""
    bucket = Bucket(slots=40)
    share = Ranges(1).share(40)
    assert share == 8
    numbers_ = range(1, share + 5)
    for number in numbers_:
        bucket.put(number, age_ms=1_000 * number)
    bucket.step(ListingBegun(Ranges(1)))
    entries = [ListedBlock(found, age) for found, age in bucket.objects.items()]
    bucket.step(ObjectsListed(tuple(entries), 0))
    assert bucket.stored() == bucket.here() == list(range(1, share + 1))
    assert bucket.core.counts["evictions.surplus"] == 4


@pytest.mark.parametrize("is_known", [False, True])
def test_blocks_of_a_namespace_that_was_not_listed_are_not_gone(is_known: bool) -> None:
    """It is new: its first block was put while the listing was planned. Or its folder is unread."""
    bucket = Bucket()
    if is_known:
        bucket.put(1)
        bucket.list()
    bucket.step(ListingBegun(Ranges(), frozenset([bytes(32)]) if is_known else None))
    if not is_known:
        offload(bucket, 1)
    bucket.step(RangeListed())
    bucket.compare()
    assert bucket.here() == [1]


def test_writes_do_not_wait_for_the_listing_of_a_large_store() -> None:
    """It takes hours: after a minute what it may know already is put again."""
    bucket = Bucket(listed=False)
    bucket.step(ArenaKnown(arena()))
    bucket.step(ListingBegun())
    assert not [e for e in seen(bucket, 1) if isinstance(e, LeaseHost)]
    bucket.now_ms += FIRST_LISTING_MS - 1
    assert not [e for e in bucket.step(Tick()) if isinstance(e, LeaseHost)]
    bucket.now_ms += 1
    assert one(bucket.step(Tick()), LeaseHost)
