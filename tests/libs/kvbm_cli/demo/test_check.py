"""The checks at the end of a run: what is left over, and views that differ, are found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
from kvbm_cli.demo import check
from kvbm_cli.demo.check import StackView, Verdict, check_stack
from kvbm_cli.demo.findings import RESTS_MIN, Findings, Leftovers
from kvbm_common.config.settings import Settings
from kvbm_common.errors import NoResponder
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import EVENTS
from kvbm_common.wire.events import Cleared, Run, event_codec, event_subject
from kvbm_common.wire.index_verbs import HolderDump
from kvbm_common.wire.tier_stats import WorkerStats
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
        self.workers: list[WorkerStats] = []
        self.dumps: Iterator[dict[str, set[int]]] = itertools.repeat({})
        """What else the index has of sources, dump by dump."""
        self.looks: Iterator[dict[str, int]] = itertools.repeat({})
        """The slots that are staged in each tier beside `staged`, by kind, answer by answer."""

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
            slots={"staged": self.staged.get(kind, 0) + next(self.looks).get(kind, 0)},
            figures=self.figures, workers=self.workers if kind == "host-tier" else [],
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
        others = next(self.dumps)
        return [
            HolderDump(host="h", source=source, tier="host", epoch=1, seq=1,
                       hashes=[name(number).hex() for number in sorted(
                           held ^ others.get(source, set()))])
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
    monkeypatch.setattr(check, "POLL_S", 0.01)
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


# --- a stack that others use, too -----------------------------------------------------------------


@pytest.fixture
def shared(view: View) -> View:
    """A stack whose tiers are never at rest: others offer, look up and write all the time."""
    view.is_shared = True
    view.figures = {"offers": 1.0, "lookups_waiting": 1.0, "writes": 1.0, "reads": 1.0}
    return view


async def test_what_others_store_and_remove_between_two_looks_is_no_difference(
    shared: View,
) -> None:
    """In the first dump of the index blocks are too many and too few."""
    first = {source: {2, 20} for source in ("host-tier-0", "disk-tier-0", "sim-0")}
    shared.dumps = itertools.chain([first], itertools.repeat({}))
    assert await verdict_of(shared) == Verdict()


async def test_a_difference_need_not_end_for_all_blocks_in_one_look(shared: View) -> None:
    """There is no look without a difference, and no block that differs in two."""
    shared.dumps = ({"host-tier-0": {20 + look}} for look in itertools.count())
    assert await verdict_of(shared) == Verdict()


@pytest.mark.parametrize("source", HELD)
@pytest.mark.parametrize("planted", ["unknown", "gone"])
async def test_a_block_that_differs_in_every_look_is_found_beside_others(
    shared: View, source: str, planted: str
) -> None:
    held = HELD[source]
    shared.indexed[source] = held | {9} if planted == "gone" else held - {min(held)}
    shared.dumps = ({source: {20 + look}} for look in itertools.count())
    [difference] = (await verdict_of(shared)).differences
    assert difference.startswith(source)
    assert f"{int(planted == 'unknown')} unknown to it, {int(planted == 'gone')} gone" in difference
    assert difference.endswith("in every look")


async def test_leases_of_others_are_not_counted(shared: View) -> None:
    shared.leases = {"host-tier": 7}
    shared.figures |= {"engine_leases.sim-0": 0.0, "engine_leases.other": 7.0}
    assert await verdict_of(shared) == Verdict()


async def test_a_lease_of_an_own_engine_is_found_beside_others(shared: View) -> None:
    shared.leases = {"host-tier": 8}
    shared.figures |= {"engine_leases.sim-0": 1.0, "engine_leases.other": 7.0}
    assert await verdict_of(shared) == Verdict(leases_left=3), "each tier says the same"


async def test_slots_that_are_staged_for_others_are_not_counted(shared: View) -> None:
    """They end between two looks, or cannot be told from those of work under way."""
    shared.staged = {"host-tier": 1}
    assert await verdict_of(shared) == Verdict()
    shared.staged, shared.figures = {}, {}
    shared.looks = itertools.chain([{"host-tier": 3, "disk-tier": 3}] * 6, itertools.repeat({}))
    assert await verdict_of(shared) == Verdict()


async def test_a_slot_that_stays_staged_while_a_tier_is_at_rest_is_found(shared: View) -> None:
    shared.staged, shared.figures = {"host-tier": 1}, {}
    shared.looks = ({"host-tier": look % 2} for look in itertools.count())
    assert (await verdict_of(shared)).staged_left == 1


def test_one_look_at_rest_proves_nothing_of_slots_that_others_stage() -> None:
    """Pulls from peers are in no figure of work: a look may see them, and no other work."""
    findings = Findings(lasting=True)
    for rests in (0, 1, 0, 0):
        findings.take_leftovers({"host-tier-0": Leftovers(0, 4, rests)})
    assert findings.staged_left == 0
    for _ in range(RESTS_MIN):
        findings.take_leftovers({"host-tier-0": Leftovers(0, 3, 1)})
    assert findings.staged_left == 3


@pytest.mark.parametrize("staged", [0, 1])
async def test_a_look_that_fails_is_told_whatever_others_have_staged(
    shared: View, monkeypatch: pytest.MonkeyPatch, staged: int
) -> None:
    """Slots that are staged for others count as none, so nothing else would tell of it."""

    async def lost() -> list[str]:
        raise NoResponder("the stream of events does not answer")

    monkeypatch.setattr(shared, "lost", lost)
    shared.staged = {"host-tier": staged}
    [unrest] = (await verdict_of(shared)).differences
    assert "the stream of events does not answer" in unrest


async def test_a_difference_is_told_beside_an_index_that_answers_no_more(
    shared: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look had no answer: it could have been the one without a difference."""
    shared.indexed["disk-tier-0"].add(9)
    dump, dumps = shared.dump, itertools.count()

    async def dump_once() -> list[HolderDump]:
        shared.index_is_away = next(dumps) > 0
        return await dump()

    monkeypatch.setattr(shared, "dump", dump_once)
    unrest, difference = (await verdict_of(shared)).differences
    assert "nobody serves the index" in unrest
    assert difference.startswith("disk-tier-0")


async def test_leases_of_a_disk_tier_are_not_counted_beside_others(shared: View) -> None:
    """It has some for operators' pins alone."""
    shared.leases = {"disk-tier": 5}
    shared.figures |= {"engine_leases.sim-0": 0.0}
    assert await verdict_of(shared) == Verdict()


async def test_an_own_engine_that_does_not_come_to_rest_is_told_beside_others(
    shared: View,
) -> None:
    assert "not quiet" in (await verdict_of(shared, idle=False)).differences[0]
