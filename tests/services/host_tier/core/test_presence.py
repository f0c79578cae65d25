"""Plans over KV groups: which blocks they count on, and how far they reach where slots are short.

A block has four tokens. The full group's blocks are 1, 2, 3, …; those of the group with a window of
two blocks are 101, 102, 103, …
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.tier.kv_groups import GroupRun, has_each, needed_names, reach, split
from kvbm_common.wire.local import Found
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.messages import AskFill, Effect, LowerTierEvent, StartPull
from kvbm_host_tier.core.presence import Available

from tests.services.host_tier.helpers import Host, asked, name, of, on_disk

OTHER = Namespace(model="other", block_tokens=4)


def look_up(host: Host, blocks: int) -> list[Effect]:
    """Ask for the first blocks of both groups."""
    wanted = [*range(1, blocks + 1), *range(101, blocks + 101)]
    return host.look_up(*wanted, groups=[GroupRun(4, blocks), GroupRun(4, blocks, 2)])


def filled(host: Host, effects: list[Effect]) -> tuple[int, list[Effect]]:
    """How many blocks a lookup asks for, and the effects when all have come."""
    fills = of(effects, AskFill)
    for fill in fills:
        effects = effects + host.filled(fill)
    return sum(len(asked(fill)) for fill in fills), effects


@pytest.mark.parametrize(
    ("slots", "blocks", "boundary"), [(42, 42, 160), (41, 41, 156), (30, 30, 112), (4, 4, 8),
                                      (3, 2, 4), (1, 0, 0)]
)  # fmt: skip
def test_a_plan_reaches_as_far_as_there_are_slots(slots: int, blocks: int, boundary: int) -> None:
    """Goal: blocks are brought that make a hit, and not most of one that no slot is left for.

    1. Forty blocks of both groups are on disk: a hit of all needs 42. 2. Of a window of two blocks
    a hit needs both, but for the first block. 3. The same lookup finds as much again.
    """
    host = Host(slots=slots, batch_blocks_max=1_000)
    host.disk_stored(*range(1, 41))
    host.disk_stored(*range(101, 141))
    count, effects = filled(host, look_up(host, 40))
    found = host.found(effects)
    assert (count, found.boundary, len(found.slots)) == (blocks, boundary, blocks)
    assert found.reason == ("" if boundary == 160 else "no_room")
    if found.lease:
        host.release(found.lease)
    again = host.found(look_up(host, 40))
    assert (again.boundary, len(again.slots)) == (boundary, blocks)
    host.core.check()


@pytest.mark.parametrize(
    ("windows", "blocks", "slots", "fitting"),
    [(1, 2_000, 1_000, 996), (2, 2_000, 1_000, 992), (5, 200, 150, 130), (6, 2_000, 1_000, 976)],
)
def test_a_plan_over_many_groups_reaches_as_far_as_there_are_slots(
    windows: int, blocks: int, slots: int, fitting: int
) -> None:
    """Full attention beside windows of four blocks, all on disk: windows take as many slots at each
    boundary, and what is left is for the prefix."""
    host, wanted = Host(slots=slots, batch_blocks_max=10_000), list[int]()
    for group in range(windows + 1):
        names = range(100_000 * (group + 1), 100_000 * (group + 1) + blocks)
        host.disk_stored(*names)
        wanted += names
    groups = [GroupRun(4, blocks), *[GroupRun(4, blocks, 4)] * windows]
    count, effects = filled(host, host.look_up(*wanted, groups=groups))
    found = host.found(effects)
    assert (found.boundary, found.reason) == (4 * fitting, "no_room")
    assert count == len(found.slots) == fitting + 4 * windows
    assert host.core.view.counts["dropped.fill_no_room"] == blocks - fitting


def test_a_shorter_plan_waits_for_blocks_that_are_on_their_way() -> None:
    """1. A lookup has blocks 1 and 101 brought, into two of four slots. 2. Another one would need
    four more: it has two brought, and waits for the other's. 3. Both are answered when all have
    come."""
    host = Host(slots=4, batch_blocks_max=1_000)
    host.disk_stored(1, 2, 3)
    host.disk_stored(101, 102, 103)
    [first] = of(look_up(host, 1), AskFill)
    [second] = of(look_up(host, 3), AskFill)
    assert (asked(first), asked(second)) == ([1, 101], [2, 102])
    assert of(host.told(host.filled(second)), Found) == []
    founds = of(host.told(host.filled(first)), Found)
    assert [(one.boundary, one.reason) for one in founds] == [(4, ""), (8, "no_room")]


def test_a_shorter_plan_that_takes_no_slot_waits_as_well() -> None:
    """1. Full blocks 1, 2 and 3 are here, and 101 is on its way: no slot is left. 2. A hit of all
    would need two more; that of 1 and 101 waits, although it is shorter than what is here."""
    host = Host(slots=4, batch_blocks_max=1_000)
    host.store(1, 2, 3)
    host.disk_stored(101, 102, 103)
    groups = [GroupRun(4, 1), GroupRun(4, 1, 2)]
    [fill] = of(host.look_up(1, 101, groups=groups), AskFill)
    pinned = host.found(host.look_up(2, 3))
    assert of(host.told(look_up(host, 3)), Found) == []
    founds = of(host.told(host.filled(fill)), Found)
    assert [(one.boundary, one.reason) for one in founds] == [(4, ""), (4, "no_room")]
    assert len(pinned.slots) == 2


def test_a_plan_waits_for_blocks_that_the_disk_has_lost_since_they_were_asked_for() -> None:
    host = Host(slots=8, batch_blocks_max=1_000)
    host.disk_stored(1)
    host.disk_stored(101)
    [fill] = of(look_up(host, 1), AskFill)
    host.disk_removed(1, 101)
    assert of(host.told(look_up(host, 1)), Found) == []
    founds = of(host.told(host.filled(fill)), Found)
    assert [one.boundary for one in founds] == [4, 4]


def test_a_plan_does_not_count_on_a_block_that_an_engine_is_just_storing() -> None:
    """Everything is on disk, and block 3 is also offered again: it has a slot, without bytes yet.

    A hit of eight tokens comes from disk; one of twelve could not be had whole.
    """
    host = Host(slots=16, batch_blocks_max=1_000)
    host.disk_stored(1, 2, 3)
    host.disk_stored(101, 102, 103)
    assert of(host.offer(3, offer=70), StartPull)
    count, effects = filled(host, look_up(host, 3))
    assert (count, host.found(effects).boundary) == (4, 8)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_plan_counts_on_no_block_of_another_namespace(*, is_here: bool) -> None:
    """Window block 103 is bob's, here or on disk: ada's hit ends before it."""
    host = Host(slots=16, batch_blocks_max=1_000)
    host.attach(engine="bob", namespace=OTHER)
    host.disk_stored(1, 2, 3)
    host.disk_stored(101, 102)
    if is_here:
        host.store_for(103, engine="bob", namespace=OTHER)
    of_bob = msgspec.structs.replace(on_disk(103), namespace=OTHER.digest)
    for event in host.disk.stored([of_bob]) if not is_here else ():
        host.step(LowerTierEvent("0", event))
    count, effects = filled(host, look_up(host, 3))
    found = host.found(effects)
    assert (count, found.boundary, len(found.slots)) == (4, 8, 4)


@st.composite
def shortages(draw: st.DrawFn) -> tuple[list[GroupRun], set[SequenceHash], set[SequenceHash], int]:
    """Groups, the blocks that are here, those that may come as well, and slots."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([1, 2, 3]))
        rule = draw(st.sampled_from(["all", "window", "chunk"]))
        groups.append(GroupRun(
            size, 12 // size, draw(st.integers(1, 4)) if rule == "window" else 0,
            draw(st.sampled_from([2, 4, 8])) if rule == "chunk" else 0,
        ))  # fmt: skip
    count = sum(one.blocks for one in groups)
    chances = draw(st.sampled_from(["hcccx", "hhhhc", "hhhhx"]))
    where = draw(st.lists(st.sampled_from(chances), min_size=count, max_size=count))
    here = {name(at) for at, one in enumerate(where) if one == "h"}
    comes = here | {name(at) for at, one in enumerate(where) if one == "c"}
    return groups, here, comes, draw(st.integers(0, count))


