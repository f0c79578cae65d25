"""Attaching: the barrier of ranks, refusals, lives that end, workers that come back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvbm_common.identity import Namespace
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.parts import share_of_rank
from kvbm_common.wire.local import Alive, Pulled, Refused, Welcome
from kvbm_host_tier.core.former_lives import FORMER_LIVES_MAX
from kvbm_host_tier.core.messages import (
    NO_ARENA,
    ArenaInfo,
    ArenaMade,
    ArenaRefused,
    AttachPeer,
    DetachPeer,
    MakeArena,
    PeerAttached,
    PeerFailed,
    StartPull,
    ToEngine,
)

from tests.services.host_tier.helpers import (
    BLOCK_BYTES,
    EPOCH,
    SLOT_BYTES,
    Host,
    engine_id,
    hello,
    of,
)


def welcomed(effects: Any) -> list[bytes]:
    """Who was welcomed."""
    return [
        effect.connection for effect in of(effects, ToEngine) if isinstance(effect.message, Welcome)
    ]


def refusal(effects: Any) -> Refused:
    """What the only one who was told anything was refused with."""
    [refused] = of(Host.told(effects), Refused)
    return refused


def test_the_scheduler_is_welcomed_when_every_rank_is_attached() -> None:
    """Two ranks. 1. Scheduler and rank 1 say hello: nobody is complete. 2. NIXL knows rank 1.

    3. Rank 0 comes: it and the scheduler are welcomed, and told of the arena.
    """
    host = Host(attach=False)
    assert host.greet(hello(role="scheduler", world_size=2)) == []
    [attach] = of(host.greet(hello(rank=1, world_size=2)), AttachPeer)
    assert (attach.engine, attach.rank, attach.agent) == (engine_id(), 1, b"agent")
    effects = host.step(PeerAttached(engine_id(), 1, "peer-1"))
    assert welcomed(effects) == [b"ada:1/1"]
    host.greet(hello(rank=0, world_size=2))
    effects = host.step(PeerAttached(engine_id(), 0, "peer-0"))
    assert welcomed(effects) == [b"ada:1/0", b"ada:1/scheduler"]
    [welcome, _] = of(host.told(effects), Welcome)
    assert (welcome.epoch, welcome.slot_bytes, welcome.slot_count) == (EPOCH, SLOT_BYTES, 4)
    assert (welcome.agent, welcome.arena_path) == (b"arena", "/arena")


def test_an_incomplete_engine_is_not_pulled() -> None:
    """One of two ranks is there: its offer comes back at once, as failed."""
    host = Host(attach=False)
    host.greet(hello(role="scheduler", world_size=2))
    host.greet(hello(rank=0, world_size=2))
    host.step(PeerAttached(engine_id(), 0, "peer-0"))
    [pulled] = of(host.told(host.offer(1, 2)), Pulled)
    assert (pulled.failed, pulled.reason, pulled.confirm) == (2, "incomplete_engine", False)


def test_a_block_of_two_ranks_is_pulled_part_by_part() -> None:
    """Rank 1's part lies after rank 0's, whoever came first."""
    host = Host(attach=False)
    for rank in (1, 0):
        host.greet(hello(rank=rank, world_size=2))
        host.step(PeerAttached(engine_id(), rank, f"peer-{rank}"))
    host.greet(hello(role="scheduler", world_size=2))
    [pull] = of(host.offer(1), StartPull)
    assert [(part.peer, part.share) for part in pull.parts] == [
        ("peer-0", share_of_rank(0, 2)),
        ("peer-1", share_of_rank(1, 2)),
    ]
    assert pull.block_bytes == 2 * BLOCK_BYTES


def test_blocks_are_whole_slots_of_4096() -> None:
    """Two ranks of 3,000 bytes each need 6,000: slots of 8,192, so two of them fit into four."""
    host = Host(attach=False)
    host.greet(hello(rank=0, world_size=2, piece_bytes=3_000))
    assert host.core.view.arena_reply().sizes == [2 * SLOT_BYTES]
    assert host.core.view.layout == Layout(2 * SLOT_BYTES, 2, 1)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"piece_bytes": SLOT_BYTES + 1}, "block_size", "regions"),
        ({"rank": 1}, "rank", "rank"),
        ({"agent": b""}, "regions", "regions"),
    ],
)
def test_a_worker_is_refused_with_a_code_and_a_field(
    change: dict[str, Any], code: str, field: str
) -> None:
    """The arena is cut for 64-byte blocks of one rank; `eve` does not fit."""
    host = Host()
    effects = host.greet(hello(engine="eve", **change))
    refused = host.refusal(effects)
    assert (refused.about, refused.code, refused.field) == ("hello", code, field)
    assert of(effects, AttachPeer) == []
    assert host.core.view.counts[f"refused.{code}"] == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"namespace": Namespace(model="other", block_tokens=4)}, "namespace"),
        ({"world_size": 2}, "world_size"),
    ],
)
def test_halves_of_an_engine_must_agree(change: dict[str, Any], code: str) -> None:
    """Ada's worker is attached; a scheduler of the same life tells another story."""
    host = Host()
    assert host.refusal(host.greet(hello(role="scheduler", **change))).code == code


