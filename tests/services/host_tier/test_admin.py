"""What operators may do to a host tier: evict, reset, pin, drain; its core, and on a real NATS."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec
import pytest
from kvbm_common.errors import RequestFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import AUDIT
from kvbm_common.wire.admin import (
    Audited,
    BlockReply,
    BlockRequest,
    DrainReply,
    DrainRequest,
    PinReply,
    PinRequest,
    PinsReply,
    PinsRequest,
    PolicyReply,
    PolicyRequest,
    PrefetchReply,
    PrefetchRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
    TierRequest,
    UnpinReply,
    UnpinRequest,
    audit_codec,
)
from kvbm_common.wire.events import Removed
from kvbm_common.wire.local import Pulled
from kvbm_common.wire.verbs import ErrorBody
from kvbm_host_tier.core.messages import AdminAsked, Answer, AskFill

from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.helpers import DIGEST, Host, name, of
from tests.services.host_tier.running import ask, held

T = TypeVar("T")


def admin(host: Host, verb: str, request: TierRequest | PrefetchRequest, kind: type[T]) -> T:
    """The answer to a verb, of this type."""
    [answer] = of(host.step(AdminAsked(1, verb, request)), Answer)
    assert isinstance(answer.reply, kind), answer.reply
    return answer.reply


def hexes(*numbers: int) -> list[str]:
    """Names of blocks."""
    return [name(number).hex() for number in numbers]


# --- size and policy ----------------------------------------------------------------------------


def test_a_smaller_tier_evicts_what_is_too_much_and_grows_back() -> None:
    """1. 4 slots with 3 blocks become 2: the oldest block goes. 2. As long as 2 and 3 are leased

    it is no smaller than they are. 3. It grows to what the arena has, and not beyond.
    """
    host = Host()
    host.store(1, 2, 3)
    lease = host.lease(2, 3).lease
    reply = admin(host, "resize", ResizeRequest(slots=1), ResizeReply)
    assert (reply.slots, reply.was, reply.capacity, reply.evicted) == (2, 4, 4, 1)
    assert not reply.more
    assert host.announced == {2, 3}
    assert host.copied(lease)
    reply = admin(host, "resize", ResizeRequest(slots=1), ResizeReply)
    assert (reply.slots, reply.evicted) == (1, 1)
    assert (host.slots["total"], host.slots["retired"]) == (1, 3)
    reply = admin(host, "resize", ResizeRequest(slots=4), ResizeReply)
    assert (reply.slots, reply.was) == (4, 1)
    assert admin(host, "resize", ResizeRequest(slots=5), ErrorBody).code == "bad_size"


def test_a_tier_that_is_not_cut_yet_has_no_size_to_change() -> None:
    """The first engine has not said how large its blocks are."""
    host = Host(attach=False)
    refusal = admin(host, "resize", ResizeRequest(slots=1), ErrorBody)
    assert (refusal.code, refusal.field) == ("bad_size", "slots")


def test_the_eviction_policy_changes_and_the_blocks_stay() -> None:
    """1. 1 is used most, then 2 to 4 come. 2. LFU keeps what it has seen used since: 2.

    3. What it is called is said. An unknown one is refused, and nothing changes.
    """
    host = Host()
    host.store(1, 2, 3, 4)
    reply = admin(host, "policy", PolicyRequest(policy="lfu"), PolicyReply)
    assert (reply.policy, reply.was) == ("lfu", "lru")
    assert host.announced == {1, 2, 3, 4}
    found = host.found(host.look_up(1, 2))
    host.release(found.lease)
    host.store(11, 12)
    assert host.announced == {1, 2, 11, 12}
    assert host.core.view.statistics(host.now_ms).policy == "lfu"
    assert admin(host, "policy", PolicyRequest(policy="no"), ErrorBody).code == "unknown_policy"
    assert admin(host, "policy", PolicyRequest(policy="lfu"), PolicyReply).was == "lfu"


def test_a_staging_arena_keeps_its_policy() -> None:
    """It asks for all free blocks in order, and what is on disk may go anyway."""
    host = Host(staging=True)
    assert admin(host, "policy", PolicyRequest(policy="lfu"), ErrorBody).code == "fixed_policy"
    assert host.core.view.statistics(host.now_ms).policy == "lru"


# --- evict and reset ----------------------------------------------------------------------------


def test_evict_leaves_what_is_read_and_reset_does_not() -> None:
    """1. Of 1, 2 and 9: 1 is leased, 2 goes, 9 was never here. 2. Reset takes 1 at once.

    3. Its slot is free again when the reader is done, and not before.
    """
    host = Host()
    host.store(1, 2)
    lease = host.lease(1).lease
    reply = admin(host, "evict", RemoveRequest(hashes=hexes(1, 2, 9)), RemoveReply)
    assert reply == RemoveReply(removed=1, kept=1, missing=hexes(9))
    assert host.announced == {1}
    reply = admin(host, "reset", RemoveRequest(hashes=hexes(1)), RemoveReply)
    assert (reply.removed, host.announced, host.slots["active"]) == (1, set(), 1)
    assert host.copied(lease)
    assert host.slots["reset"] == 4
    removed = of(host.events, Removed)
    assert [(event.reason, event.hashes) for event in removed] == [
        ("admin", hexes(2)), ("admin", hexes(1)),
    ]  # fmt: skip


def test_a_prefix_takes_what_is_behind_it() -> None:
    """1-2-3 and 11-12: the prefix 2 means 2 and 3."""
    host = Host(slots=8)
    host.store(1, 2, 3)
    host.store(11, 12)
    reply = admin(host, "evict", RemoveRequest(prefix=name(2).hex()), RemoveReply)
    assert (reply.removed, host.announced) == (2, {1, 11, 12})


@pytest.mark.parametrize(
    ("request_", "left"),
    [
        (RemoveRequest(everything=True), set()),
        (RemoveRequest(namespace=DIGEST), set()),
        (RemoveRequest(namespace="0" * 64), {1, 2}),
    ],
    ids=["everything", "namespace", "another namespace"],
)
def test_a_whole_tier_or_namespace(request_: RemoveRequest, left: set[int]) -> None:
    """What is asked for goes, and nothing else."""
    host = Host()
    host.store(1, 2)
    admin(host, "reset", request_, RemoveReply)
    assert host.announced == left


def test_many_blocks_go_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of five goes leaves first, two at a time: what is left stays in one piece. Then a
    step looks whether more has come."""
    monkeypatch.setattr("kvbm_common.tier.removal.REMOVED_MAX", 2)
    host = Host(slots=8)
    host.store(1, 2, 3, 4, 5)
    request = RemoveRequest(prefix=name(1).hex())
    lefts = []
    for more in (True, True, True, False):
        assert admin(host, "evict", request, RemoveReply).more is more
        lefts.append(set(host.announced))
    assert lefts == [{1, 2, 3}, {1}, set(), set()]


