"""What the leader tells the workers of all ranks, once a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromisedLoad:
    """Copy promised slot `slots[i]` into device block `blocks[i]`, before this step computes."""

    request: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`number` grows from step to step: TensorRT-LLM leaves a plan bound until the next one comes,
    and a plan that was carried out twice would write into somebody else's blocks."""

    number: int
    slot_bytes: int = 0
    loads: tuple[PromisedLoad, ...] = ()
    offering: bool = False
    """The host tier may be reading device blocks."""