def test_a_refused_worker_does_not_end_the_life_that_is_there() -> None:
    """Life 2 has blocks that do not fit: life 1 goes on."""
    host = Host()
    assert host.refusal(host.greet(hello(life=2, piece_bytes=5_000))).code == "block_size"
    assert of(host.told(host.beat(life=1)), Alive)


def test_a_block_that_fits_no_arena_is_refused_before_it_is_cut() -> None:
    """The next engine decides the slot size."""
    host = Host(attach=False)
    assert host.refusal(host.greet(hello(piece_bytes=5 * SLOT_BYTES))).code == "block_size"
    assert host.core.view.arena_reply().slot_bytes == 0
    host.attach()
    assert host.core.view.arena_reply().slot_bytes == SLOT_BYTES


def test_a_newer_life_supersedes_an_older_one() -> None:
    """1. Life 2 says hello: life 1's memory is forgotten. 2. Life 1 is told so, and stays out."""
    host = Host()
    effects = host.greet(hello(life=2))
    assert of(effects, DetachPeer) == [DetachPeer("ada-1-0")]
    assert host.refusal(host.beat(life=1)).code == "unknown_engine"
    assert host.refusal(host.greet(hello(life=1))).code == "superseded"
    assert of(host.told(host.beat(life=2, half="0")), Alive)


def test_a_life_whose_successor_is_silent_may_come_back() -> None:
    """Goal: a late hello of a life that is over shuts the living one out for a few seconds only.

    1. Life 1 is attached when a hello of an older life arrives. 2. Life 1 is refused. 3. Nothing
    else is heard of the other life: life 1 says hello and is welcomed.
    """
    host = Host()
    host.greet(hello(life=2))
    assert host.refusal(host.greet(hello(life=1))).code == "superseded"
    host.wait(5_001)
    host.attach(life=1)
    assert of(host.told(host.beat(life=1)), Alive)


def test_a_life_whose_successor_says_bye_may_come_back() -> None:
    """Goal: a late hello and Bye of another life shut the living one out no longer than that.

    1. Life 1 is attached when a hello of an older life arrives, whose Bye follows: no engine is
    attached. 2. Life 1 says hello and is welcomed.
    """
    host = Host()
    host.attach(life=2)
    assert host.refusal(host.greet(hello(life=1))).code == "superseded"
    host.bye(life=2)
    host.attach(life=1)
    assert of(host.told(host.beat(life=1)), Alive)


def test_memory_of_old_lives_is_bounded() -> None:
    """A crash loop does not fill the host tier's memory."""
    host = Host()
    for life in range(2, FORMER_LIVES_MAX + 10):
        host.attach(life=life)
    assert host.refusal(host.greet(hello(life=FORMER_LIVES_MAX))).code == "superseded"
    assert of(host.greet(hello(life=1)), AttachPeer), "forgotten after so many lives"


def test_a_silent_engine_is_lost_and_may_come_back() -> None:
    """1. No beat for more than 5 s: lost. 2. Its beat is refused. 3. The same life says hello."""
    host = Host()
    host.wait(5_000)
    assert of(host.told(host.beat()), Alive)
    assert of(host.wait(5_001), DetachPeer) == [DetachPeer("ada-1-0")]
    assert host.core.view.counts["engines_lost"] == 1
    assert host.refusal(host.beat()).code == "unknown_engine"
    host.attach()
    assert of(host.told(host.beat()), Alive)


def test_a_repeated_hello_is_welcomed_again_without_nixl() -> None:
    """The answer was lost, or the worker's link was down: same memory, nothing to attach."""
    host = Host()
    effects = host.greet(hello())
    assert of(effects, AttachPeer) == []
    assert welcomed(effects) == [b"ada:1/0"]


