"""What the leader tells the workers of all ranks, once a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromisedLoad:
    """Copy promised slot `slots[i]` into device block `blocks[i]`, before this step computes.

    `checksums[i]` has that of each rank's part, in the order of the ranks.
    """

    request: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    checksums: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PromisePlan:
    """`number` grows from step to step: TensorRT-LLM leaves a plan bound until the next one comes,
    and a plan that was carried out twice would write into another request's blocks."""

    number: int
    slot_bytes: int = 0
    loads: tuple[PromisedLoad, ...] = ()
    offering: bool = False
    """The host tier may be reading device blocks."""
