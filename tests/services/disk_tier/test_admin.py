"""What operators may do to a disk tier: evict, reset, pin, drain; in the core and with files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.tier.breaker import FAILURES_MAX
from kvbm_common.tier.layout import Layout
from kvbm_common.wire.admin import (
    BlockReply,
    BlockRequest,
    DrainReply,
    DrainRequest,
    FilterReply,
    FilterRequest,
    PinReply,
    PinRequest,
    PinsReply,
    PinsRequest,
    PolicyReply,
    PolicyRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
    TierRequest,
    UnpinReply,
    UnpinRequest,
)
from kvbm_common.wire.verbs import ErrorBody
from kvbm_disk_tier.core.effects import (
    Answer,
    AppendJournal,
    OpenStore,
    ReadSlots,
    RewriteJournal,
    SayAccepting,
)
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.journal_writer import REWRITE_PAUSE_MS
from kvbm_disk_tier.core.messages import (
    AdminAsked,
    ArenaKnown,
    DeletesAnswered,
    DeletesRefused,
    JournalFailed,
    ReadFailed,
    StoreDown,
    StoreFailed,
    StoreOpened,
    StoreUp,
)
from kvbm_disk_tier.core.store_status import RESETS_MAX
from kvbm_disk_tier.objects.core.core import ObjectTierCore
from kvbm_disk_tier.objects.core.messages import ListedBlock, ListingBegun, ObjectsListed

from tests.services.disk_tier.helpers import Disk, arena, block, filled, name, one, opened
from tests.services.disk_tier.shell.test_service import (
    Host,
    ask,
    living,
    settings_of,
)

T = TypeVar("T")


def admin(disk: Disk, verb: str, request: TierRequest | FilterRequest, kind: type[T]) -> T:
    """The answer to a verb, of this type."""
    reply = one(disk.step(AdminAsked(1, verb, request)), Answer).reply
    assert isinstance(reply, kind), reply
    return reply


def hexes(*numbers: int) -> list[str]:
    """Names of blocks."""
    return [name(number).hex() for number in numbers]


def test_a_reset_is_journaled() -> None:
    """What an operator has removed does not come back with the next start."""
    disk = Disk()
    disk.store(1, 2, 3)
    reply = admin(disk, "reset", RemoveRequest(hashes=hexes(2)), RemoveReply)
    assert (reply.removed, disk.announced) == (1, {1, 3})
    assert disk.recovered() == disk.on_disk()
    assert disk.counts["evictions.admin"] == 1


def test_evict_leaves_what_is_being_read() -> None:
    """1 is on its way to the arena; 2 goes. The read ends well, then 1 can go, too."""
    disk = Disk()
    disk.store(1, 2)
    reading = disk.fill(1)
    everything = RemoveRequest(everything=True)
    assert admin(disk, "evict", everything, RemoveReply) == RemoveReply(removed=1, kept=1)
    [read] = reading
    assert filled(disk.read(read)) == {1: ""}  # type: ignore[arg-type]
    assert admin(disk, "evict", everything, RemoveReply) == RemoveReply(removed=1)


def test_a_reset_while_being_read_ends_the_name_at_once() -> None:
    """The read in flight ends well: its bytes are still there. The next one is a miss."""
    disk = Disk()
    disk.store(1)
    [read] = disk.fill(1)
    admin(disk, "reset", RemoveRequest(hashes=hexes(1)), RemoveReply)
    assert disk.announced == set()
    disk.read(read)  # type: ignore[arg-type]
    assert filled(disk.fill(1)) == {1: "gone"}
    assert disk.core.inventory.table.counts()["reset"] == 4


def test_a_pin_holds_against_newcomers() -> None:
    """Four slots, 1 and 2 pinned: six newcomers evict each other. Unpinned, 1 and 2 go."""
    disk = Disk()
    disk.store(1, 2)
    pin = admin(disk, "pin", PinRequest(hashes=hexes(1, 2), ttl_ms=60_000), PinReply).pin
    for number in range(11, 17):
        disk.store(number)
    assert {1, 2} <= disk.announced
    assert admin(disk, "unpin", UnpinRequest(pin=pin), UnpinReply).ended
    for number in range(21, 25):
        disk.store(number)
    assert disk.announced == {21, 22, 23, 24}


def test_a_pin_ends_by_itself() -> None:
    """At its deadline."""
    disk = Disk()
    disk.store(1)
    admin(disk, "pin", PinRequest(hashes=hexes(1), ttl_ms=100), PinReply)
    assert disk.core.inventory.table.counts()["active"] == 1
    disk.wait(100)
    assert disk.core.inventory.table.counts()["active"] == 0


def test_a_block_that_leaves_leaves_its_pins() -> None:
    """1 and 2 of four slots are pinned. Nothing waits for the end of the pin.

    1. 1 cannot be read any more: its slot is free when the read ends. 2. A reset takes 2.
    """
    disk = Disk()
    disk.store(1, 2)
    admin(disk, "pin", PinRequest(hashes=hexes(1, 2), ttl_ms=60_000), PinReply)
    [read] = disk.fill(1)
    disk.read(read, 1)  # type: ignore[arg-type]
    [entry] = admin(disk, "pins", PinsRequest(), PinsReply).pins
    assert (entry.blocks, disk.core.inventory.table.counts()["active"]) == (1, 1)
    admin(disk, "reset", RemoveRequest(everything=True), RemoveReply)
    assert admin(disk, "pins", PinsRequest(), PinsReply).pins == []
    for number in range(11, 15):
        disk.store(number)
    assert disk.announced == {11, 12, 13, 14}


def test_a_store_that_is_made_anew_has_no_pins() -> None:
    """A model with other blocks came: the pinned blocks are gone, and nothing holds their slots."""
    disk = Disk()
    disk.store(1)
    admin(disk, "pin", PinRequest(hashes=hexes(1), ttl_ms=60_000), PinReply)
    assert one(disk.step(ArenaKnown(arena(epoch=9, slot_bytes=8192))), OpenStore)
    assert disk.announced == set()
    assert len(disk.core.inventory.leases) == 0


def test_a_store_that_cannot_be_opened_is_not_reset() -> None:
    """Goal: its blocks come back with the disk, so `removed=0` would be taken for empty."""
    disk = Disk(ready=False)
    disk.step(StoreFailed("the disk is not mounted"))
    everything = RemoveRequest(everything=True)
    refusal = admin(disk, "reset", everything, ErrorBody)
    assert refusal.code == "store"
    assert "may come back: the disk is not mounted" in refusal.message
    assert admin(disk, "evict", everything, RemoveReply).removed == 0
    disk.step(opened(4, {0: block(1)}))
    assert admin(disk, "reset", everything, RemoveReply).removed == 1


def test_a_store_that_is_down_is_not_reset() -> None:
    """Goal: a bucket that refuses keeps its objects, which are served again once it answers."""
    disk = Disk()
    disk.store(1)
    everything = RemoveRequest(everything=True)
    disk.step(StoreDown("no access (AccessDenied)"))
    refusal = admin(disk, "reset", everything, ErrorBody)
    assert refusal.code == "store"
    assert "may come back: no access (AccessDenied)" in refusal.message
    disk.step(StoreUp())
    assert admin(disk, "reset", everything, RemoveReply).removed == 1


def test_a_store_that_refuses_to_delete_is_not_reset_and_says_so() -> None:
    """Goal: keys that may not delete leave the objects, which the next listing finds."""
    disk = Disk()
    disk.store(1)
    everything = RemoveRequest(everything=True)
    disk.step(DeletesRefused("objects cannot be deleted (AccessDenied)"))
    refusal = admin(disk, "reset", everything, ErrorBody)
    assert "may come back: objects cannot be deleted (AccessDenied)" in refusal.message
    assert disk.core.view.statistics().reasons == ["objects cannot be deleted (AccessDenied)"]
    disk.store(2)
    assert disk.announced == {1, 2}, "it goes on to be written"
    disk.step(DeletesRefused(""))
    assert disk.core.view.statistics().ready
    assert admin(disk, "reset", everything, RemoveReply).removed == 2


def test_a_reset_removes_all_blocks_then_names_the_objects_that_could_not_be_deleted() -> None:
    """Goal: one locked object neither makes a tier unready nor keeps others from being removed."""
    disk = Disk()
    disk.store(1)
    everything = RemoveRequest(everything=True)
    disk.step(DeletesRefused("", "objects wait to be deleted: 1 (AccessDenied)"))
    assert disk.core.view.statistics().ready
    assert admin(disk, "reset", everything, RemoveReply).removed == 1
    refusal = admin(disk, "reset", everything, ErrorBody)
    assert refusal.code == "undeleted"
    assert "may come back: objects wait to be deleted: 1 (AccessDenied)" in refusal.message
    assert admin(disk, "evict", everything, RemoveReply).removed == 0
    disk.step(DeletesRefused(""))
    assert admin(disk, "reset", everything, RemoveReply).removed == 0


def test_a_bucket_is_not_reset_before_it_has_answered() -> None:
    """Goal: what it holds is not known yet, so `removed=0` would be taken for empty."""
    core = ObjectTierCore(host="h", instance="0", epoch=7)
    core.start()
    asked = AdminAsked(1, "reset", RemoveRequest(everything=True))
    refusal = one(core.step(asked, 0), Answer).reply
    assert isinstance(refusal, ErrorBody)
    assert "may come back: the store has not answered yet" in refusal.message
    core.step(StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0)), 0)
    assert one(core.step(asked, 0), Answer).reply == RemoveReply(removed=0)
    core.check()


def test_a_bucket_is_not_reset_before_it_has_answered_for_each_removed_object() -> None:
    """Goal: a first delete that is unanswered may fail yet, so "nothing left" would be wrong.

    1. A block is listed and reset. 2. Its delete is under way. 3. It is answered.
    """
    core = ObjectTierCore(host="h", instance="0", epoch=7)
    core.start()
    core.step(StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0)), 0)
    core.step(ListingBegun(), 0)
    core.step(ObjectsListed((ListedBlock(block(1), 0),)), 0)
    asked = AdminAsked(1, "reset", RemoveRequest(everything=True))
    effects = core.step(asked, 0)
    assert one(effects, Answer).reply == RemoveReply(removed=1)
    order = one(effects, AppendJournal).records[-1].order
    for _ in range(2):
        refusal = one(core.step(asked, 0), Answer).reply
        assert isinstance(refusal, ErrorBody)
        assert refusal.code == "undeleted"
        assert "the bucket has not answered all deletes yet" in refusal.message
        core.step(DeletesAnswered(order - 1), 0)
    core.step(DeletesAnswered(order), 0)
    assert one(core.step(asked, 0), Answer).reply == RemoveReply(removed=0)
    core.check()


def test_a_reset_of_an_empty_bucket_waits_for_the_deletes_of_what_was_evicted_before() -> None:
    """1. A block is evicted, its delete is unanswered. 2. A reset finds none, and waits: a listing
    may bring it back. 3. Another is evicted: the first reset does not wait for it, a second does,
    whether the first has ended well or was given up."""
    core = ObjectTierCore(host="h", instance="0", epoch=7)
    core.start()
    core.step(StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0)), 0)
    core.step(ListingBegun(), 0)
    core.step(ObjectsListed((ListedBlock(block(1), 0), ListedBlock(block(2), 0))), 0)

    def reset(job: str) -> str:
        request = RemoveRequest(namespace=bytes(32).hex(), job=job)
        reply = one(core.step(AdminAsked(1, "reset", request), 0), Answer).reply
        return reply.code if isinstance(reply, ErrorBody) else "done"

    orders = []
    for number, job in ((1, "first"), (2, "second")):
        evict = AdminAsked(1, "evict", RemoveRequest(hashes=hexes(number)))
        orders.append(one(core.step(evict, 0), AppendJournal).records[-1].order)
        assert reset(job) == "undeleted"
    core.step(DeletesAnswered(orders[0]), 0)
    assert [reset("first"), reset("second"), reset("first")] == ["done", "undeleted", "done"]
    core.step(DeletesAnswered(orders[1]), 0)
    assert reset("second") == "done"
    core.check()


def test_many_resets_forget_none_that_has_just_removed_something() -> None:
    """1. A reset without a job removes a block. 2. As many others come as are kept. 3. It removes
    another. 4. One more comes: the first is still waiting."""
    core = ObjectTierCore(host="h", instance="0", epoch=7)
    core.start()
    core.step(StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0)), 0)
    core.step(ListingBegun(), 0)

    def reset(job: str) -> object:
        request = RemoveRequest(everything=True, job=job)
        return one(core.step(AdminAsked(1, "reset", request), 0), Answer).reply

    for number, jobs in ((1, RESETS_MAX - 1), (2, 1)):
        core.step(ObjectsListed((ListedBlock(block(number), 0),)), 0)
        assert reset("") == RemoveReply(removed=1)
        for job in range(jobs):
            reset(f"{number}-{job}")
    assert isinstance(reset(""), ErrorBody)


def test_a_reset_fails_while_the_journal_lacks_records_of_removed_blocks() -> None:
    """Goal: the job of a reset asks twice. 1. The record of what is removed is lost, and so is a
    rewrite of the journal: it fails. 2. A rewrite has ended well: the blocks stay away."""
    disk = Disk()
    disk.store(1, 2)
    everything, lost = RemoveRequest(everything=True), JournalFailed(None, "journal", "io")
    assert admin(disk, "reset", everything, RemoveReply).removed == 2
    assert one(disk.step(lost), RewriteJournal).is_last
    refusal = admin(disk, "reset", everything, ErrorBody)
    assert refusal.code == "store"
    assert "may come back: the journal lacks records" in refusal.message
    disk.rewrite_failed()
    assert admin(disk, "reset", everything, ErrorBody) == refusal
    rewrite = one(disk.wait(REWRITE_PAUSE_MS), RewriteJournal)
    disk.step(lost)
    again = one(disk.rewritten(rewrite), RewriteJournal)
    assert admin(disk, "reset", everything, ErrorBody) == refusal, "the new one lacks one, too"
    disk.rewritten(again)
    assert admin(disk, "reset", everything, RemoveReply).removed == 0


def test_a_disk_that_is_bypassed_is_not_reset() -> None:
    """Goal: a disk that hangs takes no record of what is removed, and says nothing of it."""
    disk = Disk()
    disk.store(1)
    for _ in range(FAILURES_MAX):
        read = one(disk.fill(1), ReadSlots)
        disk.step(ReadFailed(read.read, "io", "Input/output error"))
    refusal = admin(disk, "reset", RemoveRequest(everything=True), ErrorBody)
    assert "may come back: the disk is bypassed" in refusal.message


def test_a_drained_tier_reads_and_writes_nothing() -> None:
    """1. It says so to the others. 2. What comes is not written, what is there is read. 3. Back."""
    disk = Disk()
    disk.store(1)
    effects = disk.step(AdminAsked(1, "drain", DrainRequest()))
    assert one(effects, SayAccepting) == SayAccepting(False)
    assert one(effects, Answer).reply == DrainReply(draining=True, was=False)
    disk.store(2)
    assert (disk.announced, disk.counts["dropped.write_draining"]) == ({1}, 1)
    assert len(disk.fill(1)) == 1
    assert one(disk.step(AdminAsked(1, "undrain", DrainRequest())), SayAccepting).accepting


def test_a_smaller_disk_journals_what_it_evicts() -> None:
    """Four slots with three blocks become two: what goes does not come back with a new start."""
    disk = Disk()
    disk.store(1, 2, 3)
    reply = admin(disk, "resize", ResizeRequest(slots=2), ResizeReply)
    assert (reply.slots, reply.was, reply.evicted) == (2, 4, 1)
    assert disk.announced == {1, 2}
    assert disk.recovered() == disk.on_disk()
    disk.store(4)
    assert len(disk.announced) == 2
    assert admin(disk, "resize", ResizeRequest(slots=4), ResizeReply).slots == 4
    disk.store(5, 6)
    assert len(disk.announced) == 4


def test_the_policy_holds_for_a_store_that_is_made_anew() -> None:
    """A model with other blocks comes: the operator's policy chooses there, too."""
    disk = Disk()
    disk.store(1)
    assert admin(disk, "policy", PolicyRequest(policy="prefix"), PolicyReply).was == "lru"
    assert disk.announced == {1}
    disk.step(ArenaKnown(arena(epoch=9, slot_bytes=8192)))
    assert disk.core.view.statistics().policy == "prefix"


