"""What tiers count during a run: what they had counted before it is not of the run."""

from __future__ import annotations

from typing import Any, cast

from kvbm_cli.demo.check import StackView
from kvbm_cli.demo.figures import (
    Misses,
    TierFigures,
    misses_of,
    misses_of_engines,
    misses_of_tiers,
)
from kvbm_common.wire.explain import Explanation, Segment


def test_a_run_counts_what_came_after_its_beginning() -> None:
    before = TierFigures({"host-tier": {"a": 7.0, "b": 1.0}})
    now = TierFigures(
        {"host-tier": {"a": 9.0, "b": 1.0, "c": 3.0}, "disk-tier": {"d": 2.0}},
    )
    run = now.since(before)
    assert run.of("host-tier") == {"a": 2.0, "b": 0.0, "c": 3.0}
    assert run.of("disk-tier") == {"d": 2.0}
    assert run.of("object-tier") == {}


def test_a_tier_that_was_started_again_counts_nothing_below_zero() -> None:
    run = TierFigures({"host-tier": {"a": 2.0}}).since(TierFigures({"host-tier": {"a": 7.0}}))
    assert run.of("host-tier") == {"a": 0.0}


def test_misses_of_tiers_are_those_of_all_engines() -> None:
    host = {"missed_blocks.evicted": 2.0, "lookup_blocks.miss": 3.0, "leases": 9.0}
    assert misses_of_tiers(TierFigures({"host-tier": host})) == Misses(3, {"evicted": 2})
    assert misses_of_tiers(TierFigures({})) == Misses(0, {})


def lookup(engine: str, *segments: tuple[int, str]) -> Explanation:
    """Return a lookup: blocks and why they were missed, "": they were found."""
    return Explanation(
        request="r", engine=engine, ts_ms=1, blocks=sum(blocks for blocks, _ in segments),
        hit_blocks=sum(blocks for blocks, reason in segments if not reason),
        reason="", segments=[Segment(blocks=blocks, reason=why) for blocks, why in segments],
    )  # fmt: skip


def test_misses_of_lookups_are_their_segments() -> None:
    one = lookup("sim-0", (4, ""), (2, "evicted"), (1, "behind"))
    two = lookup("sim-0", (3, "evicted"))
    assert misses_of([one, two]) == Misses(6, {"evicted": 5, "behind": 1})


async def test_an_attached_run_asks_for_the_lookups_of_its_own_engines_alone() -> None:
    """Two host tiers have kept lookups of two engines; one engine is ours."""
    kept = [lookup("sim-0", (2, "evicted")), lookup("another", (7, "filtered"))]

    class View:
        """Two host tiers, as the registry lists them."""

        async def instances(self, *kinds: str) -> list[tuple[str, str]]:
            assert kinds == ("host-tier",)
            return [("host-tier", "0"), ("host-tier", "1")]

        async def explanations(self, kind: str, instance: str, engine: str) -> list[Explanation]:
            return [one for one in kept if one.engine == engine]

    found = await misses_of_engines(cast("StackView", cast("Any", View())), ["sim-0"])
    assert found == Misses(4, {"evicted": 4})
