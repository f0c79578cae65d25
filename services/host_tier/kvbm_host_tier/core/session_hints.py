"""Hints of agents: what becomes of a session's blocks while it waits, ends, or is about to resume.

A hint never fails and is never answered. It touches blocks of the namespaces of its engine alone,
which belong to one tenant.
"""

from __future__ import annotations

from itertools import takewhile

from kvbm_common.identity import SequenceHash, unpack_hashes
from kvbm_common.wire.session_hint import HINT_TTL_MS_MAX, SessionHint

from kvbm_host_tier.core.answers import HINTED
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.onboard import Onboard
from kvbm_host_tier.core.session_pins import SessionKey
from kvbm_host_tier.core.well_formed import require_chain

PREFETCH_MS = 10_000
"""The time for which a prefetch waits for blocks, in milliseconds. Blocks that come later stay as
well."""


class SessionHints:
    """Carries out hints; the blocks and their pins are in `held`."""

    def __init__(self, held: HeldBlocks, onboard: Onboard, means: Means) -> None:
        assert 0 <= means.limits.hint_pin_percent < 100, means.limits
        self._held, self._pins, self._onboard = held, held.session_pins, onboard
        self._limits, self._counts = means.limits, means.counts

    def hinted(self, hint: SessionHint, engine: Engine, now_ms: int) -> None:
        """Carry out a hint. Raises IdentityError for hashes that cannot be."""
        assert engine.id.incarnation == hint.incarnation, engine.label
        if hint.namespace not in engine.namespaces:
            self._drop("namespace")
            return
        key = (hint.namespace, hint.session)
        names = unpack_hashes(hint.hashes)
        require_chain(names)
        session = self._pins.find(key)
        if not names:
            if session is None:
                self._drop("unknown_session")
                return
            names = list(session.names)
        self._counts["hints_taken"] += 1
        match hint.action:
            case "pin":
                self._pin(key, names, engine, min(hint.ttl_ms, HINT_TTL_MS_MAX), now_ms)
            case "demote":
                self._demote(key, names, engine, now_ms)
            case "prefetch":
                if session is None:
                    self._pins.learn(key, names, engine.namespaces)
                self._prefetch(names, engine, now_ms)

    def _pin(
        self, key: SessionKey, names: list[SequenceHash], engine: Engine, ttl_ms: int, now_ms: int
    ) -> None:
        """Pin a session's blocks; without a time to live they are ordinary blocks again."""
        assert 0 <= ttl_ms <= HINT_TTL_MS_MAX, f"session {key[1]} pins for {ttl_ms} ms"
        if ttl_ms:
            self._held.keep(names)
            self._pins.pin(key, names, engine.namespaces, now_ms + ttl_ms)
        else:
            self._pins.learn(key, names, engine.namespaces)

    def _demote(
        self, key: SessionKey, names: list[SequenceHash], engine: Engine, now_ms: int
    ) -> None:
        """Let the blocks that no other session has leave first, now or when they come."""
        self._pins.learn(key, names, engine.namespaces)
        here = [name for name in names if self._held.table.holds(name)]
        self._held.demote([name for name in here if not self._is_others(name, engine)])
        # The last blocks of a request are offered after its hints.
        late = [name for name in names if not self._held.table.holds(name)]
        self._held.late.add(late, engine.namespaces, now_ms)

    def _prefetch(self, names: list[SequenceHash], engine: Engine, now_ms: int) -> None:
        """Bring a session's blocks here, up to the first that is not its engine's."""
        assert names, "a prefetch is of blocks"
        if self._held.draining or len(self._onboard) >= self._limits.lookups_max:
            self._drop("busy")
            return
        own = list(takewhile(lambda name: not self._is_others(name, engine), names))
        if engine.hello.group_namespaces:
            # Groups with windows have holes, and what is nowhere would end the run.
            own = [name for name in own if self._held.is_near(name, engine.namespaces, now_ms)]
        self._onboard.prefetch(
            HINTED, own, now_ms, deadline_ms=PREFETCH_MS, namespaces=engine.namespaces
        )

    def _is_others(self, name: SequenceHash, engine: Engine) -> bool:
        slot = self._held.table.find(name)
        return slot is not None and self._held.table.block(slot).namespace not in engine.namespaces

    def _drop(self, reason: str) -> None:
        assert reason, "a hint is dropped for a reason"
        self._counts[f"dropped.hint_{reason}"] += 1
