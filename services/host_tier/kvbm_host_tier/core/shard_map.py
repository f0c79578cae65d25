"""Sharding: the host tiers of one host, and which of them serves an engine.

The states of an instance, as each of the others sees it, are drawn in `docs/state_machines.md`.

Engines are shared out, by rendezvous hashing of their names, among those that serve; if none does,
among those that drain, because a lookup must be answered. A shard is an engine and not
a block: one lookup stays one answer, and all ranks of an engine meet in one arena.

The instances that share the engines are a *map*, and a map has a version. Only the front makes
maps: the host tier that holds the well-known endpoint, which the kernel gives to one process of a
host. The others go by the newest map that they have received. So the maps of a host have one order,
and each host tier goes by exactly one of them. A front counts versions from the time of day, in µs,
at which it became one, and beyond all that it has heard of: so they grow over its restarts, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

import msgspec
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.rendezvous import owner_of
from kvbm_common.wire.events import Natural


class Stage(Enum):
    """The states of an instance."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"
    DEAD = "dead"


class News(StrEnum):
    """News of an instance: the events of the table."""

    JOINED = "joined"
    """The instance has an entry, and serves no engine yet."""
    TAKES = "takes"
    """The instance has an endpoint, and takes blocks."""
    TAKES_NONE = "takes none"
    DELETED = "deleted"
    SILENT = "silent"
    """Its entry has expired, or no process listens at its endpoint."""


_TO: Mapping[News, Stage] = {
    News.JOINED: Stage.JOINING,
    News.TAKES: Stage.SERVING,
    News.TAKES_NONE: Stage.DRAINING,
    News.DELETED: Stage.LEFT,
    News.SILENT: Stage.DEAD,
}
_GONE = (Stage.LEFT, Stage.DEAD)
HOST_TIER = Machine(
    "host tier",
    {
        (None, News.JOINED): Stage.JOINING,
        **{
            (stage, news): _TO[news]
            for stage in (Stage.JOINING, Stage.SERVING, Stage.DRAINING)
            for news in (News.TAKES, News.TAKES_NONE, News.DELETED, News.SILENT)
        },
        (Stage.LEFT, News.JOINED): Stage.JOINING,
        (Stage.DEAD, News.JOINED): Stage.JOINING,
        (Stage.DEAD, News.DELETED): Stage.LEFT,
    },
)
"""Other news changes nothing."""


class ShardMap(msgspec.Struct, frozen=True, kw_only=True):
    """The instances that share a host's engines, and their endpoints; version 0: no map yet."""

    version: Natural = 0
    endpoints: dict[str, str] = {}

    def owner(self, engine: str) -> str | None:
        """Return the owner of an engine; None: it is not known, so the instance asked serves it."""
        assert engine
        return owner_of(engine.encode(), {name: name.encode() for name in self.endpoints})


@dataclass(slots=True)
class Member:
    """An instance as this one sees it."""

    stage: Stage
    epoch: int
    endpoint: str = ""


# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A host tier of this host, perhaps ourselves, has an entry or has changed it."""

    instance: str
    epoch: int
    endpoint: str
    """Empty: it serves no engine yet."""
    takes: bool
    is_new: bool
    """True if the registry had no entry of this member before."""


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """Its entry is gone (`said_so`: it took it away itself), or no process listens at its
    endpoint."""

    instance: str
    epoch: int
    said_so: bool


@dataclass(frozen=True, slots=True)
class MapTold:
    """A front says who shares the engines."""

    shard_map: ShardMap


@dataclass(frozen=True, slots=True)
class FrontTaken:
    """We hold the well-known endpoint."""

    now_us: int
    """The time of day."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process is to end: engines are to go, if there is another host tier for them."""


ShardInput = MemberJoined | MemberLeft | MapTold | FrontTaken | Leaving


# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SayPlace:
    """Say in the registry whether we take blocks, and, as the front, what the map is."""

    takes: bool
    shard_map: ShardMap | None
    is_cut: bool = False
    """The memory is cut into slots: tiers below may ask where they are."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The last engine has gone, or none has anywhere to go."""


ShardEffect = SayPlace | HandedOver


# --- the map ---------------------------------------------------------------------------------