@pytest.mark.parametrize(
    "request_",
    [RemoveRequest(), RemoveRequest(hashes=hexes(1), everything=True)],
    ids=["nothing", "two things"],
)
def test_a_selection_is_one_thing(request_: RemoveRequest) -> None:
    """Nobody resets a tier by leaving something out."""
    host = Host()
    host.store(1)
    assert admin(host, "reset", request_, ErrorBody).code == "bad_selection"
    assert host.announced == {1}


def test_a_hash_that_is_none_is_refused() -> None:
    """And nothing is removed."""
    host = Host()
    host.store(1)
    bad = RemoveRequest(hashes=[*hexes(1), "?"])
    assert admin(host, "reset", bad, ErrorBody).code == "bad_identity"
    assert host.announced == {1}


# --- pins ---------------------------------------------------------------------------------------


def test_figures_say_how_many_leases_each_engine_has() -> None:
    """A pin of an operator is a lease, and no engine's."""
    host = Host()
    host.store(1)
    assert host.core.view.statistics(host.now_ms).figures["engine_leases.ada"] == 0
    host.look_up(1)
    admin(host, "pin", PinRequest(hashes=hexes(1), ttl_ms=1_000, actor="ada"), PinReply)
    found = host.core.view.statistics(host.now_ms)
    assert (found.leases, found.figures["pins"], found.figures["engine_leases.ada"]) == (2, 1, 1)


def test_a_pinned_block_outlives_a_full_tier_until_its_time_is_over() -> None:
    """1. Pin 1 of four slots. 2. 11 to 14 push everything else out. 3. After the TTL 1 goes too."""
    host = Host()
    host.store(1, 2)
    pin = admin(host, "pin", PinRequest(hashes=hexes(1, 9), ttl_ms=1_000, actor="ada"), PinReply)
    assert (pin.pinned, pin.missing) == (1, hexes(9))
    host.store(11, 12, 13)
    assert host.announced == {1, 11, 12, 13}
    [entry] = admin(host, "pins", PinsRequest(), PinsReply).pins
    assert (entry.pin, entry.owner, entry.blocks, entry.left_ms) == (pin.pin, "ada", 1, 1_000)
    host.wait(1_000)
    host.store(21, 22, 23, 24)
    assert 1 not in host.announced
    assert admin(host, "pins", PinsRequest(), PinsReply).pins == []