def test_impatient_hellos_are_one_attach() -> None:
    """NIXL takes its time and the worker greets every 250 ms: it is asked once, then welcomed."""
    host = Host(attach=False)
    assert len(of(host.greet(hello()), AttachPeer)) == 1
    assert host.greet(hello()) == []
    assert welcomed(host.step(PeerAttached(engine_id(), 0, "peer"))) == [b"ada:1/0"]


def test_a_worker_with_other_memory_ends_what_was_offered_from_the_old() -> None:
    """1. An offer of three batches, one pull in flight. 2. The worker comes back, re-registered.

    3. Nothing of the offer is pulled from, or committed with, memory that is gone.
    """
    host = Host(transfers_max=1, batch_blocks_max=1)
    [pull] = of(host.offer(1, 2, 3), StartPull)
    effects = host.greet(hello(agent=b"other"))
    assert of(effects, DetachPeer) == [DetachPeer("ada-1-0")]
    assert of(effects, StartPull) == []
    assert of(host.pulled(pull), StartPull) == []
    host.step(PeerAttached(engine_id(), 0, "new"))
    assert host.slots["reset"] == 4
    assert host.figure("offers") == 0
    [pull] = of(host.offer(4), StartPull)
    assert pull.parts[0].peer == "new"


def test_an_attach_of_memory_that_was_replaced_meanwhile_is_undone() -> None:
    """1. NIXL is learning agent a. 2. The worker comes back as agent b. 3. a arrives: not used."""
    host = Host(attach=False)
    host.greet(hello(agent=b"a"))
    assert of(host.greet(hello(agent=b"b")), AttachPeer) == []
    effects = host.step(PeerAttached(engine_id(), 0, "peer-a"))
    assert of(effects, DetachPeer) == [DetachPeer("peer-a")]
    assert [attach.agent for attach in of(effects, AttachPeer)] == [b"b"]
    assert welcomed(effects) == []
    assert welcomed(host.step(PeerAttached(engine_id(), 0, "peer-b"))) == [b"ada:1/0"]


def test_a_failed_attach_of_replaced_memory_is_tried_with_the_new() -> None:
    """The failure says nothing about agent b."""
    host = Host(attach=False)
    host.greet(hello(agent=b"a"))
    host.greet(hello(agent=b"b"))
    effects = host.step(PeerFailed(engine_id(), 0, "bad metadata"))
    assert [attach.agent for attach in of(effects, AttachPeer)] == [b"b"]


def test_a_worker_that_nixl_refuses_is_told_so_and_may_try_again() -> None:
    """Code `agent`; the next hello asks NIXL again."""
    host = Host(attach=False)
    host.greet(hello())
    refused = host.refusal(host.step(PeerFailed(engine_id(), 0, "bad metadata")))
    assert (refused.code, refused.message) == ("agent", "bad metadata")
    assert of(host.greet(hello()), AttachPeer)


def test_an_attach_that_outlives_its_engine_is_undone() -> None:
    """The engine left while NIXL was learning its memory."""
    host = Host(attach=False)
    host.greet(hello())
    host.bye(half="0")
    effects = host.step(PeerAttached(engine_id(), 0, "late"))
    assert of(effects, DetachPeer) == [DetachPeer("late")]
    assert host.step(PeerFailed(engine_id(), 0, "late")) == []


def test_a_worker_may_be_attached_for_its_engine_before_it_fell_silent() -> None:
    """1. The engine falls silent while NIXL learns its memory. 2. It comes back: both attaches end,
    and the memory of the second one is used."""
    host = Host(attach=False)
    host.greet(hello())
    host.wait(5_001)
    assert of(host.greet(hello()), AttachPeer)
    for peer in ("first", "second"):
        effects = host.step(PeerAttached(engine_id(), 0, peer))
        assert [type(told) for told in host.told(effects)] == [Welcome]
        assert of(effects, DetachPeer) == []
    assert of(host.wait(5_001), DetachPeer) == [DetachPeer("second")]


def test_strangers_are_asked_to_say_hello() -> None:
    """Whatever they want; and it is counted."""
    host = Host(attach=False)
    for effects in (host.beat(), host.look_up(1), host.confirm(1)):
        assert host.refusal(effects).code == "unknown_engine"
    assert host.core.view.counts["refused.unknown_engine"] == 3


