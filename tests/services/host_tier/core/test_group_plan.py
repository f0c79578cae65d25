"""Lookups over several KV groups: the largest boundary at which every group has what a hit needs.

A block has four tokens. The full group's blocks are 1, 2, 3, …; those of the group with a window of
two blocks are 11, 12, 13, …: a hit of 12 tokens needs 1, 2, 3 and 12, 13.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from kvbm_common.identity import IdentityError
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.events import Stored
from kvbm_common.wire.local import Found, Hello, Pulled
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.messages import (
    AskFill,
    AttachPeer,
    Effect,
    PeerAttached,
    StartPull,
)
from kvbm_host_tier.core.peer_messages import AskHolders

from tests.services.host_tier.helpers import (
    LOOKUP_MS,
    NAMESPACE,
    Host,
    asked,
    hello,
    name,
    of,
)

WINDOW = 2


def look_up(host: Host, blocks: int, *, engine: str = "ada") -> list[Effect]:
    """Ask for the first blocks of both groups."""
    wanted = [*range(1, blocks + 1), *range(11, blocks + 11)]
    groups = [GroupRun(4, blocks), GroupRun(4, blocks, WINDOW)]
    return host.look_up(*wanted, groups=groups, engine=engine)


def leased(host: Host, found: Found) -> list[int]:
    """The blocks whose slots were leased, in the order of the answer."""
    blocks = host.core.view.blocks()
    return [int.from_bytes(blocks[slot].hash, "big") for slot in found.slots]


def test_a_hit_leases_all_of_a_full_group_and_the_end_of_a_window() -> None:
    host = Host(slots=8)
    host.store(1, 2, 3)
    host.store(11, 12, 13)
    found = host.found(look_up(host, 3))
    assert (found.boundary, found.shared, found.reason) == (12, 12, "")
    assert leased(host, found) == [1, 2, 3, 12, 13]
    assert host.slots["active"] == 5
    host.release(found.lease)
    assert host.slots["active"] == 0


@pytest.mark.parametrize(
    ("window", "boundary", "expected"),
    [
        ((12, 13), 12, [1, 2, 3, 12, 13]),
        ((11, 12), 8, [1, 2, 11, 12]),
        ((11, 13), 4, [1, 11]),
        ((12,), 0, []),
        ((), 0, []),
    ],
)
def test_the_boundary_moves_back_to_where_the_window_is_whole(
    window: tuple[int, ...], boundary: int, expected: list[int]
) -> None:
    """All blocks of the full group are here: up to there the prefix is shared."""
    host = Host(slots=8)
    host.store(1, 2, 3)
    for number in window:
        host.store(number)
    found = host.found(look_up(host, 3))
    assert (found.boundary, found.shared) == (boundary, 12)
    assert found.reason == ("" if boundary == 12 else "not_stored")
    assert leased(host, found) == expected
    assert host.slots["active"] == len(expected)


def test_a_missing_block_of_the_full_group_ends_what_is_shared() -> None:
    host = Host(slots=8)
    host.store(1, 2)
    host.store(11, 12, 13)
    found = host.found(look_up(host, 3))
    assert (found.boundary, found.shared, leased(host, found)) == (8, 8, [1, 2, 11, 12])


def test_only_the_blocks_of_the_hit_come_from_disk() -> None:
    """1 and 12 are here, everything is on disk: 2, 3, 13 are brought, 11 is not."""
    host = Host(slots=8)
    host.store(1)
    host.store(12)
    host.disk_stored(1, 2, 3)
    host.disk_stored(11, 12, 13)
    effects = look_up(host, 3)
    [fill] = of(effects, AskFill)
    assert asked(fill) == [2, 3, 13]
    found = host.found(host.filled(fill))
    assert (found.boundary, leased(host, found)) == (12, [1, 2, 3, 12, 13])
    assert found.disk_blocks == [1, 2, 4]


def test_where_a_fill_fails_the_hit_falls_back_on_what_is_here() -> None:
    """1, 2, 11, 12 are here; 3 and 13 come from disk, and 13 does not: a hit of eight tokens."""
    host = Host(slots=8)
    host.store(1, 2)
    host.store(11, 12)
    host.disk_stored(1, 2, 3)
    host.disk_stored(13)
    [fill] = of(look_up(host, 3), AskFill)
    found = host.found(host.filled(fill, 13))
    assert (found.boundary, found.shared, found.reason) == (8, 12, "gone")
    assert leased(host, found) == [1, 2, 11, 12]
    assert found.disk_blocks == []
    assert host.slots["active"] == 4


def with_a_longer_hit_on_disk(*, slots: int) -> tuple[Host, list[Effect]]:
    """A host tier with 1, 2, 12, a hit of eight tokens; a lookup awaits 3 and 13 from disk."""
    host = Host(slots=slots)
    host.store(12)
    host.store(1, 2)
    host.disk_stored(3)
    host.disk_stored(13)
    groups = [GroupRun(4, 3), GroupRun(4, 3, 1)]
    return host, host.look_up(1, 2, 3, 11, 12, 13, groups=groups)


def test_a_shorter_hit_stays_while_a_longer_one_is_awaited() -> None:
    """Four slots: the longer hit does not need 12, which could make room for 3 or 13. The disk has
    lost both."""
    host, effects = with_a_longer_hit_on_disk(slots=4)
    effects += [one for fill in of(effects, AskFill) for one in host.filled(fill, 3, 13)]
    found = host.found(effects)
    assert (found.boundary, leased(host, found)) == (8, [1, 2, 12])
    assert host.slots["active"] == 3
    host.release(found.lease)
    assert host.slots["active"] == 0


def test_an_engine_that_leaves_lets_go_of_the_shorter_hit_too() -> None:
    host, effects = with_a_longer_hit_on_disk(slots=8)
    assert of(effects, AskFill)
    assert host.slots["active"] == 3
    host.bye()
    assert host.slots["active"] == 0


def test_at_the_deadline_the_hit_falls_back_on_what_is_here() -> None:
    """The fill that is late stays on its way: its blocks are promoted, and nobody waits."""
    host = Host(slots=8)
    host.store(1, 2)
    host.store(11, 12)
    host.disk_stored(3)
    host.disk_stored(13)
    fills = of(look_up(host, 3), AskFill)
    found = host.found(host.wait(LOOKUP_MS))
    assert (found.boundary, found.reason, leased(host, found)) == (8, "deadline", [1, 2, 11, 12])
    host.release(found.lease)
    for fill in fills:
        host.filled(fill)
    assert host.found(look_up(host, 3)).boundary == 12


def test_a_fill_that_was_needed_for_a_longer_hit_is_counted_where_it_is_used() -> None:
    """2 came from disk and is part of the shorter hit, too; 13 did not come."""
    host = Host(slots=8, batch_blocks_max=1)
    host.store(1)
    host.store(11, 12)
    host.disk_stored(2, 3)
    host.disk_stored(13)
    two, three, thirteen = of(look_up(host, 3), AskFill)
    host.filled(two)
    host.filled(three)
    found = host.found(host.filled(thirteen, 13))
    assert (found.boundary, leased(host, found), found.disk_blocks) == (8, [1, 2, 11, 12], [1])


def test_two_lookups_share_the_fills_of_their_groups() -> None:
    host = Host(slots=8)
    host.attach(engine="bob")
    host.disk_stored(1, 2)
    host.disk_stored(11, 12)
    [fill] = of(look_up(host, 2), AskFill)
    assert not of(look_up(host, 2, engine="bob"), AskFill)
    answers = of(host.told(host.filled(fill)), Found)
    assert [(one.boundary, len(one.slots)) for one in answers] == [(8, 4), (8, 4)]


def test_peers_are_not_asked_for_groups() -> None:
    """The index knows runs; which peer has a window is not asked yet."""
    host = Host(slots=8)
    host.store(1)
    assert not of(look_up(host, 3), AskHolders)


def test_the_blocks_that_were_missed_are_counted() -> None:
    """A hit of 12 tokens needs 1, 2, 3, 12 and 13; one of four tokens is found: 1 and 11."""
    host = Host(slots=8)
    host.store(1)
    host.store(11)
    host.found(look_up(host, 3))
    counts = host.core.view.counts
    assert (counts["lookup_blocks.host"], counts["lookup_blocks.miss"]) == (2, 4)
    assert counts["matched_tokens"] == 4


def test_a_hit_inside_a_chunk_may_need_more_blocks_than_one_at_its_end() -> None:
    """Chunks of four tokens, one a block; 101, 102, 103 have three each. A hit of three tokens
    needs 1, 2, 3 and 101; one of all nine needs 9 and 103."""
    host = Host(slots=16)
    host.store(1, 2, 3)
    host.store(101)
    groups = [GroupRun(1, 9, 0, 4), GroupRun(3, 3, 1)]
    found = host.found(host.look_up(*range(1, 10), 101, 102, 103, groups=groups))
    assert (found.boundary, leased(host, found)) == (3, [1, 2, 3, 101])
    counts = host.core.view.counts
    assert (counts["lookup_blocks.host"], counts["lookup_blocks.miss"]) == (4, 2)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_here_of_any_groups_is_counted_once(seed: int) -> None:
    """Groups of every kind, blocks here and there: what was found and missed is what was asked."""
    draw = random.Random(seed)
    host, groups, wanted = Host(slots=64), list[GroupRun](), list[int]()
    for group in range(draw.randint(1, 3)):
        size, rule = draw.choice([1, 2, 3]), draw.choice(["all", "window", "chunk"])
        count = 12 // size - draw.choice([0, 0, 1])
        groups.append(GroupRun(
            size, count, draw.randint(1, 4) if rule == "window" else 0,
            draw.choice([2, 4, 8]) if rule == "chunk" else 0, draw.choice([0, 1, 2]),
        ))  # fmt: skip
        names = [100 * (group + 1) + place for place in range(count)]
        for number in draw.sample(names, draw.randint(0, count)):
            host.store(number)
        wanted += names
    before = dict(host.core.view.counts)
    found = host.found(host.look_up(*wanted, groups=groups))
    counts = {key: n - before.get(key, 0) for key, n in host.core.view.counts.items()}
    assert counts["lookup_blocks.host"] == len(found.slots)
    assert bool(counts["lookup_blocks.miss"]) == bool(found.reason)


def test_an_engine_that_leaves_takes_its_lookup_along() -> None:
    host = Host(slots=8)
    host.store(1)
    host.disk_stored(2)
    host.disk_stored(11, 12)
    look_up(host, 2)
    host.bye()
    assert host.slots["active"] == 0


def test_where_prompts_part_stays_known_when_a_window_does_not_come() -> None:
    """The full group has four blocks here, and windows end at 12 tokens: the plan. Then block 13 is
    gone: a hit of 8 tokens is left, and prompts part at 16 as before."""
    host = Host(slots=16)
    host.store(1, 2, 3, 4)
    host.disk_stored(11, 12, 13)
    [fill] = of(look_up(host, 4), AskFill)
    assert asked(fill) == [12, 13]
    host.store(11)
    found = host.found(host.filled(fill, 13))
    assert (found.boundary, found.shared, found.reason) == (8, 16, "gone")


# --- bad questions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([GroupRun(4, 3)], "groups must have 2 blocks in all"),
        ([GroupRun(0, 2)], "groups.block_tokens is 0, must be 1..65536"),
        ([GroupRun(4, 3), GroupRun(4, -1)], "groups has -1 blocks"),
        ([GroupRun(4, 2, -1)], "a window of -1"),
        ([GroupRun(4, 2, 70_000)], "a window of 70000"),
        ([GroupRun(4, 0)] * 65, "at most 64 groups"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: list[GroupRun], field: str) -> None:
    with pytest.raises(IdentityError, match=field.replace(".", r"\.")):
        GroupPlan.of(groups, [name(1), name(2)])
    host = Host()
    assert host.refusal(host.look_up(1, 2, groups=groups)).code == "bad_identity"


# --- offers -------------------------------------------------------------------------------------


def of_groups(half: Hello) -> Hello:
    """The same half of an engine with a second group."""
    second = msgspec.structs.replace(NAMESPACE, group=1)
    return msgspec.structs.replace(half, group_namespaces=[second])


def test_the_blocks_of_each_group_are_stored_under_its_namespace() -> None:
    """1 is the full group's, 11 the other one's; a third group is not this engine's."""
    host = Host(attach=False)
    for effect in of(host.greet(of_groups(hello())), AttachPeer):
        host.step(PeerAttached(effect.engine, 0, "ada-1-0"))
    host.greet(of_groups(hello(role="scheduler")))
    second = of_groups(hello()).namespaces[1].digest.hex()
    for number, namespace in ((1, NAMESPACE.digest.hex()), (11, second)):
        [pull] = of(host.offer(number, namespace=namespace), StartPull)
        [pulled] = of(host.told(host.pulled(pull)), Pulled)
        host.confirm(pulled.offer)
    stored = [event for event in host.events if isinstance(event, Stored)]
    assert [event.namespace for event in stored] == [NAMESPACE.digest.hex(), second]
    third = msgspec.structs.replace(NAMESPACE, group=2).digest.hex()
    [refused] = of(host.told(host.offer(12, namespace=third)), Pulled)
    assert (refused.failed, refused.reason) == (1, "namespace")


def test_the_halves_of_an_engine_have_the_same_groups() -> None:
    host = Host(attach=False)
    host.greet(of_groups(hello()))
    refused = host.refusal(host.greet(hello(role="scheduler")))
    assert (refused.code, refused.field) == ("namespace", "namespace")
