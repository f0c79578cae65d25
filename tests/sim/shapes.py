"""Shapes of the engines of a world: how its blocks are cut, and which parts each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.parts import ONE_PART, Grid, Share, share_of_rank

Shares = tuple[Share, ...]
"""Of the ranks of one engine."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A grid that all blocks of a world are cut by, and shapes that its engines can have."""

    name: str
    grid: Grid
    shapes: tuple[Shares, ...]
    is_said: bool = True
    """Ranks say what they hold; otherwise it follows from their number."""

    def shape(self, engine: int) -> Shares:
        """Return the shape of an engine by its number in the world."""
        return self.shapes[engine % len(self.shapes)]

    @property
    def is_mixed(self) -> bool:
        """Return whether engines of several shapes share blocks."""
        return len(self.shapes) > 1


def shape(grid: Grid, *, stages: int = 1, ranks: int = 1, replicas: int = 1) -> Shares:
    """Return the shares of pipeline stages of so many tensor-parallel ranks, each `replicas`
    times."""
    ranges, heads = grid.ranges // stages, grid.heads // ranks
    return tuple(
        Share(grid, stage * ranges, (stage + 1) * ranges, rank * heads, (rank + 1) * heads, replica)
        for stage in range(stages)
        for rank in range(ranks)
        for replica in range(replicas)
    )


BY_LAYERS_AND_HEADS = Grid(ranges=2, layers=2, heads=2)
HEADS = Grid(heads=2)
WHOLE = Cut("whole", ONE_PART, (shape(ONE_PART),), is_said=False)
RANKS = Cut("ranks", HEADS, (tuple(share_of_rank(rank, 2) for rank in range(2)),), is_said=False)
MIXED = Cut(
    "mixed",
    BY_LAYERS_AND_HEADS,
    (
        shape(BY_LAYERS_AND_HEADS, ranks=2),
        shape(BY_LAYERS_AND_HEADS),
        shape(BY_LAYERS_AND_HEADS, stages=2),
        shape(BY_LAYERS_AND_HEADS, stages=2, ranks=2),
    ),
)
REPLICAS = Cut(
    "replicas", HEADS, (shape(HEADS, ranks=2, replicas=2), shape(HEADS), shape(HEADS, replicas=2))
)
CUTS = (RANKS, MIXED, MIXED, REPLICAS)
