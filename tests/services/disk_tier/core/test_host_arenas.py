"""A disk tier below several host tiers: each has an arena, and is asked for what it had."""

from __future__ import annotations

import msgspec
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.verbs import ArenaReply, FillRequest, FillSlot, Hits, LeaseReply
from kvbm_disk_tier.core.effects import (
    AskArena,
    AskHostSnapshot,
    DropArena,
    Effect,
    LeaseHost,
    OpenStore,
    ReadSlots,
    WriteSlots,
)
from kvbm_disk_tier.core.host_arenas import UNCUT_MS
from kvbm_disk_tier.core.messages import (
    ArenaFailed,
    ArenaKnown,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostJoined,
    HostLeft,
    HostSnapshot,
    HostSnapshotFailed,
    Leased,
)

from tests.services.disk_tier.helpers import (
    NAMESPACE,
    SLOT_BYTES,
    Disk,
    arena,
    block,
    leased_slot,
    name,
    of,
    one,
)

OTHER_EPOCH = 77


def other(*, epoch: int = OTHER_EPOCH, slot_bytes: int = SLOT_BYTES) -> ArenaReply:
    """The arena of host tier 1."""
    reply = arena(epoch=epoch, slot_bytes=slot_bytes)
    return msgspec.structs.replace(reply, instance="1", path="/other")


class TwoHosts(Disk):
    """Both are there and their arenas are known."""

    def __init__(self) -> None:
        super().__init__(slots=8)
        self.second = Announcer(host="h", source="host-tier-1", tier="host", epoch=OTHER_EPOCH)
        self.step(HostJoined("0"))
        self.step(HostJoined("1"))
        self.step(ArenaKnown(other()))

    def second_stored(self, *wanted: int) -> list[Effect]:
        """Host tier 1 announces a chain."""
        events = self.second.stored([block(number) for number in wanted])
        return [effect for event in events for effect in self.step(HostEvent("1", event))]


def test_each_is_leased_what_it_has_announced() -> None:
    disk = TwoHosts()
    [first] = of(disk.host_stored(1, 2), LeaseHost)
    [second] = of(disk.second_stored(3, 4), LeaseHost)
    assert (first.instance, first.request.epoch) == ("0", arena().epoch)
    assert (second.instance, second.request.epoch) == ("1", OTHER_EPOCH)
    [write] = of(disk.leased(second), WriteSlots)
    assert write.epoch == OTHER_EPOCH


def test_hits_say_who_has_the_blocks() -> None:
    disk = TwoHosts()
    hits = Hits(namespace=NAMESPACE.hex(), hashes=[name(5).hex()], instance="1")
    [lease] = of(disk.step(HitsTold(hits.instance, hits)), LeaseHost)
    assert lease.instance == "1"


def test_a_lease_that_was_not_answered_is_asked_for_again_where_it_was() -> None:
    """Also one of blocks that a snapshot has listed."""
    disk = TwoHosts()
    [lease] = of(disk.second_stored(3), LeaseHost)
    [again] = of(disk.lease_failed(lease, "deadline_exceeded"), LeaseHost)
    assert (again.instance, again.request.hashes) == ("1", [name(3).hex()])
    listed = HostSnapshot("1", disk.second.snapshot([block(3), block(4)]))
    [more] = of(disk.step(listed), LeaseHost)
    assert (more.instance, more.request.hashes) == ("1", [name(4).hex()])


def test_a_fill_goes_into_the_arena_that_it_names() -> None:
    disk = TwoHosts()
    disk.store(1)
    slots = [FillSlot(hash=name(1).hex(), slot=3)]
    for epoch in (arena().epoch, OTHER_EPOCH):
        request = FillRequest(
            epoch=epoch, until_ms=disk.now_ms + 1_000, slots=slots, slot_bytes=SLOT_BYTES
        )
        [read] = of(disk.step(FillAsked(1, request)), ReadSlots)
        assert (read.epoch, read.targets) == (epoch, (3,))


def test_the_arena_of_who_is_gone_is_unmapped_and_the_other_s_is_not() -> None:
    disk = TwoHosts()
    assert of(disk.step(HostLeft("1")), DropArena) == [DropArena("1")]
    assert set(disk.core.arenas.mapped) == {"0"}
    assert of(disk.host_stored(1), LeaseHost)
    assert of(disk.step(HostJoined("1")), AskArena) == [AskArena("1")]


