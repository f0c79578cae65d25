"""Pins of sessions: an agent that waits for a tool finds its blocks when it comes back.

A session pins the blocks that its last hint named, until the hint's time to live has passed. Blocks
that are still on their way are pinned when they arrive. The sessions of a tenant may pin a part of
the tenant's share; blocks beyond it are not pinned, and are counted.

            pin                 the time has passed, or demote, or it yields
    (new) ───────► PINNING ─────────────────────────────────────► KNOWN: its names are remembered
                    │   ▲  pin again: other blocks                  │
                    └───┘                                           └── pin ──► PINNING

Sessions *yield* (their pins end early), the one without a hint for the longest time first: to a
newer session of their tenant when the bound is full, when the bound shrinks, and when blocks of
another size need a slab. No pin ends where slots will be free soon, after a read or a fill.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slabs import SizeClass
from kvbm_common.tier.slots import SlotTable
from kvbm_common.tier.tenants import Claim, Tenant
from kvbm_common.wire.bounds import Usage

SESSIONS_MAX = 1_024
"""Sessions that are remembered. Beyond it the tenant with the most loses the session without a
hint for the longest time."""
NAMES_MAX = 262_144
"""Names of blocks that are remembered for all sessions together."""

YieldReason = Literal["newer", "share", "room"]
"""The reason why pins end before their time. The bound is full and a newer session pins, the bound
has become smaller, or a block finds no room."""

SessionKey = tuple[bytes, str]
"""Namespace and name: sessions of two tenants never meet, since their namespaces differ."""


class Session:
    """The blocks of one session, and how long they are pinned."""

    __slots__ = ("is_pinning", "names", "namespaces", "until_ms")

    def __init__(self) -> None:
        self.names: tuple[SequenceHash, ...] = ()
        self.namespaces: frozenset[bytes] = frozenset()
        self.until_ms, self.is_pinning = 0, False


class _PinnedBlock:
    """A block in its slot, and the sessions that pin it; it is pinned once for all of them."""

    __slots__ = ("holders", "slot", "slot_bytes", "tenant")

    def __init__(self, slot: int, slot_bytes: int, tenant: Tenant) -> None:
        self.slot, self.slot_bytes, self.tenant = slot, slot_bytes, tenant
        self.holders: dict[SessionKey, None] = {}


class SessionPins:
    """All sessions of one host tier. `left` and `arrived` follow the blocks."""

    def __init__(self, table: SlotTable, counts: Counter[str], *, part_max: float) -> None:
        assert 0 <= part_max < 1, f"sessions may pin {part_max} of a share"
        self._table, self._counts, self._part_max = table, counts, part_max
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._name_count = 0
        self._pinned: dict[SequenceHash, _PinnedBlock] = {}
        self._wanted: dict[SequenceHash, dict[SessionKey, None]] = {}
        """Blocks that are not here, and the sessions that pin them when they come."""
        self._sharers: Counter[SequenceHash] = Counter()
        """Block → the number of sessions that have its name."""
        self._used_bytes: Counter[Tenant] = Counter()
        self._slots_held: Counter[int] = Counter()
        """Slot length → the number of slots that sessions pin."""
        self._due_ms = 0
        """The earliest end of a session's pins; 0: no session pins."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey) -> Session | None:
        """Return a session that is remembered."""
        return self._sessions.get(key)

    # --- hints ------------------------------------------------------------------------------

    def learn(
        self, key: SessionKey, names: Sequence[SequenceHash], namespaces: frozenset[bytes]
    ) -> Session:
        """Remember these blocks for a session without pinning them; returns the session."""
        self.unpin(key)
        session = self._remember(key, names, namespaces)
        assert not session.is_pinning, f"session {key[1]} still pins blocks"
        return session

    def pin(
        self,
        key: SessionKey,
        names: Sequence[SequenceHash],
        namespaces: frozenset[bytes],
        until_ms: int,
    ) -> None:
        """Pin these blocks for a session until `until_ms`, and unpin its others."""
        assert until_ms > 0, f"session {key[1]} pins until {until_ms} ms"
        known = self._sessions.get(key)
        if known is not None and known.is_pinning:  # Blocks that it unpins make room.
            kept = set(names[:NAMES_MAX])
            self._release(key, [name for name in known.names if name not in kept])
        session = self._remember(key, names, namespaces)
        session.until_ms, session.is_pinning = until_ms, True
        self._due_ms = min(self._due_ms or until_ms, until_ms)
        for place, name in enumerate(session.names):
            if not self._pin_or_await(key, session, name):
                self._counts["hint_blocks_refused"] += len(session.names) - place
                break

    def _remember(
        self, key: SessionKey, names: Sequence[SequenceHash], namespaces: frozenset[bytes]
    ) -> Session:
        """Give a session these names, and forget other sessions if there are too many."""
        session = self._sessions.pop(key, None) or Session()
        self._drop_names(session)
        session.names, session.namespaces = tuple(names[:NAMES_MAX]), namespaces
        count = len(session.names)
        while self._sessions and (
            len(self._sessions) >= SESSIONS_MAX or self._name_count + count > NAMES_MAX
        ):
            self.forget(self._one_too_many(key, count))
            self._counts["hint_sessions_forgotten"] += 1
        self._sessions[key] = session
        self._sharers.update(session.names)
        self._name_count += count
        assert self._name_count <= NAMES_MAX, f"sessions have {self._name_count} names"
        return session

    def _one_too_many(self, new: SessionKey, count: int) -> SessionKey:
        """Return the session to forget for a new one of `count` names: the oldest one of the tenant
        with the most sessions, or names, for its weight."""
        assert self._sessions, "no session makes room for a new one"
        of, by_names = self._table.tenants.of, self._name_count + count > NAMES_MAX
        oldest: dict[Tenant, SessionKey] = {}
        level = Counter[Tenant]({of(new[0]): count if by_names else 1})
        for key, session in self._sessions.items():
            tenant = of(key[0])
            oldest.setdefault(tenant, key)
            level[tenant] += len(session.names) if by_names else 1
        return oldest[max(oldest, key=lambda one: (level[one] / one.weight, one is of(new[0])))]

    def _drop_names(self, session: Session) -> None:
        self._name_count -= len(session.names)
        for name in session.names:
            self._sharers[name] -= 1
            assert self._sharers[name] >= 0, f"{name.hex()} is remembered by less than no session"
            if not self._sharers[name]:
                del self._sharers[name]

    def _pin_or_await(self, key: SessionKey, session: Session, name: SequenceHash) -> bool:
        """Pin a block now, or when it comes; False: the tenant's bound is reached."""
        assert session.is_pinning, f"session {key[1]} pins nothing"
        pinned = self._pinned.get(name)
        slot = self._table.find(name) if pinned is None else pinned.slot
        if slot is None:
            self._wanted.setdefault(name, {})[key] = None
        elif self._table.block(slot).namespace not in session.namespaces:
            pass  # Another tenant's block is not kept by this one, pinned or not.
        elif pinned is not None:
            pinned.holders[key] = None
        else:
            return self._hold(key, name, slot)
        return True

    def _hold(self, key: SessionKey, name: SequenceHash, slot: int) -> bool:
        assert name not in self._wanted, f"{name.hex()} is here, and awaited"
        tenant, size = self._table.tenant_of(name), self._table.slot_bytes(slot)
        bound = self._bound(tenant)
        if self._used_bytes[tenant] + size > bound:
            for older in self._pinning_of(tenant):
                if older == key or self._used_bytes[tenant] + size <= bound:
                    break
                self._yield(older, "newer")
        if self._used_bytes[tenant] + size > bound:
            return False
        if self._used_bytes.total() + size > self._total_bound:
            self._trim()  # Another tenant pins more than it may by now.
            if self._used_bytes.total() + size > self._total_bound:
                return False
        self._table.pin(slot)
        self._used_bytes[tenant] += size
        self._slots_held[size] += 1
        pinned = self._pinned[name] = _PinnedBlock(slot, size, tenant)
        pinned.holders[key] = None
        self._counts["hint_blocks_pinned"] += 1
        return True

    def unpin(self, key: SessionKey) -> None:
        """End the pins of a session; its names are remembered."""
        session = self._sessions.get(key)
        if session is not None and session.is_pinning:
            session.is_pinning = False
            self._release(key, session.names)

    def _release(self, key: SessionKey, names: Iterable[SequenceHash]) -> None:
        """End a session's pins of these blocks, and its waiting for them."""
        ended: list[int] = []
        for name in names:
            pinned, waiting = self._pinned.get(name), self._wanted.get(name)
            if waiting is not None:
                waiting.pop(key, None)
                if not waiting:
                    del self._wanted[name]
            if pinned is not None and key in pinned.holders:
                del pinned.holders[key]
                if not pinned.holders:
                    ended.append(self._let_go(name))
        self._table.unpin(ended)

    def _let_go(self, name: SequenceHash) -> int:
        """Forget a pin that no session needs; returns the slot, which is to be unpinned."""
        pinned = self._pinned.pop(name)
        self._used_bytes[pinned.tenant] -= pinned.slot_bytes
        self._slots_held[pinned.slot_bytes] -= 1
        if not self._used_bytes[pinned.tenant]:
            del self._used_bytes[pinned.tenant]
        assert self._used_bytes[pinned.tenant] >= 0, f"{pinned.tenant} pins less than nothing"
        return pinned.slot

    def forget(self, key: SessionKey) -> None:
        """Forget a session, and end its pins."""
        self.unpin(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            self._drop_names(session)
        assert self._name_count >= 0, f"sessions have {self._name_count} names"

    def tick(self, now_ms: int) -> None:
        """End the pins of sessions whose time has passed, and those beyond a smaller bound."""
        self._trim()
        if not self._due_ms or now_ms < self._due_ms:
            return
        pinning = [(key, one) for key, one in self._sessions.items() if one.is_pinning]
        for key, session in pinning:
            if session.until_ms <= now_ms:
                self.unpin(key)
                self._counts["hint_pins_expired"] += 1
        left = [one.until_ms for _, one in pinning if one.is_pinning]
        self._due_ms = min(left, default=0)
        assert not left or self._due_ms > now_ms, f"due at {self._due_ms}, it is {now_ms} ms"

    # --- pins that yield --------------------------------------------------------------------

    @property
    def _total_bound(self) -> float:
        return self._part_max * self._table.usable_bytes

    def _bound(self, tenant: Tenant) -> float:
        """Return how many bytes a tenant's sessions may pin: 0 if it has no share."""
        if tenant.is_idle and not tenant.was_used and self._table.tenants.named:
            return 0.0
        return self._part_max * self._table.share_bytes(tenant)

    def _trim(self) -> bool:
        """Have sessions of tenants that pin more than their bound yield; return whether one has."""
        beyond = [one for one, used in self._used_bytes.items() if used > self._bound(one)]
        has_yielded = False
        for tenant in beyond:  # Nearly always empty: each tenant costs a walk over all sessions.
            for key in self._pinning_of(tenant):
                if self._used_bytes[tenant] <= self._bound(tenant):
                    break
                self._yield(key, "share")
                has_yielded = True
        return has_yielded

    def give_way(self, claim: Claim | None = None, block_bytes: int = 0) -> bool:
        """Have the oldest session yield for a block that finds no room; False: none would help.

        Pins stay if slots of the block's size will be free soon, after a read or a fill. `claim`:
        the claim of the block's tenant; None: there is one tenant. `block_bytes` 0: any slot helps.
        """
        assert block_bytes >= 0, f"a block of {block_bytes} bytes finds no room"
        if self._trim():  # The tier may have become smaller since the last tick.
            return True
        size = self._table.pool.size_of(block_bytes) if block_bytes else None
        if size is not None:
            in_use = sum(slab.usable - len(slab.reset) for slab in size.slabs.values())
            if in_use - size.idle_count > self._slots_held[size.slot_bytes]:
                return False
        for tenant in list(self._used_bytes):
            if claim is not None and not claim.may_lose(tenant, block_bytes):
                continue
            for key in self._pinning_of(tenant):
                if any(self._would_help(name, size) for name in self._sessions[key].names):
                    self._yield(key, "room")
                    return True
        return False

    def _would_help(self, name: SequenceHash, size: SizeClass | None) -> bool:
        """Tell whether unpinning a block would let it leave, and make room in this class."""
        pinned = self._pinned.get(name)
        assert pinned is None or self._table.pin_count(pinned.slot), f"{name.hex()} is not pinned"
        if pinned is None or self._table.pin_count(pinned.slot) > 1:
            return False
        if leaving := self._table.pool.leaving:
            return size is None or self._table.pool.slab_of[pinned.slot] in leaving
        return size is None or pinned.slot_bytes == size.slot_bytes

    def _pinning_of(self, tenant: Tenant) -> Iterator[SessionKey]:
        """Yield the sessions of a tenant that pin, without a hint for the longest time first."""
        tenants = self._table.tenants
        for key, session in list(self._sessions.items()):
            if session.is_pinning and tenants.of(key[0]) is tenant:
                yield key

    def _yield(self, key: SessionKey, reason: YieldReason) -> None:
        assert self._sessions[key].is_pinning, f"session {key[1]} pins nothing that could yield"
        self.unpin(key)
        self._counts[f"hint_pins_yielded.{reason}"] += 1

    # --- blocks -----------------------------------------------------------------------------

    def arrived(self, names: Iterable[SequenceHash]) -> None:
        """Pin blocks that sessions wait for, and that were committed just now."""
        if not self._wanted:
            return
        for name in names:
            waiting = self._wanted.pop(name, None)
            for key in waiting or ():
                # The pins of sessions before this one may have made it yield.
                session = self._sessions[key]
                if session.is_pinning and not self._pin_or_await(key, session, name):
                    self._counts["hint_blocks_refused"] += 1

    def left(self, names: Iterable[SequenceHash]) -> None:
        """Unpin blocks that are about to leave; the sessions that want them await them again."""
        if not self._pinned:
            return
        ended: list[int] = []
        for name in names:
            pinned = self._pinned.get(name)
            if pinned is not None:
                self._wanted[name] = pinned.holders
                ended.append(self._let_go(name))
        self._table.unpin(ended)

    def is_shared(self, name: SequenceHash) -> bool:
        """Tell whether several sessions have this block, such as their tools' description."""
        return self._sharers[name] > 1

    # --- questions --------------------------------------------------------------------------

    def slots(self) -> list[int]:
        """Return the slots that sessions pin, each once, for `check`."""
        return [pinned.slot for pinned in self._pinned.values()]

    def usage(self) -> Usage:
        """Return how many bytes are pinned, how many may be, and how many blocks were refused."""
        refused = self._counts["hint_blocks_refused"]
        return Usage(self._used_bytes.total(), self._total_bound, refused)

    def figures(self) -> dict[str, float]:
        """Return how many sessions are remembered, and what they pin."""
        return {
            "hint_sessions": float(len(self._sessions)),
            "hint_pinned_bytes": float(self._used_bytes.total()),
        }

    def check(self) -> None:
        """Assert every invariant; O(names)."""
        used: Counter[Tenant] = Counter()
        for name, pinned in self._pinned.items():
            assert self._table.find(name) == pinned.slot, "a pinned block has left its slot"
            assert pinned.holders, "a block is pinned for no session"
            used[pinned.tenant] += pinned.slot_bytes
        held = Counter(pinned.slot_bytes for pinned in self._pinned.values())
        assert held == self._slots_held, f"{self._slots_held} slots are counted, {held} pinned"
        assert used == self._used_bytes, f"{self._used_bytes} bytes are counted, {used} pinned"
        assert self._pinned.keys().isdisjoint(self._wanted), "a pinned block is awaited"
        for table in (self._wanted, {name: one.holders for name, one in self._pinned.items()}):
            for name, keys in table.items():
                assert keys, "a block is awaited by no session"
                assert all(name in self._sessions[key].names for key in keys)
                assert all(self._sessions[key].is_pinning for key in keys)
        assert self._name_count == sum(len(one.names) for one in self._sessions.values())
        sharers = Counter(name for one in self._sessions.values() for name in one.names)
        assert sharers == self._sharers, "a block is counted for a session that lacks it"
        assert len(self._sessions) <= SESSIONS_MAX, f"{len(self._sessions)} sessions"
        assert self._name_count <= NAMES_MAX, f"{self._name_count} names"
