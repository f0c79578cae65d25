"""Sharding: the states of an instance, and maps that have one order on a host."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvbm_host_tier.core.shard_map import HOST_TIER, News, Sharding, ShardMap, Stage

ENGINES = [f"engine-{number}" for number in range(12)]
INSTANCES = ("0", "1", "2")


def endpoint(instance: str) -> str:
    return f"ipc://{instance}"


def enter(sharding: Sharding, instance: str, epoch: int = 1, **how: bool) -> bool:
    """An entry with an endpoint."""
    return sharding.joined(
        instance, epoch, endpoint=endpoint(instance), takes=how.get("takes", True),
        is_new=how.get("is_new", False),
    )  # fmt: skip


def front(own: str = "0", epoch: int = 1) -> Sharding:
    sharding = Sharding(own)
    sharding.become_front(1_000)
    enter(sharding, own, epoch)
    return sharding


# --- states ---------------------------------------------------------------------------------


def test_the_table_has_every_arrow_of_the_drawing_and_no_other() -> None:
    there = (Stage.JOINING, Stage.SERVING, Stage.DRAINING)
    arrows = {(one, news): to for (one, news), to in HOST_TIER.transitions.items()}
    assert arrows.pop((None, News.JOINED)) is Stage.JOINING
    for stage in there:
        assert arrows.pop((stage, News.TAKES)) is Stage.SERVING
        assert arrows.pop((stage, News.TAKES_NONE)) is Stage.DRAINING
        assert arrows.pop((stage, News.DELETED)) is Stage.LEFT
        assert arrows.pop((stage, News.SILENT)) is Stage.DEAD
    assert arrows == {
        (Stage.LEFT, News.JOINED): Stage.JOINING,
        (Stage.DEAD, News.JOINED): Stage.JOINING,
        (Stage.DEAD, News.DELETED): Stage.LEFT,
    }


def test_an_instance_serves_when_it_says_where() -> None:
    sharding = front()
    sharding.joined("1", 5, endpoint="", takes=True, is_new=True)
    assert sharding.stage("1") is Stage.JOINING
    assert set(sharding.map.endpoints) == {"0"}
    enter(sharding, "1", 5)
    assert sharding.stage("1") is Stage.SERVING
    assert sharding.map.endpoints == {"0": endpoint("0"), "1": endpoint("1")}


@pytest.mark.parametrize(("said_so", "stage"), [(True, Stage.LEFT), (False, Stage.DEAD)])
def test_who_is_gone_is_in_no_map(said_so: bool, stage: Stage) -> None:
    sharding = front()
    enter(sharding, "1", 5)
    version = sharding.map.version
    assert sharding.left("1", 5, said_so=said_so)
    assert sharding.stage("1") is stage
    assert set(sharding.map.endpoints) == {"0"}
    assert sharding.map.version > version
    assert sharding.siblings() == {}


def test_who_is_found_dead_is_not_raised_by_its_own_last_words() -> None:
    """Nobody listens there; its entry in the registry lives on for a while, and changes."""
    sharding = front()
    enter(sharding, "1", 5)
    sharding.left("1", 5, said_so=False)
    enter(sharding, "1", 5)
    assert sharding.stage("1") is Stage.DEAD
    enter(sharding, "1", 6)
    assert sharding.stage("1") is Stage.SERVING


def test_who_was_silent_for_a_while_is_there_again_in_the_same_life() -> None:
    sharding = front()
    enter(sharding, "1", 5)
    sharding.left("1", 5, said_so=False)
    enter(sharding, "1", 5, is_new=True)
    assert sharding.stage("1") is Stage.SERVING


@pytest.mark.parametrize("said_so", [True, False])
def test_who_is_there_again_may_have_a_lower_epoch(said_so: bool) -> None:
    """The registry was lost, and counts from another start. Its end is that of the same life."""
    sharding = front()
    enter(sharding, "1", 50)
    sharding.left("1", 50, said_so=said_so)
    enter(sharding, "1", 5, is_new=True)
    assert sharding.map.endpoints == {"0": endpoint("0"), "1": endpoint("1")}
    assert not enter(sharding, "1", 5)
    assert sharding.left("1", 5, said_so=said_so)
    assert set(sharding.map.endpoints) == {"0"}


def test_news_of_a_former_life_change_nothing() -> None:
    sharding = front()
    enter(sharding, "1", 5)
    known = sharding.map
    assert not sharding.left("1", 4, said_so=True)
    assert not enter(sharding, "1", 4, takes=False)
    assert sharding.map == known


def test_who_drains_serves_on_only_when_nobody_else_does() -> None:
    sharding = front()
    enter(sharding, "1", 5)
    enter(sharding, "0", takes=False)
    assert set(sharding.map.endpoints) == {"1"}
    enter(sharding, "1", 5, takes=False)
    assert set(sharding.map.endpoints) == {"0", "1"}


# --- maps -----------------------------------------------------------------------------------


def test_an_engine_has_one_owner_and_moves_only_to_or_from_who_comes_or_goes() -> None:
    two = ShardMap(version=1, endpoints={"0": "a", "1": "b"})
    three = ShardMap(version=2, endpoints={"0": "a", "1": "b", "2": "c"})
    names = [f"engine-{number}" for number in range(300)]
    moved = {name for name in names if two.owner(name) != three.owner(name)}
    assert {three.owner(name) for name in moved} == {"2"}
    assert 60 < len(moved) < 140
    assert {two.owner(name) for name in names} == {"0", "1"}


def test_without_a_map_everybody_is_served_by_whoever_is_asked() -> None:
    assert Sharding("1").elsewhere("ada") is None


def test_a_newer_map_than_ours_is_believed() -> None:
    sharding = front()
    enter(sharding, "1", 5)
    foreign = next(name for name in ENGINES if sharding.map.owner(name) == "1")
    assert sharding.elsewhere(foreign) == endpoint("1")
    assert sharding.elsewhere(foreign, sharding.map.version) == endpoint("1")
    assert sharding.elsewhere(foreign, sharding.map.version + 1) is None


def test_another_front_makes_later_maps() -> None:
    """1. Instance 9 has made maps, and dies. 2. Instance 1, an older one, is the front now."""
    first = front("9", epoch=900)
    enter(first, "1", 5)
    second = Sharding("1")
    for instance, epoch in (("1", 5), ("9", 900)):
        enter(second, instance, epoch)
    assert second.told(first.map)
    assert second.map == first.map
    second.become_front(2_000)
    assert second.left("9", 900, said_so=False)
    assert second.map.version > first.map.version
    assert not second.told(first.map)


# --- any order of news ----------------------------------------------------------------------


class Host(RuleBasedStateMachine):
    """Three instances, a registry that each reads late, a lock, and deaths at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.now_us = 100, 1_000_000
        self.low_epoch = 100
        self.lives: dict[str, Sharding] = {}
        self.news: dict[str, deque[tuple[str, int, str, bool, bool]]] = {}
        self.maps: dict[str, deque[ShardMap]] = {}
        self.entries: dict[str, tuple[int, bool]] = {}
        self.holder: str | None = None
        self.told: list[ShardMap] = []
        self.seen: dict[str, list[int]] = {}

    def _write(self, instance: str, what: str, *, takes: bool = True, is_new: bool = False) -> None:
        epoch = self.entries[instance][0]
        for queue in self.news.values():
            queue.append((instance, epoch, what, takes, is_new))

    def _publish(self, instance: str) -> None:
        shard_map = self.lives[instance].map
        if not self.lives[instance].is_front or not shard_map.version or shard_map in self.told:
            return
        self.told.append(shard_map)
        for queue in self.maps.values():
            queue.append(shard_map)

    @rule(instance=st.sampled_from(INSTANCES), is_lower=st.booleans())
    def join(self, instance: str, is_lower: bool) -> None:
        if instance in self.lives:
            return
        self.epoch, self.low_epoch = self.epoch + 1, self.low_epoch - 1
        self.lives[instance] = Sharding(instance)
        self.seen[instance] = []
        self.news[instance] = deque(
            (name, epoch, "entry", takes, True) for name, (epoch, takes) in self.entries.items()
        )
        self.maps[instance] = deque(self.told[-1:])
        self.entries[instance] = (self.low_epoch if is_lower else self.epoch, True)
        self._write(instance, "entry", is_new=True)

    @rule(instance=st.sampled_from(INSTANCES), takes=st.booleans())
    def drain(self, instance: str, takes: bool) -> None:
        if instance in self.lives:
            self.entries[instance] = (self.entries[instance][0], takes)
            self._write(instance, "entry", takes=takes)

    @rule(instance=st.sampled_from(INSTANCES), said_so=st.booleans())
    def end(self, instance: str, said_so: bool) -> None:
        if instance in self.lives:
            del self.lives[instance], self.news[instance], self.maps[instance]
            self._write(instance, "left" if said_so else "dead")
            del self.entries[instance]
            if self.holder == instance:
                self.holder = None

    @precondition(lambda self: self.holder is None and self.lives)
    @rule(data=st.data())
    def take_lock(self, data: st.DataObject) -> None:
        self.holder = data.draw(st.sampled_from(sorted(self.lives)))
        self._become_front(self.holder)

    def _become_front(self, instance: str) -> None:
        self.now_us += 1_000
        self.lives[instance].become_front(self.now_us)
        self._publish(instance)

    @rule(instance=st.sampled_from(INSTANCES), count=st.integers(1, 4))
    def hear(self, instance: str, count: int) -> None:
        for _ in range(count):
            self._hear_one(instance)

    def _hear_one(self, instance: str) -> None:
        sharding = self.lives.get(instance)
        if sharding is None:
            return
        if self.maps[instance]:
            sharding.told(self.maps[instance].popleft())
        if self.news[instance]:
            name, epoch, what, takes, is_new = self.news[instance].popleft()
            if what == "entry":
                enter(sharding, name, epoch, takes=takes, is_new=is_new)
            else:
                sharding.left(name, epoch, said_so=what == "left")
        self._publish(instance)

    @invariant()
    def each_goes_by_one_map_and_never_by_an_older_one(self) -> None:
        for instance, sharding in self.lives.items():
            sharding.check()
            if self.seen[instance][-1:] != [sharding.map.version]:
                self.seen[instance].append(sharding.map.version)
            assert all(one < two for one, two in pairwise(self.seen[instance]))

    @invariant()
    def a_version_is_one_map(self) -> None:
        versions = [one.version for one in self.told]
        assert len(set(versions)) == len(versions)

    def teardown(self) -> None:
        """When all has been heard, all agree, and each engine has one owner who lives."""
        if not self.lives:
            return
        if self.holder is None:
            self.holder = min(self.lives)
            self._become_front(self.holder)
        for _ in range(1_000):
            if not any([*self.news.values(), *self.maps.values()]):
                break
            for instance in list(self.lives):
                self._hear_one(instance)
        maps = {sharding.map.version for sharding in self.lives.values()}
        assert len(maps) == 1
        for engine in ENGINES:
            owners = {n for n, one in self.lives.items() if one.elsewhere(engine) is None}
            assert len(owners) == 1


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
