"""Flows of blocks between engines and tiers, from the tiers' counters. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvbm_common.wire.events import Tier

from kvbm_metrics.core.models import FlowView, LookupsView, RatesView
from kvbm_metrics.core.rates import Rate

Place = Literal["device", "host", "disk", "object", "remote"]
ONBOARDED = (
    "onboard_blocks_h2d",
    "onboard_blocks_d2d",
    "onboard_blocks_o2d",
    "lookup_blocks.remote",
)
"""Counters of blocks that a host tier gave to engines, by where they were."""
OFFLOADED = ("offload_blocks_h2d", "offload_blocks_d2d", "offload_blocks_d2o")
"""Counters of blocks that a lower tier stored; each instance counts one of them."""
OUTCOMES = ("host", "disk", "object", "remote", "miss")

Counted = tuple[Tier, Rate]
"""An instance of a tier: its kind, and the rates of its counters."""


def rates_of(tier: Tier, rate: Rate) -> RatesView:
    """Return the rates of blocks and bytes into one instance of a tier and out of it."""
    if tier == "host":
        blocks_in = rate.sum("offload_blocks_d2h", "promoted_blocks", "peer_pulled_blocks")
        blocks_out = rate.sum(*ONBOARDED)
        bytes_in = rate.sum("bytes.d2h", "bytes.r2h", "bytes.fill")
        bytes_out = rate.sum("bytes.h2d")
    else:
        blocks_in, blocks_out = rate.sum(*OFFLOADED), rate.sum("fill_blocks")
        bytes_in, bytes_out = rate.sum("bytes.payload"), rate.sum("bytes.read")
    return RatesView(
        window_s=rate.window_s,
        blocks_in=blocks_in,
        blocks_out=blocks_out,
        blocks_evicted=sum(
            value for name, value in rate.per_s.items() if name.startswith("evictions.")
        ),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
    )


def flows_of(counted: Iterable[Counted]) -> list[FlowView]:
    """Sum the flows of all instances, one entry for each way that a present tier has."""
    blocks: dict[tuple[Place, Tier], float] = {}
    moved: dict[tuple[Place, Tier], float] = {}

    def add(source: Place, target: Tier, block_count: float, byte_count: float) -> None:
        way = (source, target)
        blocks[way] = blocks.get(way, 0.0) + block_count
        moved[way] = moved.get(way, 0.0) + byte_count

    for tier, rate in counted:
        view = rates_of(tier, rate)
        if tier == "host":
            offloaded, pulled = rate.sum("offload_blocks_d2h"), rate.sum("peer_pulled_blocks")
            add("device", "host", offloaded, rate.sum("bytes.d2h"))
            add("host", "device", view.blocks_out, view.bytes_out)
            add("remote", "host", pulled, rate.sum("bytes.r2h"))
        else:
            add("host", tier, view.blocks_in, view.bytes_in)
            add(tier, "host", view.blocks_out, view.bytes_out)
    assert blocks.keys() == moved.keys(), f"ways of blocks {list(blocks)}, of bytes {list(moved)}"
    return [
        FlowView(source=source, target=target, blocks=count, bytes=moved[source, target])
        for (source, target), count in blocks.items()
    ]


def lookups_of(counted: Iterable[Counted]) -> LookupsView:
    """Return the rates of lookups and found blocks, over all host tiers."""
    rates = [rate for tier, rate in counted if tier == "host"]
    blocks = {
        outcome: sum(one.sum(f"lookup_blocks.{outcome}") for one in rates) for outcome in OUTCOMES
    }
    asked = sum(blocks.values())
    return LookupsView(
        window_s=max((one.window_s for one in rates), default=0.0),
        lookups=sum(one.sum("lookups") for one in rates),
        matched_tokens=sum(one.sum("matched_tokens") for one in rates),
        blocks=blocks,
        hit_rate=1 - blocks["miss"] / asked if asked else None,
    )
