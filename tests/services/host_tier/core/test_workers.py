"""Workers: their shares make up a block once, or the host tier says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from time import process_time

import msgspec
import pytest
from kvbm_common.errors import KvbmError
from kvbm_common.tier.kv_groups import GROUPS_MAX
from kvbm_common.tier.parts import PARTS_MAX, Grid, Share
from kvbm_common.wire.local import REGIONS_MAX, Alive, Hello, Pulled, Welcome, to_host_tier
from kvbm_host_tier.core.messages import (
    AttachPeer,
    EngineId,
    FromEngine,
    PeerAttached,
    StartPull,
)  # fmt: skip

from tests.services.host_tier.helpers import BLOCK_BYTES, Host, hello, incarnation, of

GRID = Grid(ranges=2, layers=2, heads=2)
"""Of eight runs of 8 bytes: blocks of 64 bytes, as all others here."""
RUN_BYTES = BLOCK_BYTES // GRID.run_count


def share(
    ranges: tuple[int, int] = (0, 2), heads: tuple[int, int] = (0, 2), replica: int = 0
) -> Share:
    """Ranges of layers and head groups, from the first to before the end."""
    return Share(GRID, *ranges, *heads, replica)


def half_of(
    one: Share, rank: int, world_size: int, *, life: int = 1, piece_bytes: int = 0
) -> Hello:
    """How a rank with this share introduces itself."""
    size = piece_bytes or len(one.parts) * GRID.layers * RUN_BYTES
    half = hello(rank=rank, world_size=world_size, piece_bytes=size, life=life)
    return msgspec.structs.replace(half, share=one)


def join(host: Host, shares: Sequence[Share], *, life: int = 1, world_size: int = 0) -> None:
    """Ranks of these shares introduce themselves, and NIXL knows all of them."""
    for rank, one in enumerate(shares):
        half = half_of(one, rank, world_size or len(shares), life=life)
        for effect in of(host.greet(half), AttachPeer):
            host.step(PeerAttached(effect.engine, rank, f"ada-{life}-{rank}"))


def is_welcome(host: Host, world_size: int, *, life: int = 1) -> bool:
    """Whether the engine's scheduler half may begin."""
    greeting = hello(role="scheduler", world_size=world_size, life=life)
    return bool(of(host.told(host.greet(greeting)), Welcome))


TP2 = (share(heads=(0, 1)), share(heads=(1, 2)))
PP2 = (share(ranges=(0, 1)), share(ranges=(1, 2)))
ALIKE = (share(), share(replica=1))


# --- shares that make up a block ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "pulled"), [(TP2, 2), (PP2, 2), (ALIKE, 1), ((share(),), 1)], ids=str
)
def test_every_part_is_pulled_once(shares: Sequence[Share], pulled: int) -> None:
    """Goal: a block has as many bytes whatever the shape: of two ranks that hold the same, too."""
    host = Host(attach=False)
    join(host, shares)
    assert is_welcome(host, len(shares))
    [pull] = of(host.offer(1), StartPull)
    assert (len(pull.parts), pull.block_bytes) == (pulled, BLOCK_BYTES)
    assert sorted(part for one in pull.parts for part in one.share.parts) == [0, 1, 2, 3]
    workers = host.core.view.statistics(host.now_ms).workers
    assert [worker.block_bytes for worker in workers] == [BLOCK_BYTES] * len(shares)


@pytest.mark.parametrize("shares", [TP2, PP2, ALIKE], ids=str)
def test_an_engine_without_all_of_its_ranks_stores_nothing(shares: Sequence[Share]) -> None:
    """Goal: never half a block, even where the rank that is there has all of it.

    1. One rank is there: the scheduler half waits, and an offer is not pulled. 2. The other comes.
    """
    host = Host(attach=False)
    join(host, shares[:1], world_size=2)
    assert not is_welcome(host, 2)
    assert of(host.offer(1), StartPull) == []
    assert host.slots["staged"] == 0
    join(host, shares)
    assert is_welcome(host, 2)
    assert of(host.offer(2), StartPull)


