"""The host tiers of this host, and what a tier below them knows of their arenas.

Each of them has an arena of its own, which an epoch names: no two have the same. One may ask for an
arena too early (it is cut for the first engine), or know that of a life that is over; then it is
asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.messages import AskArena, AskHostSnapshot, DropArena
from kvbm_disk_tier.tier import Tier


@dataclass(slots=True)
class Host:
    """One host tier."""

    is_there: bool = False
    epoch: int = 0
    """The newest life that we have heard of."""
    is_asked: bool = False


class Hosts:
    """All of them, by instance. Their arenas are in the tier, where both paths look them up."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._hosts: dict[str, Host] = {}

    def seen(self, instance: str) -> None:
        """It has joined."""
        self._of(instance).is_there = True
        self._tier.hosts.add(instance)
        self._ask(instance)

    def lost(self, instance: str) -> None:
        """It has left, or died: nothing of its arena can be read or filled any more."""
        self._of(instance).is_there = False
        self._tier.hosts.discard(instance)
        if self._tier.arenas.pop(instance, None) is not None:
            self._tier.emit(DropArena(instance))

    def heard(self, instance: str, epoch: int) -> None:
        """An event of it; another epoch is another arena."""
        host = self._of(instance)
        host.epoch = max(host.epoch, epoch)
        if self._wants(instance, host):
            self._ask(instance)

    def known(self, arena: ArenaReply) -> None:
        """An arena is mapped. What it held before we listened is told by a snapshot."""
        known = self._tier.arenas.get(arena.instance)
        self._of(arena.instance).is_asked = False
        self._tier.arenas[arena.instance] = arena
        if known is None or known.epoch != arena.epoch or not known.slot_bytes:
            self._ask_snapshot(arena)

    def failed(self, instance: str) -> None:
        """It did not say where its arena is."""
        self._of(instance).is_asked = False

    def ask_snapshots(self) -> None:
        """What do they hold that we have not heard of?"""
        for arena in self._tier.arenas.values():
            self._ask_snapshot(arena)

    def tick(self) -> None:
        """Ask again for what is missing."""
        for instance, host in self._hosts.items():
            if host.is_there and self._wants(instance, host):
                self._ask(instance)

    def _of(self, instance: str) -> Host:
        return self._hosts.setdefault(instance, Host())

    def _wants(self, instance: str, host: Host) -> bool:
        arena = self._tier.arenas.get(instance)
        return arena is None or not arena.slot_bytes or arena.epoch < host.epoch

    def _ask(self, instance: str) -> None:
        host = self._of(instance)
        if not host.is_asked:
            host.is_asked = True
            self._tier.emit(AskArena(instance))

    def _ask_snapshot(self, arena: ArenaReply) -> None:
        if arena.slot_bytes:
            self._tier.emit(AskHostSnapshot(arena.instance))
