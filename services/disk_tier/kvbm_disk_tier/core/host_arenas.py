"""The host tiers of this host, and what a tier below them knows of their arenas.

Each of them has an arena of its own, which an epoch names: no two have the same. One may ask for an
arena too early (it is cut for the first engine), or know that of a life that is over; then it is
asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvbm_common.tier.machine import Machine
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.effects import AskArena, AskHostSnapshot, DropArena, Emit
from kvbm_disk_tier.core.store_status import StoreStatus


class ArenaState(Enum):
    """The state of one host tier's arena, as far as it is known."""

    UNKNOWN = "unknown"
    ASKED = "asked"
    MAPPED = "mapped"
    RENEWING = "renewing"


ARENA = Machine(
    "host arena",
    {
        (None, "heard of"): ArenaState.UNKNOWN,
        (ArenaState.UNKNOWN, "ask"): ArenaState.ASKED,
        (ArenaState.ASKED, "known"): ArenaState.MAPPED,
        (ArenaState.ASKED, "failed"): ArenaState.UNKNOWN,
        (ArenaState.ASKED, "left"): ArenaState.ASKED,
        (ArenaState.ASKED, "known late"): ArenaState.UNKNOWN,
        (ArenaState.MAPPED, "ask"): ArenaState.RENEWING,
        (ArenaState.MAPPED, "left"): ArenaState.UNKNOWN,
        (ArenaState.RENEWING, "known"): ArenaState.MAPPED,
        (ArenaState.RENEWING, "failed"): ArenaState.MAPPED,
        (ArenaState.RENEWING, "left"): ArenaState.ASKED,
        (ArenaState.UNKNOWN, "known"): ArenaState.MAPPED,
        (ArenaState.UNKNOWN, "failed"): ArenaState.UNKNOWN,
        (ArenaState.UNKNOWN, "left"): ArenaState.UNKNOWN,
        (ArenaState.UNKNOWN, "known late"): ArenaState.UNKNOWN,
        (ArenaState.MAPPED, "known"): ArenaState.MAPPED,
        (ArenaState.MAPPED, "failed"): ArenaState.MAPPED,
    },
)
MAPPED = (ArenaState.MAPPED, ArenaState.RENEWING)
ASKED = (ArenaState.ASKED, ArenaState.RENEWING)
NOT_GONE = -1
UNCUT_MS = 5_000
"""The pause between two questions to a host tier without an engine, which may have cut its
arena."""


@dataclass(slots=True)
class HostArena:
    """One host tier and its arena."""

    instance: str
    state: ArenaState
    is_there: bool = False
    """The host tier has joined and not left."""
    epoch: int = 0
    """The newest life that has been heard of."""
    named_epoch: int = 0
    """The life that the registry named last. It may have a lower epoch than one that was heard of,
    because the registry is another one."""
    gone_epoch: int = NOT_GONE
    """The life that has left, until another one is known."""