def test_an_arena_that_is_known_after_its_host_tier_has_left_is_unmapped() -> None:
    """It stayed mapped, and its memory taken, until the disk tier ended."""
    disk = TwoHosts()
    disk.step(HostLeft("1"))
    disk.step(HostJoined("1", OTHER_EPOCH))
    disk.step(HostLeft("1"))
    assert of(disk.step(ArenaKnown(other())), DropArena) == [DropArena("1")]
    assert set(disk.core.arenas.mapped) == {"0"}
    assert of(disk.step(HostJoined("1", OTHER_EPOCH)), AskArena) == [AskArena("1")]
    disk.step(ArenaKnown(other()))
    assert set(disk.core.arenas.mapped) == {"0", "1"}


def test_a_life_that_has_left_is_not_asked_and_one_that_is_heard_of_is() -> None:
    """Its last events come after it; the next life's may come before the registry's word."""
    disk = TwoHosts()
    disk.step(HostJoined("1", OTHER_EPOCH))
    disk.step(HostLeft("1"))
    disk.step(ArenaKnown(other()))
    assert not of(disk.second_stored(3), AskArena)
    disk.second = Announcer(host="h", source="host-tier-1", tier="host", epoch=OTHER_EPOCH + 1)
    assert of(disk.second_stored(4), AskArena) == [AskArena("1")]
    assert not of(disk.step(ArenaKnown(other(epoch=OTHER_EPOCH + 1))), DropArena)
    assert set(disk.core.arenas.mapped) == {"0", "1"}


def test_a_life_that_the_registry_names_may_have_a_lower_epoch() -> None:
    """After the loss of a registry: its arena is the one that is wanted, and not asked for on and
    on. What is late of the life before has it asked for once, as a life that is not named yet would
    be."""
    disk = TwoHosts()
    disk.step(HostLeft("1"))
    lower = other(epoch=OTHER_EPOCH - 9)
    assert of(disk.step(HostJoined("1", lower.epoch)), AskArena) == [AskArena("1")]
    disk.step(ArenaKnown(lower))
    assert not of(disk.wait(UNCUT_MS), AskArena)
    assert of(disk.second_stored(3), AskArena) == [AskArena("1")]
    disk.step(ArenaKnown(lower))
    assert not of(disk.wait(UNCUT_MS), AskArena)


def test_what_waits_for_an_arena_holds_up_nobody() -> None:
    """Host tier 1 lives anew, and its arena is not known yet: the other's blocks are written."""
    disk = TwoHosts()
    disk.step(HostLeft("1"))
    disk.step(HostJoined("1"))
    assert not of(disk.second_stored(3), LeaseHost)
    [lease] = of(disk.host_stored(1), LeaseHost)
    assert lease.instance == "0"
    [later] = of(disk.step(ArenaKnown(other())), LeaseHost)
    assert later.instance == "1"


def test_a_store_takes_the_blocks_of_an_arena_of_other_sizes() -> None:
    """It is not made anew for them; each arena's blocks are leased from it."""
    disk = Disk(slots=32)
    disk.step(HostJoined("0"))
    disk.step(HostJoined("1"))
    assert not of(disk.step(ArenaKnown(other(slot_bytes=2 * SLOT_BYTES))), OpenStore)
    second = Announcer(host="h", source="host-tier-1", tier="host", epoch=OTHER_EPOCH)
    large = msgspec.structs.replace(block(9), bytes=SLOT_BYTES + 1)
    [stored] = second.stored([large])
    lease = one(disk.step(HostEvent("1", stored)), LeaseHost)
    assert lease.instance == "1"
    leased = Leased(lease.write, LeaseReply(lease=1, slots=[leased_slot(9, bytes=large.bytes)]))
    assert one(disk.step(leased), WriteSlots).blocks == (large,)
    assert of(disk.host_stored(1), LeaseHost)


def test_after_lost_events_both_are_asked_what_they_hold() -> None:
    disk = TwoHosts()
    asked = of(disk.step(HostEventsLost()), AskHostSnapshot)
    assert asked == [AskHostSnapshot("0"), AskHostSnapshot("1")]


def test_a_host_tier_that_did_not_say_what_it_holds_is_asked_again() -> None:
    """NATS has just come back, and the host tier has not connected yet; one that left is passed."""
    disk = TwoHosts()
    disk.step(HostSnapshotFailed("0"))
    disk.step(HostSnapshotFailed("1"))
    disk.step(HostLeft("1"))
    assert of(disk.wait(1_000), AskHostSnapshot) == [AskHostSnapshot("0")]
    assert of(disk.wait(10_000), AskHostSnapshot) == []


def test_each_is_asked_again_by_itself() -> None:
    disk = Disk()
    disk.step(HostJoined("1"))
    disk.step(ArenaFailed("1"))
    assert of(disk.wait(1_000), AskArena) == [AskArena("1")]
