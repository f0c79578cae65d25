"""Answers to lookups: what was found is leased, counted and told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.admin import PrefetchReply
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import REQUEST_CHARS_MAX, Place
from kvbm_common.wire.local import Found, Lookup

from kvbm_host_tier.explain import Explain
from kvbm_host_tier.messages import Answer, EngineId, ToEngine
from kvbm_host_tier.reason_of import Looked
from kvbm_host_tier.tier import Tier

OPERATOR = EngineId("operator", "")
"""Whose prefetches are; no engine has an empty incarnation."""

Medium = WireTier | Literal["remote"]
"""Where blocks come from that were not here."""


@dataclass(slots=True)
class OnboardState:
    """A lookup that waits for fills. `slots[i]` is None until block i is here and pinned."""

    engine: EngineId
    connection: bytes
    lookup: int
    hashes: list[SequenceHash]
    slots: list[int | None]
    answer_by_ms: int
    lease_until_ms: int
    run: int
    """Blocks of the run that may still be had; shrinks when a fill fails."""
    block_tokens: int
    came_from: dict[int, Medium] = field(default_factory=dict)
    """Where blocks of the run came from that were not here."""
    reason: str = ""
    failed_at: Place = ""
    """Where, when something failed."""
    asked: Lookup | None = None
    """What the engine has said; None: an operator wants it."""
    question: int = 0
    """To the index, which other host has the blocks behind the run; 0: none is open."""
    reply_to: int = 0
    """An operator's prefetch: it is answered there, and nothing stays pinned."""
    block_bytes: int = 0
    brings: Mapping[Medium, int] = field(default_factory=dict)
    """Blocks on their way for it, by where they come from, as long as that is measured."""
    began_ms: int = 0

    @property
    def trace(self) -> str:
        """The context of its span; empty: it is not traced."""
        return self.asked.trace if self.asked is not None else ""


class Answers:
    """Gives them."""

    def __init__(self, tier: Tier, explain: Explain) -> None:
        self._tier = tier
        self._explain = explain

    def give(self, state: OnboardState) -> None:
        """Lease what is here, and say so."""
        slots = [slot for slot in state.slots if slot is not None]
        assert len(slots) == state.run
        tier = self._tier
        if state.reply_to:
            self._answer_prefetch(state, slots)
            return
        lease_id = 0
        if slots:
            lease = tier.leases.grant(
                str(state.engine), "onboard", tuple(slots), deadline_ms=state.lease_until_ms
            )
            lease_id = lease.id
        disk, objects = _came_from(state, "disk"), _came_from(state, "object")
        remote = _came_from(state, "remote")
        here = state.run - len(disk) - len(objects) - len(remote)
        self._count(len(state.hashes), here, len(disk), len(objects), len(remote))
        tier.counts["matched_tokens"] += state.run * state.block_tokens
        blocks = [tier.table.block(slot) for slot in slots]
        found = Found(
            lookup=state.lookup,
            epoch=tier.announcer.epoch,
            lease=lease_id,
            slots=slots,
            checksums=[block.checksum for block in blocks],
            block_bytes=blocks[0].bytes if blocks else 0,
            disk_blocks=disk,
            object_blocks=objects,
            remote_blocks=remote,
            reason=state.reason if state.run < len(state.hashes) else "",
        )
        tier.emit(ToEngine(state.connection, found))
        self.explain(state)

    def explain(self, state: OnboardState) -> None:
        """Keep why it ended so."""
        asked = state.asked
        if asked is not None:
            self._explain.answered(
                Looked(
                    asked.request[:REQUEST_CHARS_MAX], asked.engine, self._tier.now_ms,
                    state.hashes, state.run, state.came_from, state.reason, state.failed_at,
                    content=asked.content, namespace=asked.namespace, avoided=asked.avoided,
                    trace=asked.trace,
                )
            )  # fmt: skip

    def _answer_prefetch(self, state: OnboardState, slots: list[int]) -> None:
        self._tier.table.unpin(slots)
        reply = PrefetchReply(
            blocks=state.run,
            filled=len(state.came_from.keys() & set(range(state.run))),
            reason=state.reason if state.run < len(state.hashes) else "",
        )
        self._tier.counts["prefetched_blocks"] += reply.filled
        self._tier.emit(Answer(state.reply_to, reply))

    def refuse(
        self, connection: bytes, lookup: Lookup, hashes: list[SequenceHash], reason: str
    ) -> None:
        """Nothing was found, for this reason."""
        self._explain.refused(lookup, hashes, reason, self._tier.now_ms)
        found = Found(
            lookup=lookup.lookup, epoch=self._tier.announcer.epoch, lease=0, slots=[],
            checksums=[], block_bytes=0, reason=reason,
        )  # fmt: skip
        self._tier.emit(ToEngine(connection, found))

    def _count(self, asked: int, host: int, disk: int, objects: int, remote: int) -> None:
        counts = self._tier.counts
        counts["lookups"] += 1
        counts["lookup_blocks.host"] += host
        counts["lookup_blocks.disk"] += disk
        counts["lookup_blocks.object"] += objects
        counts["lookup_blocks.remote"] += remote
        counts["lookup_blocks.miss"] += asked - host - disk - objects - remote
        counts["onboard_blocks_h2d"] += host
        counts["onboard_blocks_d2d"] += disk
        counts["onboard_blocks_o2d"] += objects
        self._tier.hit_window.append((asked, host, disk, objects))


def _came_from(state: OnboardState, tier: Medium) -> list[int]:
    """Indices of the run."""
    return sorted(i for i, source in state.came_from.items() if source == tier and i < state.run)