@given(shortages())
def test_a_plan_reaches_as_far_as_its_blocks_may_come(
    shortage: tuple[list[GroupRun], set[SequenceHash], set[SequenceHash], int],
) -> None:
    """Goal: as far as with what may come from the beginning; a shorter hit that is here is kept."""
    groups, here, comes, _ = shortage
    names = [name(at) for at in range(sum(one.blocks for one in groups))]
    plan, cut = GroupPlan.of(groups, names), split(groups, names)
    known = Available(
        has_each(here.__contains__), has_each(comes.__contains__), has_each(here.__contains__)
    )
    kept = plan.choose(known)
    assert plan.reach == reach(groups, cut, known.may_come)
    tokens = reach(groups, cut, known.here).tokens
    assert kept == (needed_names(groups, cut, tokens) if tokens < plan.reach.tokens else [])


@given(shortages())
def test_no_larger_boundary_would_fit(
    shortage: tuple[list[GroupRun], set[SequenceHash], set[SequenceHash], int],
) -> None:
    """Goal: of all boundaries whose blocks may come, the largest for which there are slots."""
    groups, here, comes, room = shortage
    names = [name(at) for at in range(sum(one.blocks for one in groups))]

    def takes_slot(asked: Sequence[SequenceHash]) -> bytes:
        return bytes(one not in here for one in asked)

    known = Available(has_each(here.__contains__), has_each(comes.__contains__), takes_slot)
    plan = GroupPlan.of(groups, names)
    plan.choose(known)
    most = plan.reach
    plan.shorten(room, known)
    assert plan.reach.shared == most.shared
    cut = split(groups, names)
    fitting = [0]
    for tokens in range(1, most.tokens + 1):
        if reach(groups, cut, known.may_come, most=tokens).tokens == tokens:
            wanted = needed_names(groups, cut, tokens)
            if sum(one not in here for one in wanted) <= room:
                fitting.append(tokens)
    assert plan.reach.tokens == fitting[-1]


