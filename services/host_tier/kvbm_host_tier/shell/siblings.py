"""Siblings, the other host tiers of this host: the registry, the front's lock, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import zmq
from kvbm_common.errors import RegistryUnavailable
from kvbm_common.registry.records import Info, Joined, Left, RegistryEvent
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.service.context import ServiceContext
from kvbm_common.wire.codec import UNREADABLE

from kvbm_host_tier.core.shard_map import (
    FrontTaken,
    Leaving,
    MapTold,
    MemberJoined,
    MemberLeft,
    SayPlace,
    ShardInput,
    ShardMap,
)
from kvbm_host_tier.core.view import HostTierView
from kvbm_host_tier.shell.engine_socket import EngineSocket, is_deserted

ENDPOINT, TAKES, SHARDS, CUT = "endpoint", "takes", "shards", "cut"
"""The keys of a host tier's registry entry."""
LOOK_S = 0.2
"""The pause between two tries of a host tier to become the front, and of the front's looks at
siblings' endpoints. A connect takes 50 µs, and an engine notices nothing for 3 s."""
LOOK_ALONE_S = 5.0
"""The pause between two looks of a front without siblings: a new one is in the registry at once."""
HAND_OVER_S = 1.2
"""The time that engines have to leave when this host tier stops; a service has 2.5 s in all to
stop."""

log = logging.getLogger(__name__)


class Siblings:
    """Tells the core of the siblings, and the siblings of this host tier."""

    def __init__(
        self,
        context: ServiceContext,
        engines: EngineSocket,
        view: HostTierView,
        complete: Callable[[ShardInput], None],
    ) -> None:
        self._context, self._engines, self._view = context, engines, view
        self._complete = complete
        self._log = OncePerKind(log)
        self._was_front = False
        self.handed_over = asyncio.Event()
        self._heard = asyncio.Event()

    async def start(self) -> None:
        """Publish our endpoint: from now on engines may be sent to us."""
        await self.say(SayPlace(takes=True, shard_map=None))

    async def run(self) -> NoReturn:
        """Look for siblings, and for the role of the front, until cancelled."""
        while True:
            self._look()
            if self._was_front and not self._view.siblings():
                await self._wait_heard()
            await asyncio.sleep(LOOK_S)

    async def _wait_heard(self) -> None:
        """Wait until the registry changes, or until LOOK_ALONE_S have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_ALONE_S):
                await self._heard.wait()
        self._heard.clear()

    def _look(self) -> None:
        if not self._was_front and self._takes_front():
            self._was_front = True
            self._complete(FrontTaken(time.time_ns() // 1_000))
        if not self._was_front:
            return
        for instance, (epoch, endpoint) in self._view.siblings().items():
            if is_deserted(endpoint):
                self._log.warning(
                    "deserted",
                    f"host tier {instance} does not listen any more: others serve its engines, "
                    "and its entry goes once it has been silent for KVBM_REGISTRY_TTL_S",
                )
                self._complete(MemberLeft(instance, epoch, said_so=False))

    def _takes_front(self) -> bool:
        try:
            return self._engines.take_front()
        except (
            OSError,
            zmq.ZMQError,
        ) as error:  # No descriptor is left: the next look tries again.
            self._log.warning("front", f"the shared endpoint cannot be taken now: {error}")
            return False

    def registry_changed(self, event: RegistryEvent) -> None:
        """Tell the core that a host tier of this host (or this one) joined, changed or left."""
        record = event.record
        self._heard.set()
        if isinstance(event, Left):
            said_so = event.reason == "deleted"
            self._complete(MemberLeft(record.instance, record.epoch, said_so=said_so))
            return
        self._complete(
            MemberJoined(
                record.instance,
                record.epoch,
                endpoint=str(record.info.get(ENDPOINT) or ""),
                takes=record.info.get(TAKES) is not False,
                is_new=isinstance(event, Joined),
            )
        )
        told = record.info.get(SHARDS)
        if isinstance(told, str):
            with contextlib.suppress(*UNREADABLE):  # A map of another release: ours stays.
                self._complete(MapTold(msgspec.json.decode(told, type=ShardMap)))

    async def say(self, place: SayPlace) -> None:
        """Publish our place, and the shard map if one is given, in the registry.

        A host tier that does not learn of it keeps using the old map: engines that it gets are
        redirected.
        """
        info: Info = {ENDPOINT: self._engines.own, TAKES: place.takes, CUT: place.is_cut}
        if place.shard_map is not None:
            info[SHARDS] = msgspec.json.encode(place.shard_map).decode()
        try:
            await self._context.registration.update(info)
        except RegistryUnavailable as error:
            self._log.warning(
                error.code, f"the other host tiers cannot be told of this one: {error}"
            )

    async def hand_over(self) -> None:
        """Send the engines to siblings before a stop, and wait a while until they have left."""
        self._complete(Leaving())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                await self.handed_over.wait()