class HostArenas:
    """All of them, by instance, and which of their arenas fit the store."""

    def __init__(self, store: StoreStatus, emit: Emit) -> None:
        self.mapped: dict[str, ArenaReply] = {}
        """The arenas that are mapped, by the instance of their host tier."""
        self.usable: dict[int, ArenaReply] = {}
        """Epoch → mapped arena that blocks can be moved from and to."""
        self.lenders: dict[str, ArenaReply] = {}
        """Instance of a host tier → its usable arena."""
        self.staging = False
        """Disk-only mode: every block is for the disk."""
        self._store = store
        self._emit = emit
        self._hosts: dict[str, HostArena] = {}
        self._unheard: set[str] = set()
        """Host tiers that were asked what they hold, and have not said it."""
        self._ask_uncut_ms = 0

    # --- what is heard ----------------------------------------------------------------------

    def joined(self, instance: str, epoch: int = 0) -> None:
        """Note that a host tier has joined, or lives a new life."""
        host = self._of(instance)
        host.is_there = True
        host.epoch, host.named_epoch, host.gone_epoch = max(host.epoch, epoch), epoch, NOT_GONE
        self._ask(host)
        assert host.state in ASKED, f"host tier {instance} is {host.state.name} when it joins"

    def left(self, instance: str) -> None:
        """Drop the arena of a host tier that has left or died: nothing of it can be moved."""
        host = self._of(instance)
        host.is_there = False
        self._move(host, "left")
        arena = self.mapped.pop(instance, None)
        host.gone_epoch = host.epoch if arena is None else max(host.epoch, arena.epoch)
        if arena is not None:
            self._emit(DropArena(instance))
            self.refit()
        assert host.state not in MAPPED, f"host tier {instance} left an arena behind"

    def heard(self, instance: str, epoch: int) -> None:
        """Note an epoch of a host tier that no usable arena has: it is another arena's."""
        assert epoch not in self.usable, f"the arena of epoch {epoch} is usable"
        host = self._hosts.get(instance) or self._of(instance)
        host.epoch = max(host.epoch, epoch)
        if self._wants(host) and host.epoch > host.gone_epoch:
            self._ask(host)

    def known(self, arena: ArenaReply) -> None:
        """Take an arena that is mapped. A snapshot tells what it held before we listened.

        That of a life that has left meanwhile is dropped: nothing else would unmap it.
        """
        before = self.mapped.get(arena.instance)
        assert arena.slot_bytes >= 0
        host = self._of(arena.instance)
        if arena.epoch <= host.gone_epoch:
            self._move(host, "known late")
            self._emit(DropArena(arena.instance))
            return
        host.gone_epoch = NOT_GONE
        if arena.epoch == host.named_epoch:
            host.epoch = arena.epoch
        self._move(host, "known")
        self.mapped[arena.instance] = arena
        self.refit()
        if before is None or before.epoch != arena.epoch or not before.slot_bytes:
            self._ask_snapshot(arena)

    def failed(self, instance: str) -> None:
        """Note that a host tier did not say where its arena is; a tick asks again."""
        host = self._of(instance)
        self._move(host, "failed")
        assert host.state not in ASKED, f"the question to host tier {instance} is over"

    def ask_snapshots(self) -> None:
        """Ask every host tier what it holds: events of theirs were lost."""
        for arena in self.mapped.values():
            self._ask_snapshot(arena)

    def snapshot_failed(self, instance: str) -> None:
        """Note that a host tier did not say what it holds; a tick asks again."""
        assert instance, "a host tier has a name"
        self._unheard.add(instance)

    def ask_missing(self) -> None:
        """Ask for every arena that is missing and not being asked for."""
        for host in self._hosts.values():
            if host.is_there and self._wants(host):
                self._ask(host)

    def tick(self, now_ms: int) -> None:
        """Ask for every arena that is missing, and seldom for one that is not cut yet: the registry
        tells when it is. Ask again who did not say what it holds."""
        uncut_too = now_ms >= self._ask_uncut_ms
        if uncut_too:
            self._ask_uncut_ms = now_ms + UNCUT_MS
        for host in self._hosts.values():
            if host.is_there and self._wants(host) and (uncut_too or not self._is_uncut(host)):
                self._ask(host)
        unheard, self._unheard = self._unheard, set()
        for instance in sorted(unheard & self.mapped.keys()):
            self._ask_snapshot(self.mapped[instance])

    # --- questions --------------------------------------------------------------------------

    @property
    def is_asking(self) -> bool:
        """Tell whether a host tier is being asked for its arena."""
        return any(host.state in ASKED for host in self._hosts.values())

    def sizes(self) -> set[int]:
        """Return the lengths of the slots in the mapped arenas."""
        cut = (arena for arena in self.mapped.values() if arena.slot_bytes)
        return {size for arena in cut for size in arena.sizes or [arena.slot_bytes]}

    def substitute(self, instance: str) -> ArenaReply | None:
        """Return the arena that may have what this host tier had, if it is gone itself."""
        host = self._hosts.get(instance)
        if instance in self.mapped or (host is not None and host.is_there):
            return None  # Its own arena will be usable.
        return next(iter(self.usable.values()), None)

    def refit(self) -> None:
        """Find the arenas that fit the store: one of both has changed."""
        self._store.follow(self.sizes())
        arenas = self.mapped.values()
        cut = [one for one in arenas if one.slot_bytes and self._store.has_slots]
        self.usable = {one.epoch: one for one in cut}
        self.lenders = {one.instance: one for one in self.usable.values()}
        assert len(self.lenders) == len(self.usable) <= len(arenas), "two arenas have one epoch"
        self.staging = any(one.staging for one in arenas)

    # --- moves ------------------------------------------------------------------------------

    def _of(self, instance: str) -> HostArena:
        host = self._hosts.get(instance)
        if host is None:
            host = self._hosts[instance] = HostArena(instance, ARENA.next(None, "heard of"))
        return host

    def _wants(self, host: HostArena) -> bool:
        arena = self.mapped.get(host.instance)
        return arena is None or not arena.slot_bytes or arena.epoch < host.epoch

    def _is_uncut(self, host: HostArena) -> bool:
        arena = self.mapped.get(host.instance)
        return arena is not None and not arena.slot_bytes and arena.epoch >= host.epoch

    def _ask(self, host: HostArena) -> None:
        assert host.instance in self._hosts, f"host tier {host.instance} was not heard of"
        if host.state not in ASKED:
            self._move(host, "ask")
            self._emit(AskArena(host.instance))

    def _ask_snapshot(self, arena: ArenaReply) -> None:
        assert arena.instance in self.mapped, f"the arena of {arena.instance} is not mapped"
        if arena.slot_bytes:
            self._emit(AskHostSnapshot(arena.instance))

    def _move(self, host: HostArena, event: str) -> None:
        host.state = ARENA.next(host.state, event, f"host tier {host.instance}")

    def check(self) -> None:
        """Assert every invariant of the arenas."""
        for host in self._hosts.values():
            assert (host.state in MAPPED) == (host.instance in self.mapped), host
            assert host.gone_epoch == NOT_GONE or host.state not in MAPPED, host
        assert set(self.usable) <= {arena.epoch for arena in self.mapped.values()}
