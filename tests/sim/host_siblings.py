"""What a host tier of the simulation says to and hears of the others of its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from kvbm_common.wire.admin import DrainRequest
from kvbm_host_tier.core import messages as host
from kvbm_host_tier.core.shard_map import (
    FrontTaken,
    Leaving,
    MapTold,
    MemberJoined,
    MemberLeft,
    SayPlace,
    ShardMap,
)

from tests.sim.registry import Change, News

if TYPE_CHECKING:
    from tests.sim.host_tier import HostTier

LOOK_MS = 200.0
HAND_OVER_MS = 1_200.0


class HostSiblings:
    """As Siblings: registry, lock and sockets."""

    def __init__(self, node: HostTier) -> None:
        self._node, self._world = node, node.world
        self._was_front = False
        self._left = False
        self._verb = 0
        self.own = node.cluster.endpoint(node.world, node.name)
        self.own.take(node)

    def start(self) -> None:
        """Enter: from now on engines may be sent here."""
        self.say(SayPlace(takes=True, shard_map=None))
        self._look()
        self._node.every(LOOK_MS, self._look)

    def _look(self) -> None:
        node = self._node
        if not self._was_front and node.host.front.take(node):
            self._was_front = True
            node.step(FrontTaken(self._world.wall_us))
        if not self._was_front:
            return
        for instance, (epoch, _) in node.core.view.siblings().items():
            if not node.host.host_tiers[instance].up:
                node.step(MemberLeft(instance, epoch, said_so=False))

    def heard(self, news: News) -> None:
        """Take what the registry says of a host tier of this host, perhaps of this one."""
        instance = news.name.rpartition("-")[2]
        if not news.is_there:
            gone = MemberLeft(instance, news.epoch, said_so=news.change is Change.DELETED)
            self._node.step(gone)
            return
        self._node.step(
            MemberJoined(
                instance,
                news.epoch,
                endpoint=str(news.info.get("endpoint") or ""),
                takes=news.info.get("takes") is not False,
                is_new=news.change is Change.JOINED,
            )
        )
        told = news.info.get("shards")
        if told is not None:
            self._node.step(MapTold(msgspec.json.decode(told, type=ShardMap)))

    def say(self, place: SayPlace) -> None:
        """Say in the registry where this host tier is, and, as the front, what the map is."""
        info: dict[str, object] = {"endpoint": self.own.name, "takes": place.takes}
        if place.shard_map is not None:
            self._world.marks["shard map made"] += 1
            info["shards"] = msgspec.json.encode(place.shard_map)
        self._node.bus.registry.update(self._node, self._node.epoch, info)

    def drain(self, verb: str) -> None:
        """Have an operator drain this host tier, or take that back."""
        node = self._node
        node.ask(host.AdminAsked(node.next_verb(), verb, DrainRequest()), lambda _: None)

    def hand_over(self) -> None:
        """Let engines finish and go, if there is a place for them; then end."""
        self._node.step(Leaving())
        self._node.later(HAND_OVER_MS, self.handed_over)

    def handed_over(self) -> None:
        """Go: the last engine has gone, or there is no time left."""
        if not self._left:
            self._left = True
            self._node.later(0, self._node.say_goodbye)
