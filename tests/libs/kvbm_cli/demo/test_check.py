"""The checks at the end of a run: what is left over, and views that differ, are found."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
from kvbm_cli.demo import check
from kvbm_cli.demo.check import StackView, Verdict, check_stack
from kvbm_common.config.settings import Settings
from kvbm_common.errors import NoResponder
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import EVENTS
from kvbm_common.wire.events import Cleared, Run, event_codec, event_subject
from kvbm_common.wire.index_verbs import HolderDump
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, StatsReply
from kvbm_connectors.sim.control import EngineConfig, Stats
from kvbm_connectors.sim.driver import EngineHandle

from tests.connectors.helpers import name

HELD = {"host-tier-0": {1, 2}, "disk-tier-0": {2}, "disk-tier-0-1": {4}, "sim-0": {3}}


class View:
    """A stack at rest, of which each part can be made to say something else."""

    is_shared = False

    def __init__(self) -> None:
        self.indexed = {source: set(held) for source, held in HELD.items()}
        self.leases: dict[str, int] = {}
        self.staged: dict[str, int] = {}
        self.figures: dict[str, float] = {}
        self.index_is_away = False
        self.reasons: list[str] = []
        """Why the second disk tier is not ready."""
        self.lost_tiers: list[str] = []
        self.stats_until_it_leaves: int | None = None
        """How often the second disk tier says its stats before it leaves."""

    async def lost(self) -> list[str]:
        return self.lost_tiers

    async def instances(self, *kinds: str) -> list[tuple[str, str]]:
        every = [("host-tier", "0"), ("disk-tier", "0"), ("disk-tier", "0-1")]
        if self.stats_until_it_leaves == -1:
            every.pop()
        return [(kind, instance) for kind, instance in every if kind in kinds]

    def _leave(self) -> None:
        """Have the second disk tier leave: it is still listed until it was asked once more."""
        if self.stats_until_it_leaves == 0:
            self.stats_until_it_leaves = -1
            self.indexed.pop("disk-tier-0-1", None)
        if self.stats_until_it_leaves == -1:
            raise NoResponder("no service answers on kvbm.v1.disk-tier.h.0-1.stats")
        if self.stats_until_it_leaves is not None:
            self.stats_until_it_leaves -= 1

    async def stats(self, kind: str, instance: str = "0") -> StatsReply:
        if instance == "0-1":
            self._leave()
        return StatsReply(
            kind=kind, host="h", instance=instance, epoch=1,
            ready=not (self.reasons and instance == "0-1"),
            reasons=self.reasons if instance == "0-1" else [],
            leases=self.leases.get(kind, 0),
            slots={"staged": self.staged.get(kind, 0)}, figures=self.figures,
        )  # fmt: skip

    async def snapshot(self, kind: str, instance: str) -> SnapshotReply:
        if instance == "0-1":
            self._leave()
        source = f"{kind}-{instance}"
        run = Run(parent="0" * 32, hashes=[name(number).hex() for number in HELD[source]])
        tier = cast("Any", kind.split("-")[0])
        return SnapshotReply(
            host="h", source=source, tier=tier, epoch=1, seq=1,
            parts=[SnapshotPart(namespace="0" * 64, runs=[run])],
        )  # fmt: skip

    async def dump(self) -> list[HolderDump]:
        if self.index_is_away:
            raise NoResponder("nobody serves the index")
        return [
            HolderDump(host="h", source=source, tier="host", epoch=1, seq=1,
                       hashes=[name(number).hex() for number in sorted(held)])
            for source, held in self.indexed.items()
        ]  # fmt: skip


class Engine:
    """An engine that is idle."""

    config = EngineConfig(
        name="sim-0", directory="", host_tier_endpoint="", consolidator_endpoint=""
    )
    idle = True

    async def stats(self) -> Stats:
        return Stats(idle=self.idle, counts={}, load_seconds=0.0, load_bytes=0)

    async def dump(self) -> set[SequenceHash]:
        return {name(number) for number in HELD["sim-0"]}


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> View:
    """A view, and little patience."""
    monkeypatch.setattr(check, "wait_until", partial(check.wait_until, deadline_s=0.1))
    return View()


async def verdict_of(view: View, *, idle: bool = True) -> Verdict:
    engine = Engine()
    engine.idle = idle
    engines = [cast("EngineHandle", engine)]
    return await check_stack(cast("StackView", view), engines, with_disk=True)


async def test_a_stack_at_rest_is_consistent(view: View) -> None:
    verdict = await verdict_of(view)
    assert verdict == Verdict(leases_left=0, staged_left=0, differences=[])
    assert verdict.views_consistent


@pytest.mark.parametrize("answers", [0, 1, 2])
async def test_a_tier_that_leaves_while_it_is_asked_is_no_trouble(view: View, answers: int) -> None:
    """Goal: scaling down beside a run fails no run, whichever question meets the leaving tier."""
    view.stats_until_it_leaves = answers
    assert await verdict_of(view) == Verdict()
    assert view.stats_until_it_leaves == -1, "it has left"


async def test_a_tier_that_is_gone_without_a_word_is_a_trouble(view: View) -> None:
    view.lost_tiers = ["disk-tier-0"]
    assert (await verdict_of(view)).troubles == ["disk-tier-0 is gone, and has not said why"]


@pytest.mark.parametrize(
    ("reasons", "lost"),
    [(["start", "stop"], []), (["start"], ["disk-tier-0"]), ([], ["disk-tier-0"])],
)
async def test_a_tier_that_stops_says_so_in_its_last_event(
    bus: Bus, reasons: list[str], lost: list[str]
) -> None:
    """Goal: a crash in the run is told from scaling down, on the stream that all tiers write to."""
    await ensure_stream(bus, EVENTS)
    for seq, reason in enumerate(reasons, 1):
        event = Cleared(host="h", source="disk-tier-0", tier="disk", epoch=1, seq=seq, ts_ms=0,
                        reason=reason)  # fmt: skip
        await publish_acknowledged(bus, EVENTS, event_subject(event), event_codec.encode(event))
    there = [("host-tier", "0"), ("disk-tier", "0")]

    async def list_tiers() -> list[tuple[str, str]]:
        return list(there)

    stack = StackView(bus, Settings.load({}, {"host": "h"}), list_tiers=list_tiers)
    assert await stack.lost() == []
    await stack.instances("host-tier")
    there.pop()
    assert await stack.lost() == lost


async def test_a_pin_is_no_lease_that_was_left(view: View) -> None:
    view.leases = {"host-tier": 2, "disk-tier": 2}
    view.figures = {"pins": 2.0}
    assert (await verdict_of(view)).leases_left == 0
    view.leases = {"host-tier": 3, "disk-tier": 2}
    assert (await verdict_of(view)).leases_left == 1


@pytest.mark.parametrize("source", HELD)
async def test_a_block_too_many_or_too_few_in_the_index_is_found(view: View, source: str) -> None:
    """Of either tier, or of an engine."""
    for indexed in (HELD[source] | {9}, HELD[source] - {min(HELD[source])}):
        view.indexed[source] = indexed
        verdict = await verdict_of(view)
        assert not verdict.views_consistent
        [difference] = verdict.differences
        assert difference.startswith(source)


async def test_a_source_that_nobody_is_may_hold_nothing(view: View) -> None:
    view.indexed["host-tier-9"] = set()
    assert (await verdict_of(view)).views_consistent
    view.indexed["host-tier-9"] = {1}
    assert not (await verdict_of(view)).views_consistent


async def test_leases_and_staged_slots_are_counted(view: View) -> None:
    view.leases = {"host-tier": 2, "disk-tier": 1}
    view.staged = {"disk-tier": 3}
    verdict = await verdict_of(view)
    assert (verdict.leases_left, verdict.staged_left) == (2 + 2 * 1, 2 * 3), "of both disk tiers"


@pytest.mark.parametrize("figure", ["offers", "lookups_waiting", "writes", "reads"])
async def test_a_stack_that_does_not_come_to_rest_is_told(view: View, figure: str) -> None:
    """Even when the views agree by chance."""
    view.figures = {figure: 1.0}
    verdict = await verdict_of(view)
    assert not verdict.views_consistent
    assert "not quiet" in verdict.differences[0]


async def test_an_engine_that_does_not_come_to_rest_is_told(view: View) -> None:
    assert not (await verdict_of(view, idle=False)).views_consistent


async def test_an_index_that_does_not_answer_agrees_with_nobody(view: View) -> None:
    view.index_is_away = True
    verdict = await verdict_of(view)
    assert not verdict.views_consistent
    assert "nobody serves the index" in verdict.differences[0]


async def test_a_tier_that_is_not_ready_is_named_with_its_reason(view: View) -> None:
    view.reasons = ["the disk takes no blocks: no space"]
    verdict = await verdict_of(view)
    assert verdict.troubles == ["disk-tier-0-1: the disk takes no blocks: no space"]
