"""Sharding: the host tiers of one host, and which of them serves an engine.

What an instance is, as each of the others sees it:

              entry          endpoint           takes none
    (nobody) ──────► JOINING ────────► SERVING ───────────► DRAINING
                        │                 │ ▲  takes again     │ │
                        │                 │ └──────────────────┘ │
                        ├── deleted ──────┴──────────────────────┴──► LEFT
                        └── silent, unreachable (of any) ───────────► DEAD
    LEFT, DEAD ── entry of another life, or again after silence ──► JOINING

Engines are shared out, by rendezvous hashing of their names, among those that serve; if none does,
among those that drain, because a lookup must be answered by somebody. A shard is an engine and not
a block: one lookup stays one answer, and all ranks of an engine meet in one arena.

Who those are is a *map*, and a map has a version. Only the front makes one: the host tier that
holds the well-known endpoint, of which the kernel lets a host have no more than one. The others go
by the newest map that they were told. So there is one order of maps on a host, and whoever is asked
goes by exactly one of them. A front counts versions from the time of day, in µs, at which it became
one, and beyond all that it has heard of: they grow over the lives of fronts, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
from kvbm_common.rendezvous import owner_of


class Stage(Enum):
    """The states of the drawing above."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"
    DEAD = "dead"


class News(Enum):
    """What is heard of an instance: the arrows of the drawing."""

    ENTERED = "entered"
    """It has an entry, and serves nobody yet."""
    TAKES = "takes"
    """It has an endpoint, and takes blocks."""
    TAKES_NONE = "takes none"
    DELETED = "deleted"
    SILENT = "silent"
    """Its entry has expired, or nobody listens at its endpoint."""


_TO: Mapping[News, Stage] = {
    News.ENTERED: Stage.JOINING,
    News.TAKES: Stage.SERVING,
    News.TAKES_NONE: Stage.DRAINING,
    News.DELETED: Stage.LEFT,
    News.SILENT: Stage.DEAD,
}
_GONE = (Stage.LEFT, Stage.DEAD)
TRANSITIONS: Mapping[tuple[Stage | None, News], Stage] = {
    (None, News.ENTERED): Stage.JOINING,
    **{
        (stage, news): _TO[news]
        for stage in (Stage.JOINING, Stage.SERVING, Stage.DRAINING)
        for news in (News.TAKES, News.TAKES_NONE, News.DELETED, News.SILENT)
    },
    (Stage.LEFT, News.ENTERED): Stage.JOINING,
    (Stage.DEAD, News.ENTERED): Stage.JOINING,
    (Stage.DEAD, News.DELETED): Stage.LEFT,
}
"""What is not here changes nothing."""


class ShardMap(msgspec.Struct, frozen=True, kw_only=True):
    """Who shares the engines of a host, and where each is; version 0: nobody has said."""

    version: int = 0
    endpoints: dict[str, str] = {}

    def owner(self, engine: str) -> str | None:
        """Who serves this engine; None: it is not known, so whoever is asked does."""
        return owner_of(engine.encode(), {name: name.encode() for name in self.endpoints})


@dataclass(slots=True)
class Member:
    """An instance as we see it."""

    stage: Stage
    epoch: int
    endpoint: str = ""


class Sharding:
    """One host tier's view: who there is, and the map that it goes by."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.map = ShardMap()
        self.is_front = False
        self._since_us = 0
        self._version_heard = 0
        self._members: dict[str, Member] = {}

    # --- what is heard ----------------------------------------------------------------------

    def entered(
        self, instance: str, epoch: int, *, endpoint: str, takes: bool, is_new: bool
    ) -> bool:
        """An instance says how it is. `is_new`: its entry was not there before.

        Returns whether there is another map now, here and below.
        """
        member = self._members.get(instance)
        again = member is None or member.epoch < epoch or (is_new and member.stage in _GONE)
        if member is not None and epoch < member.epoch:
            return False
        if again:
            self._hear(instance, epoch, News.SILENT)  # Of a life that is over.
            self._hear(instance, epoch, News.ENTERED)
        if endpoint:
            self._members[instance].endpoint = endpoint
            self._hear(instance, epoch, News.TAKES if takes else News.TAKES_NONE)
        return self._decide()

    def gone(self, instance: str, epoch: int, *, said_so: bool) -> bool:
        """Its entry is gone, or nobody listens there any more."""
        member = self._members.get(instance)
        if member is None or member.epoch > epoch:
            return False
        self._hear(instance, epoch, News.DELETED if said_so else News.SILENT)
        return self._decide()

    def told(self, shard_map: ShardMap) -> bool:
        """The front's map. Whoever is the front itself takes it into account, and makes its own."""
        self._version_heard = max(self._version_heard, shard_map.version)
        if self.is_front:
            return self._decide()
        if shard_map.version <= self.map.version:
            return False
        self.map = shard_map
        return True

    def heard_version(self, version: int) -> None:
        """An engine was sent by a map of this version."""
        self._version_heard = max(self._version_heard, version)

    def become_front(self, now_us: int) -> bool:
        """The well-known endpoint is ours; `now_us`: the time of day."""
        self.is_front = True
        self._since_us = now_us
        return self._decide()

    def _hear(self, instance: str, epoch: int, news: News) -> None:
        member = self._members.get(instance)
        to = TRANSITIONS.get((member.stage if member is not None else None, news))
        if to is None:
            return
        if member is None:
            self._members[instance] = Member(to, epoch)
        else:
            member.stage = to
            if to is Stage.JOINING:
                member.epoch, member.endpoint = epoch, ""

    # --- the map ----------------------------------------------------------------------------

    def wanted(self) -> dict[str, str]:
        """Who should share the engines, as things are."""
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
        """The front makes a new map when it should be another one, or when one is newer."""
        if not self.is_front:
            return False
        wanted = self.wanted()
        is_newest = self._version_heard <= self.map.version
        if not wanted or (wanted == self.map.endpoints and is_newest):
            return False
        version = max(self._version_heard, self.map.version, self._since_us) + 1
        self._version_heard = version
        self.map = ShardMap(version=version, endpoints=wanted)
        return True

    def elsewhere(self, engine: str, version: int = 0) -> str | None:
        """The endpoint of whoever serves this engine; None: we do.

        `version`: of the map that sent it here. One that is newer than ours is believed.
        """
        if version > self.map.version:
            return None
        owner = self.map.owner(engine)
        return None if owner in (None, self.own) else self.map.endpoints[owner]

    def siblings(self) -> dict[str, tuple[int, str]]:
        """Epoch and endpoint of each other instance of the map, for the front to look after."""
        return {
            name: (member.epoch, member.endpoint)
            for name, member in self._members.items()
            if name != self.own and name in self.map.endpoints and member.endpoint
        }

    def stage(self, instance: str) -> Stage | None:
        """Where an instance is in the drawing."""
        member = self._members.get(instance)
        return None if member is None else member.stage

    def check(self) -> None:
        """Assert every invariant."""
        assert self._version_heard >= self.map.version or not self.is_front
        for name, member in self._members.items():
            has_place = member.stage in (Stage.SERVING, Stage.DRAINING)
            assert bool(member.endpoint) or not has_place, f"{name} serves nowhere"
        if self.is_front and self.wanted():
            assert self.map.endpoints == self.wanted()
