"""State machines as tables: a state and an event give the next state, or a broken invariant.

A machine is declared once, beside the enum of its states. None stands for "not there":

    OFFER = Machine("offer", {
        (None, "offered"): Phase.PULLING,
        (Phase.PULLING, "all batches in"): Phase.CONFIRMING,
        (Phase.CONFIRMING, "held"): None,
    })

The owner has one `_move`, the only place that writes the state. The tables are the source of the
drawings in `docs/state_machines.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class InvalidTransition(AssertionError):
    """An event that the state of a thing has no transition for: a mistake of this program."""


class Machine(Generic[State]):
    """The transitions of one kind of thing, by its state (None: not there) and the event."""

    def __init__(
        self, name: str, transitions: Mapping[tuple[State | None, str], State | None]
    ) -> None:
        assert name, "a machine has a name, for its drawing and its refusals"
        assert transitions, f"{name} never moves"
        left = {state for state, _ in transitions if state is not None}
        unreached = left - set(transitions.values()) - {next(iter(transitions))[0]}
        assert not unreached, f"{name}: no event leads to {unreached}"
        self.name = name
        self.transitions = dict(transitions)

    def next(self, state: State | None, event: str, story: str = "") -> State:
        """Return the state after `event`; raises InvalidTransition with the thing's story."""
        found = self.transitions.get((state, event))
        if found is None:
            raise InvalidTransition(self.refusal(state, event, story))
        return found

    def end(self, state: State, event: str, story: str = "") -> None:
        """Require that `event` ends a thing in `state`; raises InvalidTransition."""
        if self.transitions.get((state, event), state) is not None:
            raise InvalidTransition(self.refusal(state, event, story))

    def ends(self, state: State, event: str) -> bool:
        """Tell whether `event` ends a thing in `state`."""
        return self.transitions.get((state, event), state) is None

    def has(self, state: State | None, event: str) -> bool:
        """Tell whether `event` may happen in `state`."""
        return (state, event) in self.transitions

    def refusal(self, state: State | None, event: str, story: str = "") -> str:
        """Return the message of an InvalidTransition."""
        known = sorted(known for at, known in self.transitions if at is state)
        text = f"{self.name}: no {event!r} in {label(state)}, only {', '.join(known)}"
        return f"{text}: {story}" if story else text


def label(state: Enum | None) -> str:
    """Return the name of a state, as in a drawing; None is the dot."""
    return "[*]" if state is None else state.name
