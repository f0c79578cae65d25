"""Placement: a host tier's core when engines are another's."""

from __future__ import annotations

import msgspec
from kvbm_common.wire.local import Alive, Beat, Bye, Moved, Pulled, Welcome
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import AttachPeer, PeerAttached, StartPull, ToEngine
from kvbm_host_tier.core.shard_map import (
    FrontTaken,
    HandedOver,
    Leaving,
    MapTold,
    MemberJoined,
    MemberLeft,
    SayPlace,
    ShardMap,
)

from tests.services.host_tier.helpers import EPOCH, Host, hello, incarnation, of

OURS, OTHERS = "ada", "dot"
"""By the hashes of their names, with instances 0 and 1."""
THERE = "ipc://1"
MAP = ShardMap(version=50, endpoints={"0": "ipc://0", "1": THERE})


def shared(host: Host) -> list[object]:
    """The host tier hears the map; returns what engines are told."""
    return host.told(host.step(MapTold(MAP)))


def entered(instance: str, epoch: int, *, takes: bool = True) -> MemberJoined:
    return MemberJoined(instance, epoch, f"ipc://{instance}", takes=takes, is_new=True)


def test_the_names_fall_as_the_tests_need_it() -> None:
    assert (MAP.owner(OURS), MAP.owner(OTHERS)) == ("0", "1")


def test_who_comes_to_the_wrong_one_is_told_where_to_go() -> None:
    host = Host()
    shared(host)
    for role in ("scheduler", "worker"):
        [told] = host.told(host.greet(hello(engine=OTHERS, role=role)))
        assert told == Moved(endpoint=THERE, version=50)
    assert host.core.view.counts["engines_sent_on"] == 2


def test_who_comes_by_a_newer_map_is_believed() -> None:
    host = Host()
    shared(host)
    newer = msgspec.structs.replace(hello(engine=OTHERS, role="scheduler"), shards=51)
    assert not of(host.told(host.greet(newer)), Moved)


def test_an_attached_engine_is_served_until_it_says_good_bye_then_its_workers_are_told() -> None:
    """1. The map changes: the scheduler half is told, the worker is not. 2. Its lookups and offers

    go on. 3. It says good-bye: the worker is told, and both may come back in the same life.
    """
    host = Host(attach=False)
    host.attach(engine=OTHERS)
    assert shared(host) == [Moved(endpoint=THERE, version=50, within_ms=5_000)]
    [pull] = of(host.offer(1, 2, engine=OTHERS), StartPull)
    [pulled] = of(host.told(host.pulled(pull)), Pulled)
    host.confirm(pulled.offer, engine=OTHERS)
    found = host.found(host.look_up(1, 2, engine=OTHERS))
    assert len(found.slots) == 2
    beat = Beat(engine=OTHERS, incarnation=incarnation(1))
    told = host.told(host.say(beat))
    assert [type(one) for one in told] == [Alive, Moved], "it may not have heard it"
    host.release(found.lease, engine=OTHERS)
    effects = host.say(Bye(engine=OTHERS, incarnation=incarnation(1)))
    [to_worker] = of(effects, ToEngine)
    assert to_worker.connection == b"dot:1/0"
    assert to_worker.message == Moved(endpoint=THERE, version=50)
    host.step(MapTold(ShardMap(version=51, endpoints={"0": "ipc://0"})))
    host.attach(engine=OTHERS)


def test_an_engine_whose_good_bye_meets_another_map_may_come_back_in_the_same_life() -> None:
    """1. The map sends an engine away. 2. The other host tier dies before the engine has left: it

    is ours again. 3. It says good-bye, as it was told to go, and greets us: it is welcomed.
    """
    host = Host(attach=False)
    host.attach(engine=OTHERS)
    shared(host)
    host.step(MapTold(ShardMap(version=51, endpoints={"0": "ipc://0"})))
    assert host.told(host.say(Bye(engine=OTHERS, incarnation=incarnation(1)))) == []
    host.attach(engine=OTHERS)


def test_an_engine_that_another_life_of_ours_sent_away_may_come_back() -> None:
    """1. It greets this life, which never sent it away, and says good-bye. 2. It comes back."""
    host = Host(attach=False)
    host.attach(engine=OTHERS)
    assert host.told(host.say(Bye(engine=OTHERS, incarnation=incarnation(1)))) == []
    host.attach(engine=OTHERS)


