"""Open lookups: what is known of a lookup until its answer, which may wait for blocks.

A run of blocks is wanted. It begins with those that are here, which are pinned; others are brought
from a lower tier or a peer. Where one does not come, the run is cut before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.explain import Place
from kvbm_common.wire.local import Lookup

from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.known_runs import Run
from kvbm_host_tier.core.messages import EngineId

Medium = WireTier | Literal["remote"]
"""A medium from which blocks come that were not here."""


class LookupState(Enum):
    """The states of a lookup that cannot be answered at once."""

    ASKING = "asking"
    """The index is asked for peers that have the rest of the run; blocks may be on their way."""
    FILLING = "filling"
    """Blocks are on their way."""

    __hash__ = object.__hash__  # Enum's own is written in Python.


LOOKUP = Machine(
    "lookup",
    {
        (None, "index asked"): LookupState.ASKING,
        (None, "blocks asked for"): LookupState.FILLING,
        (LookupState.ASKING, "index answered"): LookupState.FILLING,
        (LookupState.ASKING, "cut"): LookupState.FILLING,
        (LookupState.FILLING, "complete"): None,
        (LookupState.ASKING, "deadline"): None,
        (LookupState.FILLING, "deadline"): None,
        (LookupState.ASKING, "engine left"): None,
        (LookupState.FILLING, "engine left"): None,
    },
)


@dataclass(slots=True)
class OpenLookup:
    """A lookup until its answer. `slots` has a number for each block that is here and pinned, and
    None for each that is awaited."""

    engine: EngineId
    owner: str
    """The lookup as text: the owner of the lease."""
    hashes: list[SequenceHash]
    answer_by_ms: int
    lease_until_ms: int
    connection: bytes = b""
    number: int = 0
    """The engine's number of it."""
    slots: list[int | None] = field(default_factory=list)
    run_blocks: int = 0
    """Blocks of the run that may still be had; shrinks when a fill fails."""
    block_tokens: int = 0
    """Tokens that the engine would compute for each block; of a plan, on average."""
    state: LookupState | None = None
    """The state of a lookup that waits; None: it does not wait for anything yet."""
    came_from: dict[int, Medium] = field(default_factory=dict)
    """Index in the run → where its block came from, of blocks that were not here."""
    reason: str = ""
    failed_at: Place = ""
    """Where, when something failed."""
    detail: str = ""
    """More about the reason, for people."""
    asked: Lookup | None = None
    """The engine's message; None: this is a prefetch."""
    reply_to: int = 0
    """The request of an operator's prefetch, or HINTED: a prefetch leaves no block pinned."""
    block_bytes: int = 0
    plan: GroupPlan | None = None
    """The plan that chose `hashes`, in a lookup over several KV groups; None: there is one
    group."""
    namespaces: frozenset[bytes] = frozenset()
    """The engine's, which gets blocks of these alone; empty for an operator's prefetch."""
    fallback: list[int] = field(default_factory=list)
    """Slots of a shorter hit, whose blocks are all here, pinned until the answer: else room for the
    plan's fills, or a cut of its run, could cost that hit."""
    known: Run = field(default_factory=Run)
    """The remembered run of the first blocks when the lookup came; empty with a plan."""
    blocks: list[Block] = field(default_factory=list)
    """The blocks in the first of `slots`, as far as their namespaces have been compared."""

    @classmethod
    def of_engine(
        cls,
        connection: bytes,
        asked: Lookup,
        hashes: list[SequenceHash],
        engine: Engine,
        plan: GroupPlan | None,
        now_ms: int,
    ) -> OpenLookup:
        """Return an engine's lookup for these blocks."""
        block_tokens = engine.hello.namespace.block_tokens
        if plan is not None and hashes:
            block_tokens = max(1, plan.reach.tokens // len(hashes))
        return cls(
            engine=engine.id,
            owner=engine.label,
            hashes=hashes,
            answer_by_ms=now_ms + asked.deadline_ms,
            lease_until_ms=now_ms + asked.lease_ms,
            connection=connection,
            number=asked.lookup,
            block_tokens=block_tokens,
            asked=asked,
            block_bytes=engine.block_bytes,
            plan=plan,
            namespaces=engine.namespaces,
        )

    def cut(self, at: int, reason: str, table: SlotTable, place: Place = "") -> None:
        """End the run before index `at`, and unpin what comes after it."""
        assert 0 <= at <= self.run_blocks, self.owner
        table.unpin(slot for slot in self.slots[at:] if slot is not None)
        del self.slots[at:], self.blocks[at:]
        assert len(self.slots) == at, f"{self.owner}: {len(self.slots)} slots of a run of {at}"
        self.run_blocks = at
        self.reason, self.failed_at, self.detail = reason, place, ""

    def restart(self, plan: GroupPlan, table: SlotTable) -> None:
        """Begin again with the blocks of a shorter plan, before any is on its way."""
        hashes = plan.needed()
        assert not self.came_from, f"{self.owner} begins again after blocks have come"
        self.cut(0, "", table)
        assert len(set(hashes)) == len(hashes), f"{self.owner} asks for a block twice"
        self.hashes = hashes
        if hashes:
            self.block_tokens = max(1, plan.reach.tokens // len(hashes))

    def unpin_fallback(self, table: SlotTable) -> None:
        """Let go of what the shorter hit needs."""
        assert self.plan is not None or not self.fallback, f"{self.owner} has no plan to fall back"
        table.unpin(self.fallback)
        self.fallback = []

    def slots_here(self) -> list[int]:
        """Return the slots of the run's blocks that are here."""
        if len(self.blocks) == len(self.slots):
            return cast("list[int]", self.slots)
        return [slot for slot in self.slots if slot is not None]

    @property
    def why_short(self) -> str:
        """The reason why less was found than was asked for; empty: all was found."""
        if self.plan is not None:
            return (self.reason or "not_stored") if self.plan.is_short else ""
        return self.reason if self.run_blocks < len(self.hashes) else ""

    @property
    def trace(self) -> str:
        """The context of its span; empty: no span."""
        return self.asked.trace if self.asked is not None else ""