def test_ranks_of_two_lives_do_not_make_up_a_block() -> None:
    """1. Rank 0 of life 1, rank 1 of life 2: neither life is complete. 2. Life 2 is, by itself."""
    host = Host(attach=False)
    join(host, TP2[:1], world_size=2)
    host.greet(half_of(TP2[1], 1, 2, life=2))
    host.step(PeerAttached(EngineId("ada", incarnation(2)), 1, "ada-2-1"))
    assert not is_welcome(host, 2, life=2)
    assert of(host.offer(1, life=1), StartPull) == of(host.offer(1, life=2), StartPull) == []
    join(host, TP2[:1], world_size=2, life=2)
    assert is_welcome(host, 2, life=2)
    [pull] = of(host.offer(2, life=2), StartPull)
    assert [part.peer for part in pull.parts] == ["ada-2-0", "ada-2-1"]


def test_a_life_that_ends_in_the_middle_of_a_pull_leaves_no_block() -> None:
    """1. Bytes of life 1 are on their way when life 2 says hello. 2. They arrive: no block is
    committed, and neither life is asked to confirm it."""
    host = Host(attach=False)
    join(host, TP2)
    is_welcome(host, 2)
    [pull] = of(host.offer(1), StartPull)
    join(host, TP2, life=2)
    assert of(host.told(host.pulled(pull)), Pulled) == []
    assert (host.announced, host.slots["staged"]) == (set(), 0)
    is_welcome(host, 2, life=2)
    assert host.found(host.look_up(1, life=2)).slots == []


def test_a_rank_that_dies_in_the_middle_of_a_pull_leaves_no_block() -> None:
    """NIXL says that the pull has failed: both ranks' slots are empty again."""
    host = Host(attach=False)
    join(host, TP2)
    is_welcome(host, 2)
    [pull] = of(host.offer(1), StartPull)
    told = of(host.told(host.pull_failed(pull, reason="transfer_failed")), Pulled)
    assert not any(one.confirm for one in told)
    assert (host.announced, host.slots["staged"]) == (set(), 0)


# --- shares that do not ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "code"),
    [
        ((TP2[0], TP2[0]), "share"),
        ((share(), TP2[1]), "share"),
        ((PP2[0], TP2[1]), "share"),
        ((TP2[0], share(heads=(1, 2), replica=1)), "share"),
        ((share(ranges=(0, 1), heads=(0, 1)), share(ranges=(1, 2))), "share"),
        ((share(replica=1), share(replica=2)), "share"),
    ],
    ids=["the same", "all and some", "overlap", "replica alone", "gap", "replicas alone"],
)
def test_shares_that_are_no_block_are_refused(shares: Sequence[Share], code: str) -> None:
    """Goal: the rank that comes last hears what is wrong, and nothing ends.

    1. The second rank is refused. 2. The first one lives. 3. Nothing is pulled.
    """
    host = Host(attach=False)
    join(host, shares[:1], world_size=2)
    effects = host.greet(half_of(shares[1], 1, 2))
    refused = host.refusal(effects)
    assert (refused.about, refused.code, refused.field) == ("hello", code, "share")
    assert of(effects, AttachPeer) == []
    assert of(host.told(host.beat(half="0")), Alive)
    assert not is_welcome(host, 2)
    assert of(host.offer(1), StartPull) == []


def test_the_right_rank_is_taken_after_a_wrong_one() -> None:
    """The wrong one has left nothing behind."""
    host = Host(attach=False)
    join(host, TP2[:1], world_size=2)
    assert host.refusal(host.greet(half_of(TP2[0], 1, 2))).code == "share"
    join(host, TP2)
    assert is_welcome(host, 2)


