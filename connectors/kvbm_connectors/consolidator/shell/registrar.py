"""The registrar: an entry in the registry per engine, and with it the engine's epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvbm_common.errors import RegistryUnavailable
from kvbm_common.registry.records import ENGINE, Info
from kvbm_common.registry.services import Registry, ServiceRegistration
from kvbm_common.runtime.logs import OncePerKind

from kvbm_connectors.consolidator.core.messages import (
    AskEpoch,
    Describe,
    EngineLeft,
    EpochFailed,
    EpochGranted,
    Input,
    RevokeEpoch,
)


class Registrar:
    """Enters engines, one operation after the other, so that the last one asked for wins."""

    def __init__(
        self,
        registry: Registry,
        host: str,
        *,
        tasks: asyncio.TaskGroup,
        awaits: Callable[[str, int], bool],
        lost: Callable[[EngineLeft], None],
    ) -> None:
        self._registry = registry
        self._host = host
        self._tasks = tasks
        self._awaits = awaits
        self._lost = lost
        self._turn = asyncio.Lock()
        self._entries: dict[str, tuple[ServiceRegistration, asyncio.Task[None]]] = {}
        self._log = OncePerKind(logging.getLogger(__name__))

    async def enter(self, effect: AskEpoch) -> Input | None:
        """Begin a life of an engine, unless it is over by now."""
        engine = effect.engine
        async with self._turn:
            if not self._awaits(engine, effect.ask):
                return None
            await self._leave(engine)
            try:
                entry = await self._registry.register(ENGINE, self._host, engine, _info(effect))
            except RegistryUnavailable as error:
                self._log.warning("register", f"{engine}: {error}")
                return EpochFailed(engine, effect.ask)
            watch = self._tasks.create_task(self._watch(engine, entry), name=f"entry {engine}")
            self._entries[engine] = (entry, watch)
        return EpochGranted(engine, effect.ask, entry.epoch)

    async def describe(self, effect: Describe) -> None:
        """Renew what the entry says."""
        async with self._turn:
            if effect.engine not in self._entries:
                return
            try:
                await self._entries[effect.engine][0].update(_info(effect))
            except RegistryUnavailable as error:
                # The next heartbeat says it.
                self._log.warning("describe", f"{effect.engine}: {error}")

    async def leave(self, effect: RevokeEpoch) -> None:
        """End a life of an engine."""
        async with self._turn:
            await self._leave(effect.engine)

    async def leave_all(self) -> None:
        """End every life of engines."""
        async with self._turn:
            for engine in list(self._entries):
                await self._leave(engine)

    async def _leave(self, engine: str) -> None:
        if engine in self._entries:
            entry, watch = self._entries.pop(engine)
            watch.cancel()
            await entry.revoke()

    async def _watch(self, engine: str, entry: ServiceRegistration) -> None:
        await entry.lost.wait()
        self._lost(EngineLeft(engine, entry.epoch, "superseded"))


def _info(effect: AskEpoch | Describe) -> Info:
    return {
        "incarnation": effect.incarnation,
        "ranks": ",".join(map(str, effect.ranks)),
        "namespaces": ",".join(effect.namespaces),
    }
