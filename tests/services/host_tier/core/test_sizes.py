"""Two engines whose blocks have different sizes share one arena."""

from __future__ import annotations

from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.slab_pool import SIZES_MAX
from kvbm_common.wire.events import Stored
from kvbm_common.wire.local import Found, Welcome
from kvbm_common.wire.verbs import LeaseReply, LeaseRequest
from kvbm_host_tier.core.messages import (
    Answer,
    AskFill,
    AttachPeer,
    LeaseAsked,
    PeerAttached,
    StartPull,
)

from tests.services.host_tier.helpers import EPOCH, Host, hello, name, of

SLAB_UNITS = 6
LARGE_BYTES = 3 * UNIT_BYTES


def host_of(slabs: int) -> Host:
    """A host tier with slabs of 6 units; ada's blocks take one of them, eve's three."""
    host = Host(slots=slabs * SLAB_UNITS, slab_bytes=SLAB_UNITS * UNIT_BYTES)
    attach(host, "eve", LARGE_BYTES)
    return host


def attach(host: Host, engine: str, block_bytes: int) -> None:
    """Both halves of an engine of one rank say hello."""
    for effect in of(host.greet(hello(engine=engine, piece_bytes=block_bytes)), AttachPeer):
        host.step(PeerAttached(effect.engine, 0, f"{engine}-1-0"))
    assert of(host.told(host.greet(hello(engine=engine, role="scheduler"))), Welcome)


def store(host: Host, *wanted: int, engine: str) -> list[StartPull]:
    """The whole offload path of a chain; returns its pulls."""
    offer = 1_000 + wanted[0]
    effects, pulls = host.offer(*wanted, offer=offer, engine=engine), list[StartPull]()
    while todo := of(effects, StartPull):
        pulls += todo
        effects = [effect for pull in todo for effect in host.pulled(pull)]
    host.confirm(offer, engine=engine)
    return pulls


def found(host: Host, *wanted: int, engine: str) -> Found:
    """The answer to a lookup."""
    return host.found(host.look_up(*wanted, engine=engine))


def test_slots_of_two_sizes_are_named_by_where_they_begin() -> None:
    """Ada's blocks are in units 0 and 1; eve's have a slab of their own, 3 units each."""
    host = host_of(slabs=3)
    [small] = store(host, 1, 2, engine="ada")
    [large] = store(host, 11, 12, engine="eve")
    assert (small.slots, large.slots) == ((0, 1), (6, 9))
    assert large.block_bytes == LARGE_BYTES
    assert found(host, 1, 2, engine="ada").slots == [0, 1]
    answer = found(host, 11, 12, engine="eve")
    assert (answer.slots, answer.block_bytes) == ([6, 9], LARGE_BYTES)
    reply = host.core.view.arena_reply()
    assert (reply.slot_bytes, reply.slot_count) == (UNIT_BYTES, 3 * SLAB_UNITS)
    assert reply.sizes == [UNIT_BYTES, LARGE_BYTES]


def test_events_say_how_large_blocks_are() -> None:
    """Lower tiers lease blocks of one size together."""
    host = host_of(slabs=3)
    store(host, 1, 2, engine="ada")
    store(host, 11, engine="eve")
    assert [one.block_bytes for one in host.events if isinstance(one, Stored)] == [64, LARGE_BYTES]


def test_blocks_of_another_size_make_room_for_an_engine() -> None:
    """Two slabs full of ada's: eve's two blocks take one, and the rest of ada's stays."""
    host = host_of(slabs=2)
    store(host, *range(1, 13), engine="ada")
    store(host, 21, 22, engine="eve")
    assert len(found(host, 21, 22, engine="eve").slots) == 2
    assert host.core.view.counts["slabs_moved"] == 1
    assert host.core.view.counts["evictions.evicted"] == SLAB_UNITS


def test_a_size_beyond_what_an_arena_can_have_is_refused() -> None:
    """Every slab has blocks of another size, and all of these are leased."""
    host = Host(slots=40 * SIZES_MAX, slab_bytes=40 * UNIT_BYTES)
    for size in range(1, SIZES_MAX + 1):
        if size > 1:
            attach(host, f"e{size}", size * UNIT_BYTES)
        store(host, 100 * size, engine="ada" if size == 1 else f"e{size}")
    refused = host.refusal(host.greet(hello(engine="eve", piece_bytes=40 * UNIT_BYTES)))
    assert (refused.code, refused.field) == ("size_limit", "regions")


def test_a_peer_is_leased_places_and_sizes() -> None:
    """What another host, or a disk tier, reads: where a block begins, and how long it is."""
    host = host_of(slabs=3)
    store(host, 1, engine="ada")
    store(host, 11, 12, engine="eve")
    names = [name(number).hex() for number in (1, 12)]
    request = LeaseRequest(owner="peer", epoch=EPOCH, hashes=names, lease_ms=1_000)
    [reply] = of(host.step(LeaseAsked(1, request)), Answer)
    assert isinstance(reply.reply, LeaseReply)
    assert [(one.slot, one.bytes) for one in reply.reply.slots] == [(0, 64), (9, LARGE_BYTES)]


def test_a_fill_lends_slots_of_the_engines_size() -> None:
    """The disk tier is told how long the lent slots are."""
    host = host_of(slabs=3)
    host.disk_stored(31, 32)
    [fill] = of(host.look_up(31, 32, engine="eve"), AskFill)
    assert fill.request.slot_bytes == LARGE_BYTES
    assert [one.slot for one in fill.request.slots] == [0, 3]
