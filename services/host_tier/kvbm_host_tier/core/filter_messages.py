"""Messages about the miss filter: the core's effects, and the inputs that report on them."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeFilter:
    """Begin a filter beside the one in use, without names."""

    generation: int
    """Counts the filters of this life."""
    capacity: int


@dataclass(frozen=True, slots=True)
class NamesChanged:
    """Write into the filter what came, and then what left."""

    came: tuple[SequenceHash, ...]
    left: tuple[SequenceHash, ...]
    is_new: bool = False
    """Into the one that is being made."""


@dataclass(frozen=True, slots=True)
class UseFilter:
    """End the filter in use, and take the one that was made; it is not complete yet."""


@dataclass(frozen=True, slots=True)
class SwitchFilter:
    """Say whether a name that is not in the filter cannot be found."""

    is_complete: bool


FilterEffect = MakeFilter | NamesChanged | UseFilter | SwitchFilter


# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilterFailed:
    """A filter could not be made: what was written into it has gone nowhere."""

    generation: int
