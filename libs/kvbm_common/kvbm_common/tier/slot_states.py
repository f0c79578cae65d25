"""The states of a slot: the drawing and its table.

A slot is a place for one block. It is always in exactly one state:

    RESET --stage--> STAGED --register--> INACTIVE --pin----> ACTIVE
    ^ ^ |              |                   | ^  |              |
    | | retire         |                   | +--+---unpin------+
    | | v              |                   |
    | | RETIRED        |                   |
    | |   |            |                   |
    | +-revive         |                   |
    +-------abort------+-------evict-------+

STAGED    bytes are on their way in; no lookup finds the block
INACTIVE  committed, can be found, can be evicted
ACTIVE    committed and pinned by at least one lease; cannot be evicted
RETIRED   empty and not to be used: an operator has made the tier smaller than its medium

A committed block found to be wrong is *discarded*: its name is gone at once, so that no lookup
finds it again, and its slot goes to RESET as soon as its last pin is gone. `generation` counts the
times a slot was staged: who remembers a slot remembers its generation too, and can tell that it is
another block's by now.

A staged slot that late bytes may still reach is *abandoned*: its name is free again, the slot stays
STAGED until its owner knows that nothing comes any more, and aborts it.

Correspondence: STAGED is KVBM's Mutable/Staged and vLLM's "not ready"; INACTIVE is KVBM's Inactive
and `ref_cnt == 0`; ACTIVE is KVBM's Primary and `ref_cnt > 0`.
"""

from __future__ import annotations

from enum import Enum

from kvbm_common.tier.machine import Machine


class SlotState(Enum):
    """The states of the drawing above."""

    RESET = "reset"
    STAGED = "staged"
    INACTIVE = "inactive"
    ACTIVE = "active"
    RETIRED = "retired"

    __hash__ = object.__hash__  # Enum's own is written in Python, and every move hashes a state.


SLOT = Machine(
    "slot",
    {
        (SlotState.RESET, "stage"): SlotState.STAGED,
        (SlotState.STAGED, "register"): SlotState.INACTIVE,
        (SlotState.STAGED, "abort"): SlotState.RESET,
        (SlotState.INACTIVE, "pin"): SlotState.ACTIVE,
        (SlotState.ACTIVE, "unpin"): SlotState.INACTIVE,
        (SlotState.INACTIVE, "evict"): SlotState.RESET,
        (SlotState.RESET, "retire"): SlotState.RETIRED,
        (SlotState.RETIRED, "revive"): SlotState.RESET,
    },
)

MOVES = {
    verb: (state, target)
    for (state, verb), target in SLOT.transitions.items()
    if target is not None
}
"""Verb → the state that a slot has to be in, and its next one."""
assert len(MOVES) == len(SLOT.transitions), "a verb moves slots from one state only"