def test_a_pin_is_taken_back_once_and_nothing_else_is() -> None:
    """The lease of a disk tier is no pin."""
    host = Host()
    host.store(1, 2)
    lease = host.lease(2).lease
    pin = admin(host, "pin", PinRequest(hashes=hexes(1), ttl_ms=1_000), PinReply).pin
    assert not host.copied(pin), "a disk tier ends no pin"
    for number, ended in ((lease, False), (pin, True), (pin, False)):
        assert admin(host, "unpin", UnpinRequest(pin=number), UnpinReply).ended is ended
    assert host.slots["active"] == 1


def test_half_of_a_tier_can_be_pinned() -> None:
    """Otherwise it could evict nothing."""
    host = Host()
    host.store(1, 2, 3)
    two = PinRequest(hashes=hexes(1, 2), ttl_ms=1_000)
    admin(host, "pin", two, PinReply)
    admin(host, "pin", two, PinReply)  # The same slots once more.
    refused = admin(host, "pin", PinRequest(hashes=hexes(3), ttl_ms=1_000), ErrorBody)
    assert refused.code == "pin_limit"


def test_a_block_that_leaves_leaves_its_pins() -> None:
    """1 and 2 of four slots are pinned, 2 twice, and 1 is read. Nothing waits for a pin's end.

    1. Reset 1: the pin has 2 left, and the read keeps the slot. 2. Reset 2: no pin is left, all
    slots can be filled, and two blocks can be pinned again.
    """
    host = Host()
    host.store(1, 2)
    for wanted in ((1, 2), (2,)):
        admin(host, "pin", PinRequest(hashes=hexes(*wanted), ttl_ms=60_000), PinReply)
    lease = host.lease(1).lease
    admin(host, "reset", RemoveRequest(hashes=hexes(1)), RemoveReply)
    assert [one.blocks for one in admin(host, "pins", PinsRequest(), PinsReply).pins] == [1, 1]
    assert host.slots["active"] == 2
    assert host.copied(lease)
    admin(host, "reset", RemoveRequest(everything=True), RemoveReply)
    assert admin(host, "pins", PinsRequest(), PinsReply).pins == []
    assert host.core.view.usages(host.now_ms)["pinned"].used == 0
    host.store(11, 12, 13, 14)
    assert host.announced == {11, 12, 13, 14}
    assert admin(host, "pin", PinRequest(hashes=hexes(11, 12), ttl_ms=1), PinReply).pinned == 2


def test_a_pinned_block_that_is_corrupt_holds_no_second_slot() -> None:
    """The engine finds 1 to be wrong. It is stored again, and takes one of the four slots."""
    host = Host()
    host.store(1, 2)
    pin = admin(host, "pin", PinRequest(hashes=hexes(1, 2), ttl_ms=60_000), PinReply).pin
    host.release(host.found(host.look_up(1, 2)).lease, 0)
    host.store(1)
    [entry] = admin(host, "pins", PinsRequest(), PinsReply).pins
    assert (entry.pin, entry.blocks) == (pin, 1)
    assert (host.slots["active"], host.slots["inactive"]) == (1, 1)
    assert admin(host, "unpin", UnpinRequest(pin=pin), UnpinReply).ended
    assert host.slots["active"] == 0


# --- one block, drain ---------------------------------------------------------------------------


def test_a_block_tells_its_story() -> None:
    """Where it is, who holds it, what happened; and what happened also when it is gone."""
    host = Host()
    host.store(1)
    lease = host.lease(1, lease_ms=500).lease
    host.wait(100)
    block = admin(host, "block", BlockRequest(hash=name(1).hex()), BlockReply)
    assert (block.held, block.slot, block.pins) == (True, host.slot_of(1), 1)
    [holder] = block.leases
    assert (holder.id, holder.owner, holder.reason) == (lease, "disk-tier-0", "copy")
    assert holder.left_ms == 400
    assert [entry.what.split()[0] for entry in block.story] == ["staged", "committed"]
    assert [entry.ago_ms for entry in block.story] == [100, 100]
    admin(host, "reset", RemoveRequest(hashes=hexes(1)), RemoveReply)
    gone = admin(host, "block", BlockRequest(hash=name(1).hex()), BlockReply)
    assert (gone.held, gone.story[-1].what) == (False, "removed: admin")


def test_a_drained_tier_serves_and_takes_nothing() -> None:
    """1. Drain: an offer is refused, a lookup is answered. 2. Undrain: all is as before."""
    host = Host()
    host.store(1)
    assert admin(host, "drain", DrainRequest(), DrainReply) == DrainReply(draining=True, was=False)
    [pulled] = of(host.told(host.offer(2)), Pulled)
    assert (pulled.reason, pulled.failed) == ("draining", 1)
    assert len(host.found(host.look_up(1)).slots) == 1
    assert host.core.view.statistics(host.now_ms).figures["draining"] == 1.0
    admin(host, "undrain", DrainRequest(), DrainReply)
    host.store(2)
    assert host.announced == {1, 2}