def test_a_plan_that_fits_nowhere_ends_where_blocks_are_here() -> None:
    """1. A state is to be brought at each of 2,000 boundaries, and there is no slot: after a few
    tries the plan ends at block 3, whose state is here. 2. With one slot it reaches all."""
    groups = [GroupRun(1, 2_000), GroupRun(1, 2_000, 1)]
    names = [name(at) for at in range(4_000)]
    here = {*names[:2_000], names[2_002]}
    tried: list[int] = []

    def has(asked: Sequence[SequenceHash]) -> bytes:
        tried.append(len(asked))
        return bytes(one in here for one in asked)

    known = Available(has, lambda asked: b"\1" * len(asked), has_each(lambda one: one not in here))
    plan = GroupPlan.of(groups, names)
    assert plan.choose(known) == [*names[:3], names[2_002]]
    plan.shorten(1, known)
    assert plan.reach.tokens == 2_000
    plan.shorten(0, known)
    assert plan.reach.tokens == 3
    assert sum(tried) < 10_000


def test_a_plan_for_which_there_is_no_slot_is_given_up_after_some_tries() -> None:
    """Twenty times a block of a window is gone, two may come, one is gone, and one is here. A hit
    after the two needs two slots; at others one would do, but a block of their window is gone. One
    slot is left: the plan ends after the first two blocks, which are here."""
    groups = [GroupRun(1, 102), GroupRun(1, 102, 2)]
    names = [name(at) for at in range(204)]
    where = dict(zip(names[102:], "hh" + "xccxh" * 20, strict=True))
    here = {*names[:102], *(one for one, place in where.items() if place == "h")}
    comes = here | {one for one, place in where.items() if place == "c"}
    known = Available(
        has_each(here.__contains__), has_each(comes.__contains__),
        has_each(lambda one: one not in here),
    )  # fmt: skip
    plan = GroupPlan.of(groups, names)
    plan.choose(known)
    assert plan.reach.tokens == 100
    plan.shorten(1, known)
    assert plan.needed() == [*names[:2], *names[102:104]]
