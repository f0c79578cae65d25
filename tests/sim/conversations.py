"""What users say: turns of conversations, so that requests share prefixes."""

from __future__ import annotations

import random

from tests.sim.world import World


class Conversations:
    """The prompts of one engine's users."""

    def __init__(self, world: World, tokens_max: int) -> None:
        self._world, self._tokens_max = world, tokens_max
        self._open: list[list[int]] = [[0]]

    def next(self, grows_by: int = 6) -> list[int]:
        """Return what a user says: as before, the next turn, or another turn from some point on."""
        rng = self._world.rng
        index = rng.randrange(len(self._open))
        tokens, says = self._open[index], [say(rng) for _ in range(rng.randint(1, grows_by))]
        roll = rng.random()
        if len(tokens) < 2 or roll < 0.3:
            tokens = (tokens + says)[: self._tokens_max]
            self._open[index] = tokens
        elif roll < 0.45:
            tokens = (tokens[: rng.randint(1, len(tokens))] + says)[: self._tokens_max]
            self._begin(tokens)
        return tokens

    def _begin(self, tokens: list[int]) -> None:
        """Open another conversation; beyond the plan's number it takes the place of one."""
        if len(self._open) < self._world.plan.conversations:
            self._open.append(tokens)
        else:
            self._open[self._world.rng.randrange(len(self._open))] = tokens


def say(rng: random.Random) -> int:
    """Return a token: often one that others have said, too."""
    return rng.randint(0, 3 if rng.random() < 0.5 else 10**6)