# --- prefetch -----------------------------------------------------------------------------------


def test_prefetch_brings_what_the_disk_has() -> None:
    """1 is here, 2 and 3 are on disk, 4 nowhere: three blocks are here at the end, none pinned.

    It is no lookup of an engine: the hit rate does not hear of it.
    """
    host = Host(slots=8)
    host.store(1)
    host.disk_stored(2, 3)
    request = PrefetchRequest(hashes=hexes(1, 2, 3, 4), deadline_ms=100)
    [fill] = of(host.step(AdminAsked(1, "prefetch", request)), AskFill)
    [answer] = of(host.filled(fill), Answer)
    assert answer.reply == PrefetchReply(blocks=3, filled=2, reason="not_stored")
    assert (host.announced, host.slots["active"]) == ({1, 2, 3}, 0)
    assert host.core.view.statistics(host.now_ms).figures.get("lookups", 0.0) == 0.0


def test_prefetch_ends_at_its_deadline() -> None:
    """What came by then counts; what comes later stays."""
    host = Host(slots=8)
    host.store(1)
    host.disk_stored(2)
    request = PrefetchRequest(hashes=hexes(1, 2), deadline_ms=100)
    [fill] = of(host.step(AdminAsked(1, "prefetch", request)), AskFill)
    [answer] = of(host.wait(100), Answer)
    assert answer.reply == PrefetchReply(blocks=1, filled=0, reason="deadline")
    host.filled(fill)
    assert (host.announced, host.slots["active"]) == ({1, 2}, 0)


def test_prefetch_is_refused() -> None:
    """Into a drained tier, and of a block that is named twice."""
    host = Host()
    twice = PrefetchRequest(hashes=hexes(1, 1), deadline_ms=100)
    assert admin(host, "prefetch", twice, ErrorBody).code == "bad_identity"
    admin(host, "drain", DrainRequest(), DrainReply)
    once = PrefetchRequest(hashes=hexes(1), deadline_ms=100)
    assert admin(host, "prefetch", once, ErrorBody).code == "draining"


# --- on a real NATS -----------------------------------------------------------------------------


async def audited(bus: Bus, count: int) -> list[Audited]:
    """The first entries of the audit stream."""
    found: list[Audited] = []
    async with (
        asyncio.timeout(5),
        bus.event_subscription(spec=AUDIT, subject=AUDIT.subjects[0]) as entries,
    ):
        async for batch in entries:
            found += [audit_codec.decode(message.payload) for message in batch]
            if len(found) >= count:
                break
    return found


async def test_changes_over_nats_are_audited(engine: RealEngine, bus: Bus) -> None:
    """Pin, reset and a refusal: carried out, and written with who wanted it and how it ended."""
    await engine.store(bus, 1, 2)
    await engine.release(await engine.found(1, 2))
    pin = PinRequest(hashes=hexes(1), ttl_ms=60_000, actor="ada")
    assert msgspec.json.decode(await ask(bus, "pin", pin), type=PinReply).pinned == 1
    everything = RemoveRequest(everything=True, actor="bob")
    reply = msgspec.json.decode(await ask(bus, "evict", everything), type=RemoveReply)
    assert (reply.removed, reply.kept, await held(bus)) == (1, 1, {1})
    with pytest.raises(RequestFailed) as caught:
        await ask(bus, "reset", RemoveRequest(actor="eve"))
    assert caught.value.code == "bad_selection"
    with pytest.raises(RequestFailed):
        await ask(bus, "reset", b"{")
    entries = await audited(bus, 4)
    assert [(e.verb, e.actor, e.outcome) for e in entries] == [
        ("pin", "ada", "ok"), ("evict", "bob", "ok"), ("reset", "eve", "bad_selection"),
        ("reset", "", "bad_message"),
    ]  # fmt: skip
    assert {(e.kind, e.host, e.instance) for e in entries} == {("host-tier", "h", "0")}
    assert '"removed":1' in entries[1].reply


@pytest.mark.usefixtures("host")
async def test_the_log_level_changes_at_once(bus: Bus) -> None:
    """Every service has the verb; a level that is none changes nothing."""
    root = logging.getLogger()
    before = root.level
    try:
        await ask(bus, "log_level", b'{"level": "error"}')
        assert root.level == logging.ERROR
        reply = msgspec.json.decode(await ask(bus, "log_level", b'{"level": "debug"}'))
        assert (reply["was"], root.level) == ("error", logging.DEBUG)
        with pytest.raises(RequestFailed):
            await ask(bus, "log_level", b'{"level": "loud"}')
        assert root.level == logging.DEBUG
    finally:
        root.setLevel(before)