def test_a_half_that_has_not_said_hello_is_no_part_of_the_engine() -> None:
    """The worker came back after the host tier had lost the engine, the scheduler did not yet."""
    host = Host()
    host.wait(5_001)
    host.greet(hello())
    assert of(host.told(host.beat(half="0")), Alive)
    assert host.refusal(host.beat()).code == "unknown_engine"


def test_statistics_list_every_worker() -> None:
    """Two engines, one with two ranks."""
    host = Host()
    host.attach(engine="bob", world_size=2)
    host.now_ms += 30
    workers = host.core.view.statistics(host.now_ms).workers
    assert [(worker.engine, worker.rank, worker.seen_ms_ago) for worker in workers] == [
        ("ada", 0, 30), ("bob", 0, 30), ("bob", 1, 30),
    ]  # fmt: skip


def test_statistics_say_which_loads_a_worker_verifies() -> None:
    """As its connector is configured, which the host tier's own setting does not show."""
    host = Host()
    host.greet(msgspec.structs.replace(hello(), verify="never"))
    assert [worker.verify for worker in host.core.view.statistics(host.now_ms).workers] == ["never"]


# --- an arena whose size is a number of blocks --------------------------------------------------


def test_the_arena_is_made_when_a_blocks_size_is_known() -> None:
    """DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS: asked for once, refused until it is there."""
    host = Host(slots=0, attach=False, slot_count=3)
    half = hello(piece_bytes=SLOT_BYTES + 1)
    effects = host.greet(half)
    assert of(effects, MakeArena) == [MakeArena(3 * 2 * SLOT_BYTES)]
    assert refusal(effects).code == "arena_pending"
    assert not of(host.greet(half), MakeArena)
    host.step(ArenaMade(ArenaInfo("/arena", 4096, 3 * 2 * SLOT_BYTES, b"arena")))
    assert of(host.greet(half), AttachPeer)
    assert host.core.view.layout == Layout(2 * SLOT_BYTES, 3, 1)
    assert host.core.view.arena_reply().path == "/arena"


def test_an_arena_that_does_not_fit_says_so_and_is_asked_for_again() -> None:
    """The engine passes through, and its log has the reason."""
    host = Host(slots=0, attach=False, slot_count=3)
    host.greet(hello())
    host.step(ArenaRefused("12288 bytes do not fit"))
    effects = host.greet(hello())
    assert of(effects, MakeArena) == [MakeArena(3 * SLOT_BYTES)]
    refused = refusal(effects)
    assert (refused.code, refused.message) == ("arena_refused", "12288 bytes do not fit")


def test_no_engine_is_let_into_an_arena_that_is_being_replaced() -> None:
    """eve's blocks need a larger one than was made for ada, who comes while it is being made."""
    host = Host(slots=0, attach=False, slot_count=3)
    host.greet(hello())
    host.step(ArenaMade(ArenaInfo("/arena", 4096, 3 * SLOT_BYTES, b"first")))
    larger = hello(engine="eve", piece_bytes=2 * SLOT_BYTES)
    assert of(host.greet(larger), MakeArena) == [MakeArena(3 * 2 * SLOT_BYTES)]
    effects = host.greet(hello())
    assert refusal(effects).code == "arena_pending"
    assert not of(effects, AttachPeer)
    host.step(ArenaMade(ArenaInfo("/arena", 8192, 3 * 2 * SLOT_BYTES, b"second")))
    assert of(host.greet(hello()), AttachPeer)
    assert host.core.view.arena.address == 8192


def test_a_larger_arena_that_is_refused_may_have_cost_the_smaller_one() -> None:
    """ada, for whom that was made, attaches to it only if it is still there."""
    first = ArenaInfo("/arena", 4096, 3 * SLOT_BYTES, b"first")
    for left, made in ((first, []), (NO_ARENA, [MakeArena(3 * SLOT_BYTES)])):
        host = Host(slots=0, attach=False, slot_count=3)
        host.greet(hello())
        host.step(ArenaMade(first))
        host.greet(hello(engine="eve", piece_bytes=2 * SLOT_BYTES))
        host.step(ArenaRefused("24576 bytes do not fit", left))
        effects = host.greet(hello())
        assert of(effects, MakeArena) == made
        assert bool(of(effects, AttachPeer)) == (left == first)


def test_a_number_of_blocks_wins_over_the_size() -> None:
    """Also where it is the smaller one."""
    host = Host(slots=5, slot_count=3)
    assert host.core.view.arena_reply().slot_count == 3
