"""Planted bugs of engines: their loads, their offers, their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvbm_common.wire.verbs import Offer
from kvbm_connectors.core import messages as connector
from kvbm_connectors.core.core import ConnectorCore
from kvbm_connectors.vllm.tracked import Tracked
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.messages import PullPart
from kvbm_host_tier.core.offload import Offload

from tests.sim.plant import ONE_HOST, VLLM, WRONG_BYTES, Plant
from tests.sim.shapes import MIXED, RANKS, REPLICAS
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
        offload._asked_to_confirm.clear()
        offered(offload, offer, now_ms)

    patch.setattr(Offload, "offered", planted)


def take_hits_for_computed(patch: pytest.MonkeyPatch) -> None:
    """A hit on the device counts as computed, though the step that computes it has not ended."""

    def planted(tracked: Tracked) -> int:
        request = tracked.request
        if tracked.lease is not None:
            return 0
        done = request.num_computed_tokens - request.num_in_flight_tokens
        return min(done, request.num_tokens)

    patch.setattr(Tracked, "computed", planted)


def offer_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Blocks are offered as soon as the step that computes them is scheduled."""

    def planted(tracked: Tracked) -> int:
        if tracked.lease is not None:
            return 0
        request = tracked.request
        return min(request.num_computed_tokens, request.num_tokens)

    patch.setattr(Tracked, "computed", planted)


def verify_on_the_first_rank_only(patch: pytest.MonkeyPatch) -> None:
    """The other ranks take what they load for good."""
    patch.setattr(Worker, "verifies", lambda _worker, rank: rank == 0)


def leave_a_part_out(patch: pytest.MonkeyPatch) -> None:
    """Ranks compare all of their parts but one."""
    patch.setattr(Worker, "compares", lambda _worker, part: part != 1)


def pull_replicas_too(patch: pytest.MonkeyPatch) -> None:
    """Blocks are pulled from every rank, whatever others hold."""

    def planted(engine: Engine) -> tuple[PullPart, ...]:
        workers = engine.workers.values()
        return tuple(PullPart(one.peer, tuple(one.hello.regions), one.share) for one in workers)

    patch.setattr(Engine, "parts", planted)


def shift_heads(patch: pytest.MonkeyPatch) -> None:
    """What a rank has of a block is put where the next rank's is."""
    parts = Engine.parts

    def planted(engine: Engine) -> tuple[PullPart, ...]:
        found = parts(engine)
        return tuple(
            replace(one, share=other.share)
            for one, other in zip(found, (*found[1:], found[0]), strict=True)
        )

    patch.setattr(Engine, "parts", planted)


DAWDLING = {
    **ONE_HOST, "dawdles": 0.8, "lease_ms": 800, "host_slots": 12, "verified": False, "faults": (),
}  # fmt: skip
DUPLICATED = {
    **ONE_HOST, "duplicates": 1.0, "stalls": 0.05, "confirm_ms": 50, "faults": (),
    "device_blocks": 16, "host_slots": 60, "delay_ms": 20.0, "conversations": 12, "loss": 0.0,
}  # fmt: skip
TWO_RANKS = {
    **ONE_HOST, "cut": RANKS, "verified": True, "faults": ("rot arena",), "fault_every_ms": 300.0,
}  # fmt: skip

MANY_SHAPES = {**TWO_RANKS, "cut": MIXED}
SAME_RANKS = {**ONE_HOST, "cut": REPLICAS}

PLANTS = (
    Plant("a deadline counts from take", count_the_deadline_from_take, WRONG_BYTES, DAWDLING),
    Plant("a duplicate offer is pulled", pull_a_duplicate_offer, WRONG_BYTES, DUPLICATED),
    Plant("a hit is taken for computed", take_hits_for_computed, WRONG_BYTES, VLLM),
    Plant("what is in flight is offered", offer_what_is_in_flight, WRONG_BYTES, VLLM),
    Plant("a rank does not verify", verify_on_the_first_rank_only, WRONG_BYTES, TWO_RANKS),
    Plant("a part is not compared", leave_a_part_out, WRONG_BYTES, MANY_SHAPES),
    Plant("replicas are pulled", pull_replicas_too, "is pulled from", SAME_RANKS),
    Plant("heads are shifted", shift_heads, f"{WRONG_BYTES}|wrong checksum", MANY_SHAPES),
)
