"""Planted bugs of engines: their loads, their offers, their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvbm_common.wire.verbs import Offer
from kvbm_connectors.core import messages as connector
from kvbm_connectors.core.core import ConnectorCore
from kvbm_connectors.vllm.tracked import Tracked
from kvbm_host_tier.core.offload import Offload

from tests.sim.plant import ONE_HOST, VLLM, WRONG_BYTES, Plant
from tests.sim.workers import Worker


def count_the_deadline_from_take(patch: pytest.MonkeyPatch) -> None:
    """The load's deadline begins when the engine takes what was found, not when it asked."""
    take = ConnectorCore.take

    def planted(
        core: ConnectorCore, request: str, blocks: Sequence[int], now_ms: int
    ) -> connector.Load:
        load = take(core, request, blocks, now_ms)
        limits = core._limits
        return replace(load, deadline_ms=now_ms + limits.onboard_deadline_ms + limits.lease_ms)

    patch.setattr(ConnectorCore, "take", planted)


def pull_a_duplicate_offer(patch: pytest.MonkeyPatch) -> None:
    """An offer that was put to the question is forgotten: a late duplicate is pulled again."""
    offered = Offload.offered

    def planted(offload: Offload, offer: Offer, now_ms: int) -> None:
        offload._asked.clear()
        offered(offload, offer, now_ms)

    patch.setattr(Offload, "offered", planted)


def take_hits_for_computed(patch: pytest.MonkeyPatch) -> None:
    """A hit on the device counts as computed, though the step that computes it has not ended."""

    def planted(tracked: Tracked, block_tokens: int) -> int:
        request = tracked.request
        if tracked.lease is not None and (not tracked.sync or request.num_in_flight_tokens):
            return 0
        done = request.num_computed_tokens - request.num_in_flight_tokens
        return min(done, request.num_tokens) // block_tokens

    patch.setattr(Tracked, "computed", planted)


def offer_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Blocks are offered as soon as the step that computes them is scheduled."""

    def planted(tracked: Tracked, block_tokens: int) -> int:
        if tracked.lease is not None:
            return 0
        request = tracked.request
        return min(request.num_computed_tokens, request.num_tokens) // block_tokens

    patch.setattr(Tracked, "computed", planted)


def verify_on_the_first_rank_only(patch: pytest.MonkeyPatch) -> None:
    """The other ranks take what they load for good."""
    patch.setattr(Worker, "verifies", lambda _worker, rank: rank == 0)


DAWDLING = {
    **ONE_HOST, "dawdles": 0.8, "lease_ms": 800, "host_slots": 12, "verified": False, "faults": (),
}  # fmt: skip
DUPLICATED = {
    **ONE_HOST, "duplicates": 1.0, "stalls": 0.05, "confirm_ms": 50, "faults": (),
    "device_blocks": 16, "host_slots": 60, "delay_ms": 3.0, "conversations": 12, "loss": 0.0,
}  # fmt: skip
TWO_RANKS = {
    **ONE_HOST, "ranks": 2, "verified": True, "faults": ("rot arena",), "fault_every_ms": 300.0,
}  # fmt: skip

PLANTS = (
    Plant("a deadline counts from take", count_the_deadline_from_take, WRONG_BYTES, DAWDLING),
    Plant("a duplicate offer is pulled", pull_a_duplicate_offer, WRONG_BYTES, DUPLICATED),
    Plant("a hit is taken for computed", take_hits_for_computed, WRONG_BYTES, VLLM),
    Plant("what is in flight is offered", offer_what_is_in_flight, WRONG_BYTES, VLLM),
    Plant("a rank does not verify", verify_on_the_first_rank_only, WRONG_BYTES, TWO_RANKS),
)
