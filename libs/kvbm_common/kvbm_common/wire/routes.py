"""The verb `route` of the index: which engine should take a prompt."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.wire.events import Natural, Token
from kvbm_common.wire.partitions import _OfPartitions
from kvbm_common.wire.scores import ScoreRequest, Weight

ENGINES_MAX = 1_024
"""Engines in one question: 128 hosts with eight each."""
PEER_WEIGHT = 0.5
"""The weight of a block in a peer's memory: the network is about as fast as a disk."""
RUNNING_BLOCKS = 1.0
"""A request that generates delays a prefill by little: enough to choose between engines that have
equally much of a prompt, too little to give up several blocks."""

Place = Literal["device", "host", "disk", "object", "peer"]
"""A place where an engine finds a block: its own device, a tier of its host, another host's
memory."""
Amount = Annotated[float, Meta(ge=0, le=1_000_000_000)]


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may take the prompt, and what it has to do already."""

    source: Token
    host: Annotated[str, Meta(max_length=64, description="Empty: the engine on any host.")] = ""
    rank: Natural | None = None
    """The rank of an engine with data-parallel ranks; none: all of them."""
    running: Natural = 0
    waiting: Natural = 0
    waiting_blocks: Amount | None = None
    """Blocks that the waiting requests let it compute first; none: each is as long as this one."""


class RouteRequest(ScoreRequest, frozen=True, kw_only=True):
    """The question which engine should take a prompt.

    A tier's weight is the part of a block's cost that it saves.
    """

    engines: Annotated[list[EngineLoad], Meta(max_length=ENGINES_MAX)] = msgspec.field(
        default_factory=list
    )
    """The engines that may take it; empty: every engine that the index knows, all without load."""
    peer_weight: Weight = PEER_WEIGHT
    """The weight of a block in the memory of another host; 0: peers are not read."""
    running_blocks: Amount = RUNNING_BLOCKS
    """The cost of a running request, in blocks."""


class RankedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine. All costs are in blocks: 1 is the time to compute a block."""

    host: Token
    source: Token
    rank: Natural = 0
    cost: Annotated[float, Meta(description="The sum of `compute`, `load` and `queue`.")]
    compute: Annotated[Natural, Meta(description="Blocks that it does not find, and computes.")]
    load: Annotated[float, Meta(description="What it costs to load what its device has not.")]
    queue: Annotated[float, Meta(description="What the requests before this one cost.")]
    found: Annotated[
        dict[Place, Natural], Meta(description="Blocks that it finds, by the best place of each.")
    ]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is not ranked."""

    host: str
    source: Token
    reason: Annotated[
        Literal["unknown", "behind", "namespace"],
        Meta(
            description="`unknown`: gone, never seen, or without this rank; "
            "`behind`: events of it are missing; `namespace`: it has another model."
        ),
    ]


class RouteReply(_OfPartitions, frozen=True, kw_only=True):
    """Engines that live and are followed without a hole, the least cost first."""

    asked: Natural
    engines: list[RankedEngine]
    left_out: list[LeftOut] = msgspec.field(default_factory=list)
