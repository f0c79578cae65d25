"""Offers and their pulls: what is known of each, and the tables that they move by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.parts import Grid
from kvbm_common.tier.slots import Block

from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.messages import EngineId


class Phase(Enum):
    """The states of an offer."""

    PULLING = "pulling"
    CONFIRMING = "confirming"
    """All that can come is in; the engine is asked whether it had held its blocks."""
    DEAD = "dead"
    """Nothing of it will be committed; its pulls in flight are waited for."""

    __hash__ = object.__hash__  # Enum's own is written in Python.


OFFER = Machine(
    "offer",
    {
        (None, "offered"): Phase.PULLING,
        (Phase.PULLING, "pulled"): Phase.CONFIRMING,
        (Phase.PULLING, "nothing pulled"): None,
        (Phase.PULLING, "dropped"): Phase.DEAD,
        (Phase.CONFIRMING, "held"): None,
        (Phase.CONFIRMING, "dropped"): Phase.DEAD,
        (Phase.DEAD, "pulls ended"): None,
    },
)


class PullPhase(Enum):
    """The states of a pull."""

    IN_FLIGHT = "in_flight"
    UNSETTLED = "unsettled"
    """The pull has failed, and late bytes may still reach its slots: they stay unused."""

    __hash__ = object.__hash__


PULL = Machine(
    "pull",
    {
        (None, "started"): PullPhase.IN_FLIGHT,
        (PullPhase.IN_FLIGHT, "done"): None,
        (PullPhase.IN_FLIGHT, "failed, settled"): None,
        (PullPhase.IN_FLIGHT, "failed"): PullPhase.UNSETTLED,
        (PullPhase.UNSETTLED, "settled"): None,
    },
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device block that is on offer."""

    hash: SequenceHash
    parent: SequenceHash
    block: int


@dataclass(slots=True)
class OfferState:
    """An offer from its arrival to its end."""

    engine: Engine
    key: tuple[EngineId, int]
    """Its engine's life, and the number that the engine gave it."""
    namespace: bytes
    deadline_ms: int
    wanted: deque[Wanted]
    phase: Phase = Phase.PULLING
    pulls: set[int] = field(default_factory=set)
    """Its pulls that are IN_FLIGHT."""
    arrived: list[tuple[int, Block]] = field(default_factory=list)
    """Staged slots whose bytes are in."""
    skipped: int = 0
    failed: int = 0
    reason: str = ""


@dataclass(slots=True)
class Pull:
    """A batch of one offer."""

    offer: OfferState
    wanted: tuple[Wanted, ...]
    slots: tuple[int, ...]
    block_bytes: int
    grid: Grid
    phase: PullPhase = PullPhase.IN_FLIGHT