class Sharding:
    """One host tier's view: the instances of its host, and the map that it goes by."""

    def __init__(self, own: str) -> None:
        assert own
        self.own = own
        self.map = ShardMap()
        self.is_front = False
        self._since_us = 0
        self._version_heard = 0
        self._members: dict[str, Member] = {}

    # --- what is heard ----------------------------------------------------------------------

    def joined(
        self, instance: str, epoch: int, *, endpoint: str, takes: bool, is_new: bool
    ) -> bool:
        """Take in an instance's registry entry; `is_new`: the entry was not there before.

        Returns whether the map has changed, as the methods below do. An instance that
        was gone may come again with a lower epoch: the registry is another one.
        """
        assert instance
        member = self._members.get(instance)
        again = member is None or member.epoch < epoch or (is_new and member.stage in _GONE)
        if member is not None and epoch < member.epoch and not again:
            return False
        if again:
            self._hear(instance, epoch, News.SILENT)  # Of a life that is over.
            self._hear(instance, epoch, News.JOINED)
        if endpoint:
            self._members[instance].endpoint = endpoint
            self._hear(instance, epoch, News.TAKES if takes else News.TAKES_NONE)
        return self._decide()

    def left(self, instance: str, epoch: int, *, said_so: bool) -> bool:
        """Take in that an entry is gone, or that no process listens at its endpoint any more."""
        assert instance
        member = self._members.get(instance)
        if member is None or member.epoch > epoch:
            return False
        self._hear(instance, epoch, News.DELETED if said_so else News.SILENT)
        return self._decide()

    def told(self, shard_map: ShardMap) -> bool:
        """Take the front's map in; a host tier that is the front itself makes a newer one."""
        assert shard_map.version >= 0
        self._version_heard = max(self._version_heard, shard_map.version)
        if self.is_front:
            return self._decide()
        if shard_map.version <= self.map.version:
            return False
        self.map = shard_map
        return True

    def heard_version(self, version: int) -> None:
        """Note the version of the map by which an engine was redirected here."""
        assert version >= 0
        self._version_heard = max(self._version_heard, version)

    def become_front(self, now_us: int) -> bool:
        """Make maps from now on: the well-known endpoint is ours; `now_us`: the time of day."""
        assert now_us >= 0
        self.is_front = True
        self._since_us = now_us
        return self._decide()

    def _hear(self, instance: str, epoch: int, news: News) -> None:
        member = self._members.get(instance)
        stage = member.stage if member is not None else None
        if not HOST_TIER.has(stage, news):
            return
        to = HOST_TIER.next(stage, news)
        if member is None:
            self._members[instance] = Member(to, epoch)
        else:
            member.stage = to
            if to is Stage.JOINING:
                member.epoch, member.endpoint = epoch, ""

    # --- the map ----------------------------------------------------------------------------

    def wanted(self) -> dict[str, str]:
        """Return the instances that should share the engines, with their endpoints."""
        for stage in (Stage.SERVING, Stage.DRAINING):
            named = {
                name: member.endpoint
                for name, member in sorted(self._members.items())
                if member.stage is stage
            }
            if named:
                return named
        return {}

    def _decide(self) -> bool:
        """Make a new map, as the front, when the wanted map differs or a newer one was heard of."""
        if not self.is_front:
            return False
        wanted = self.wanted()
        is_newest = self._version_heard <= self.map.version
        if not wanted or (wanted == self.map.endpoints and is_newest):
            return False
        version = max(self._version_heard, self.map.version, self._since_us) + 1
        assert version > self.map.version
        self._version_heard = version
        self.map = ShardMap(version=version, endpoints=wanted)
        return True

    def elsewhere(self, engine: str, version: int = 0) -> str | None:
        """Return the endpoint of the host tier that serves this engine; None: this one does.

        `version`: of the map by which it was redirected here. A newer one than ours is believed.
        """
        assert engine
        if version > self.map.version:
            return None
        owner = self.map.owner(engine)
        return None if owner in (None, self.own) else self.map.endpoints[owner]

    def siblings(self) -> dict[str, tuple[int, str]]:
        """Return epoch and endpoint of each other instance of the map, for the front to watch."""
        return {
            name: (member.epoch, member.endpoint)
            for name, member in self._members.items()
            if name != self.own and name in self.map.endpoints and member.endpoint
        }

    def stage(self, instance: str) -> Stage | None:
        """Return the state of an instance; None: it was never heard of."""
        member = self._members.get(instance)
        return None if member is None else member.stage

    def check(self) -> None:
        """Assert every invariant of the map."""
        heard, ours = self._version_heard, self.map.version
        assert heard >= ours or not self.is_front, f"map {ours} is older than {heard}"
        for name, member in self._members.items():
            has_place = member.stage in (Stage.SERVING, Stage.DRAINING)
            assert bool(member.endpoint) or not has_place, f"{name} serves nowhere"
        if self.is_front and self.wanted():
            assert self.map.endpoints == self.wanted()