def test_who_was_not_welcomed_goes_without_a_word_so_its_workers_are_told_at_once() -> None:
    """1. A scheduler half greets; its worker, before NIXL knows it. 2. The map changes: both are

    told. 3. The first has gone at once; NIXL knows the worker now, and its beat is told again.
    """
    host = Host(attach=False)
    host.greet(hello(engine=OTHERS, role="scheduler"))
    [attaching] = of(host.greet(hello(engine=OTHERS)), AttachPeer)
    assert [type(one) for one in shared(host)] == [Moved, Moved]
    assert of(host.told(host.step(PeerAttached(attaching.engine, 0, "peer"))), Welcome)
    told = host.told(host.say(Beat(engine=OTHERS, incarnation=incarnation(1)), half="0"))
    assert [type(one) for one in told] == [Alive, Moved]


def test_the_workers_of_a_scheduler_half_that_is_not_heard_any_more_are_told() -> None:
    host = Host(attach=False)
    host.attach(engine=OTHERS)
    shared(host)
    beat = Beat(engine=OTHERS, incarnation=incarnation(1))
    lost_ms = HostTierLimits().engine_lost_ms
    host.now_ms += lost_ms
    assert [type(one) for one in host.told(host.say(beat, half="0"))] == [Alive]
    host.now_ms += 1
    assert [type(one) for one in host.told(host.say(beat, half="0"))] == [Alive, Moved]


def test_an_offer_of_another_s_engine_is_passed_over_in_silence() -> None:
    host = Host()
    shared(host)
    assert host.offer(1, engine=OTHERS) == []
    assert not [name for name in host.core.view.counts if name.startswith("dropped")]
    assert host.offer(1, engine="unknown-but-ours-0") == []
    assert host.core.view.counts["dropped.offer_unknown_engine"] == 1


def test_the_front_says_who_shares_the_engines_and_everybody_whether_it_takes() -> None:
    host = Host()
    assert host.step(FrontTaken(1_000)) == []
    [said] = of(host.step(entered("0", EPOCH)), SayPlace)
    assert said.shard_map is not None
    assert (said.takes, set(said.shard_map.endpoints)) == (True, {"0"})
    [said] = of(host.step(entered("1", 9)), SayPlace)
    assert said.shard_map is not None
    assert set(said.shard_map.endpoints) == {"0", "1"}
    [said] = of(host.step(MemberLeft("1", 9, said_so=False)), SayPlace)
    assert said.shard_map is not None
    assert set(said.shard_map.endpoints) == {"0"}


def test_the_first_engine_has_the_memory_cut_which_is_said_once() -> None:
    host = Host(attach=False)
    place = SayPlace(takes=True, shard_map=None, is_cut=True)
    assert of(host.greet(hello()), SayPlace) == [place]
    assert not of(host.greet(hello(engine=OTHERS)), SayPlace)


def test_who_leaves_has_handed_over_when_the_last_engine_has_gone() -> None:
    """1. It says that it takes nobody. 2. The map without it: its engine is told to hurry, and

    leaves. 3. Handed over, once."""
    host = Host(attach=False)
    host.attach(engine=OURS)
    shared(host)
    effects = host.step(Leaving())
    assert of(effects, SayPlace) == [SayPlace(takes=False, shard_map=None, is_cut=True)]
    assert not of(effects, HandedOver)
    without = ShardMap(version=51, endpoints={"1": THERE})
    [told] = host.told(host.step(MapTold(without)))
    assert told == Moved(endpoint=THERE, version=51, within_ms=1_000)
    assert of(host.say(Bye(engine=OURS, incarnation=incarnation(1))), HandedOver)
    assert not of(host.wait(50), HandedOver)


def test_who_is_alone_hands_over_to_nobody() -> None:
    host = Host()
    assert of(host.step(Leaving()), HandedOver)


def test_without_siblings_nothing_is_said_and_nobody_is_sent_away() -> None:
    host = Host(attach=False)
    host.attach(engine=OTHERS)
    assert host.wait(50) == []
    assert of(host.told(host.greet(hello(engine=OTHERS, role="scheduler"))), Welcome)