def test_the_filter_changes_while_it_runs() -> None:
    """1. What is not named stays. 2. With 1 everything passes, with 4 the third sight does."""
    disk = Disk()
    reply = admin(disk, "filter", FilterRequest(pass_count=4), FilterReply)
    assert (reply.pass_count, reply.decay_ms) == (4, 4 * 3600 * 1000)
    changed = disk.core.pending.admission.filter
    changed.enabled = True
    assert [changed.see(name(1), 0) for _ in range(3)] == [False, False, True]
    admin(disk, "filter", FilterRequest(pass_count=1, decay_ms=1_000), FilterReply)
    assert changed.see(name(2), 0)
    assert [changed.count(name(2), now_ms) for now_ms in (999, 1_000)] == [1, 0]
    assert not admin(disk, "filter", FilterRequest(enabled=False), FilterReply).enabled
    assert disk.core.view.statistics().figures["filter_enabled"] == 0


async def test_over_nats_with_files(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """1. Three blocks to disk. 2. Their story. 3. One is reset, and stays away after a restart."""
    settings = settings_of(nats_server, tmp_path)
    async with Host.living(bus) as host:
        async with living(settings):
            host.store(1, 2, 3)
            await host.wait_announced(1, 2, 3)
            payload = await ask(bus, "block", BlockRequest(hash=name(2).hex()))
            block = msgspec.json.decode(payload, type=BlockReply)
            assert (block.held, block.story[-1].what.split()[0]) == (True, "committed")
            payload = await ask(bus, "reset", RemoveRequest(hashes=hexes(2), actor="ada"))
            assert msgspec.json.decode(payload, type=RemoveReply).removed == 1
            await host.wait_announced(1, 3)
        async with living(settings):
            await host.wait_announced(1, 3)
            payload = await ask(bus, "block", BlockRequest(hash=name(2).hex()))
            assert not msgspec.json.decode(payload, type=BlockReply).held