def test_ranks_that_cut_blocks_in_other_ways_are_refused() -> None:
    """Also where one does not say how: then a block has a part for each rank."""
    other = Share(Grid(ranges=1, layers=4, heads=2), 0, 1, 1, 2)
    for one in (other, None):
        host = Host(attach=False)
        join(host, TP2[:1], world_size=2)
        half = hello(rank=1, world_size=2, piece_bytes=BLOCK_BYTES // 2)
        refused = host.refusal(host.greet(msgspec.structs.replace(half, share=one)))
        assert (refused.code, refused.field) == ("share", "share")


@pytest.mark.parametrize("piece_bytes", [1, 31, 33, 64])
def test_bytes_that_are_not_those_of_a_share_are_refused(piece_bytes: int) -> None:
    """Two parts of two runs each need 32 bytes, as the other rank has."""
    host = Host(attach=False)
    join(host, TP2[:1], world_size=2)
    refused = host.refusal(host.greet(half_of(TP2[1], 1, 2, piece_bytes=piece_bytes)))
    assert (refused.code, refused.field) == ("part_bytes", "regions")


@pytest.mark.parametrize(
    "said",
    [
        [[1, 1, 10**9], 0, 1, 0, 10**9, 0],
        [[1, 10**9, 1], 0, 1, 0, 1, 0],
        [[2**63, 2**63, 2**63], 0, 1, 0, 1, 0],
        [[2, 2, 2], 0, 3, 0, 2, 0],
        [[2, 2, 2], 1, 1, 0, 2, 0],
        [[2, 2, 2], 0, 2, 2, 1, 0],
        [[2, 2, 2], -1, 2, 0, 2, 0],
        [[2, 2, 2], 0, 2, 0, 2, -1],
        [[2, 2], 0, 2, 0, 2],
        [[2, 2, 2.5], 0, 2, 0, 2],
        [[2, 2, 2]],
        {"grid": 1},
        "all",
    ],
    ids=str,
)
def test_a_share_that_cannot_be_is_no_message(said: object) -> None:
    """What is on the wire ends in a typed error before any of it counts: too many heads or layers,
    ends before beginnings, what is outside of the grid."""
    raw = msgspec.msgpack.decode(to_host_tier.encode(half_of(share(), 0, 1)))
    payload = msgspec.msgpack.encode(raw | {"share": said})
    with pytest.raises(KvbmError) as refused:
        to_host_tier.decode(payload)
    assert refused.value.code == "bad_message"


def test_more_ranks_than_parts_need_a_share() -> None:
    """Without one each rank has a part: more than 64 are refused, not asserted."""
    host = Host(attach=False)
    refused = host.refusal(host.greet(hello(rank=64, world_size=65)))
    assert (refused.code, refused.field) == ("world_size", "world_size")


def test_a_hello_of_the_largest_size_is_a_short_step() -> None:
    """Goal: no engine keeps the others waiting, 50 ms at most, with its hello or its attaching.

    64 ranks join with as many regions and groups as the wire allows. Method: the shortest of the
    last eight steps of each kind, for those see all other ranks and are not longer by chance.
    """
    half = hello(world_size=PARTS_MAX, piece_bytes=1)
    groups = [msgspec.structs.replace(half.namespace, group=1 + n) for n in range(GROUPS_MAX - 1)]
    half = msgspec.structs.replace(
        half, group_namespaces=groups, regions=half.regions * REGIONS_MAX
    )
    host, hellos, attached = Host(slots=1024, attach=False), list[float](), list[float]()
    for rank in range(PARTS_MAX):
        one = msgspec.structs.replace(half, rank=rank)
        started_s = process_time()
        effects = host.core.step(FromEngine(b"%d" % rank, one), host.now_ms)
        hellos.append(process_time() - started_s)
        [attach] = of(effects, AttachPeer)
        started_s = process_time()
        host.core.step(PeerAttached(attach.engine, rank, f"peer-{rank}"), host.now_ms)
        attached.append(process_time() - started_s)
    assert min(hellos[-8:]) < 0.05, hellos[-8:]
    assert min(attached[-8:]) < 0.05, attached[-8:]
