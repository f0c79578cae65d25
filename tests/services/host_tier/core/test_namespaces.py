"""A lookup gets blocks of its engine's namespaces only, and names no other namespace.

ada's engine has the namespace of the helpers; bob's has another model. A block has one name here,
whoever asks for it: bob has learned the names of ada's blocks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import pytest
from kvbm_common.identity import Namespace
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.admin import PrefetchReply, PrefetchRequest
from kvbm_common.wire.events import Run, Tier
from kvbm_common.wire.local import Found
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.messages import (
    AdminAsked,
    Answer,
    AskFill,
    AskLowerTierSnapshot,
    Effect,
    LowerTierEvent,
    LowerTierJoined,
    LowerTierSnapshot,
    StartPull,
    TellHits,
)
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer

from tests.services.host_tier.helpers import DIGEST, NAMESPACE, Host, asked, name, of, on_disk
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers

OTHER = Namespace(model="other", block_tokens=4)
WINDOWED = Namespace(model="test", block_tokens=4, group=1)


def joined_by_bob(host: Host) -> None:
    """An engine with another model says hello."""
    host.attach(engine="bob", namespace=OTHER)


def asked_by_bob(host: Host, *wanted: int, **kwargs: Any) -> list[Effect]:
    """bob looks blocks up, in its own namespace."""
    return host.look_up(*wanted, engine="bob", namespace=OTHER, **kwargs)


def stored_by_bob(host: Host, *wanted: int) -> None:
    """bob offers blocks of its own."""
    effects = host.offer(*wanted, engine="bob", namespace=OTHER.digest.hex(), offer=77)
    [pull] = of(effects, StartPull)
    host.pulled(pull)
    host.confirm(77, engine="bob")


def test_a_block_of_another_namespace_in_host_memory_is_a_miss() -> None:
    """Steps: 1. ada stores 1 and 2. 2. bob asks for them by name: nothing, and it hears why.

    3. Nothing is leased. 4. ada still gets them.
    """
    host = Host()
    joined_by_bob(host)
    host.store(1, 2)
    effects = asked_by_bob(host, 1, 2, request="r")
    found = host.found(effects)
    assert (found.slots, found.checksums, found.reason) == ([], [], "other_namespace")
    assert of(effects, TellHits) == []  # They say how long bob's blocks are, not ada's.
    assert host.slots["active"] == 0
    [told] = host.core.view.explanations("r")
    assert [(s.blocks, s.tier, s.reason) for s in told.segments] == [
        (1, "host", "other_namespace"), (1, "host", "behind"),
    ]  # fmt: skip
    assert host.core.view.counts["missed_blocks.other_namespace"] == 1
    assert len(host.found(host.look_up(1, 2)).slots) == 2


def test_the_lookup_ends_at_the_first_block_of_another_namespace() -> None:
    """bob's block 5 is found; 1 is ada's; bob's 6 after it is of no use, and not pinned."""
    host = Host()
    joined_by_bob(host)
    stored_by_bob(host, 5, 6)
    host.store(1)
    found = host.found(asked_by_bob(host, 5, 1, 6))
    assert found.slots == [host.slot_of(5)]
    assert host.slots["active"] == 1


def test_a_block_of_another_namespace_is_not_asked_of_the_disk() -> None:
    """Steps: 1. The disk has ada's block; bob asks for it: a miss at once, and no fill.

    A fill into slots of bob's size could fail, and the block would be avoided for a while.
    2. ada's lookup has it filled.
    """
    host = Host()
    joined_by_bob(host)
    host.disk_stored(1)
    effects = asked_by_bob(host, 1, request="r")
    assert (host.found(effects).reason, of(effects, AskFill)) == ("other_namespace", [])
    [told] = host.core.view.explanations("r")
    assert [(s.tier, s.reason) for s in told.segments] == [("disk", "other_namespace")]
    assert len(of(host.look_up(1), AskFill)) == 1


def below(host: Host, tier: Literal["disk", "object"], numbers: Sequence[int], own: bytes) -> None:
    """A lower tier has these blocks in a namespace."""
    announcer = host.disk if tier == "disk" else host.objects
    blocks = [msgspec.structs.replace(on_disk(number), namespace=own) for number in numbers]
    for event in announcer.stored(blocks):
        host.step(LowerTierEvent("0", event, tier))


def test_a_fill_is_asked_of_the_tier_that_has_the_own_block() -> None:
    """The disk, which is nearer, has bob's block of this name; the bucket has ada's."""
    host = Host(slots=8)
    below(host, "disk", [1, 2], OTHER.digest)
    below(host, "object", [1, 2], NAMESPACE.digest)
    [fill] = of(host.look_up(1, 2), AskFill)
    assert fill.tier == "object"
    assert len(host.found(host.filled(fill)).slots) == 2


@pytest.mark.parametrize("seed", range(100))
def test_each_block_is_asked_of_a_tier_that_has_it_in_the_engines_namespace(seed: int) -> None:
    """Disk and bucket have blocks of ada's and bob's, as drawn; bob's run is all that is bob's."""
    draw = random.Random(seed)
    host = Host(slots=16)
    joined_by_bob(host)
    tiers: Mapping[Tier, dict[int, bytes]] = {"disk": {}, "object": {}}
    for tier in ("disk", "object"):
        for number in range(1, 7):
            if own := draw.choice([NAMESPACE.digest, OTHER.digest, OTHER.digest, None]):
                below(host, tier, [number], own)
                tiers[tier][number] = own
    wanted = range(1, 7)
    ours = [any(held.get(n) == OTHER.digest for held in tiers.values()) for n in wanted]
    run = [*ours, False].index(False)
    effects = asked_by_bob(host, *wanted, lookup=9)
    for fill in of(effects, AskFill):
        assert {tiers[fill.tier].get(n) for n in asked(fill)} == {OTHER.digest}
        effects = host.filled(fill, namespace=OTHER.digest.hex())
    assert len(host.found(effects).slots) == run


def test_the_disk_says_in_a_snapshot_whose_its_blocks_are() -> None:
    """The namespace is known from a snapshot as from an event."""
    host = Host()
    joined_by_bob(host)
    [ask] = of(host.step(LowerTierJoined("0")), AskLowerTierSnapshot)
    run = Run(parent=name(0).hex(), hashes=[name(1).hex()])
    part = SnapshotPart(namespace=DIGEST, runs=[run])
    reply = SnapshotReply(host="h", source="disk-tier-0", tier="disk", epoch=1, seq=1, parts=[part])
    host.step(LowerTierSnapshot(ask.instance, LowerSnapshot.of(reply)))
    assert host.found(asked_by_bob(host, 1)).reason == "other_namespace"
    assert len(of(host.look_up(1), AskFill)) == 1


def test_groups_reach_no_further_than_own_blocks_on_the_disk() -> None:
    """The window's second block is on the disk, and ada's: bob's hit has 4 tokens, and no fill."""
    host = Host(slots=8)
    joined_by_bob(host)
    stored_by_bob(host, 21, 22, 31)
    host.disk_stored(2)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    effects = asked_by_bob(host, 21, 22, 31, 2, groups=groups)
    assert (host.found(effects).boundary, of(effects, AskFill)) == (4, [])


def test_one_fill_serves_only_the_lookup_whose_namespace_it_is() -> None:
    """ada and bob wait for one block: ada gets it, bob does not."""
    host = Host()
    joined_by_bob(host)
    host.disk_stored(1)
    [fill] = of(host.look_up(1, lookup=8), AskFill)
    assert not of(asked_by_bob(host, 1, lookup=9), AskFill)
    answers = {one.lookup: one for one in of(host.told(host.filled(fill)), Found)}
    assert (len(answers[8].slots), len(answers[9].slots)) == (1, 0)
    assert answers[9].reason == "other_namespace"


def test_a_fill_that_names_no_namespace_serves_no_engine() -> None:
    """A lower tier in error answers with the zero namespace, which is no engine's."""
    host = Host()
    host.disk_stored(1)
    [fill] = of(host.look_up(1), AskFill)
    found = host.found(host.filled(fill, namespace="0" * 64))
    assert (found.slots, found.reason) == ([], "other_namespace")


def test_a_block_of_another_namespace_from_a_peer_is_a_miss() -> None:
    """The peer leases 1 with its namespace: it comes in as a guest, and bob does not get it."""
    host = HostWithPeers()
    joined_by_bob(host)
    [ask] = of(asked_by_bob(host, 1), AskHolders)
    [pull] = of(host.answer(ask, (ANN, 1)), PullFromPeer)
    found = host.found(host.came(pull))
    assert (found.slots, found.reason, host.slots["active"]) == ([], "other_namespace", 0)


def test_all_namespaces_of_an_engine_with_several_groups_are_its_own() -> None:
    """The lookup names the first group's namespace; the blocks of the second have the second's."""
    host = Host(slots=8, attach=False)
    host.attach(group_namespaces=[WINDOWED])
    host.store(1, 2)
    offered = host.offer(11, 12, offer=50, namespace=WINDOWED.digest.hex())
    [pull] = of(offered, StartPull)
    host.pulled(pull)
    host.confirm(50)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    found = host.found(host.look_up(1, 2, 11, 12, groups=groups))
    assert (len(found.slots), found.boundary, found.reason) == (3, 8, "")
    assert len(host.found(host.look_up(11, namespace=WINDOWED)).slots) == 1


def test_groups_are_planned_without_blocks_of_another_namespace_in_host_memory() -> None:
    """The window's second block is here, and ada's: bob's blocks of 4 tokens come from disk.

    bob's own second block is on disk, too. It cannot come beside ada's of the same name.
    """
    host = Host(slots=8)
    joined_by_bob(host)
    host.store(2)
    below(host, "disk", [21, 22, 31, 2], OTHER.digest)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    [fill] = of(asked_by_bob(host, 21, 22, 31, 2, groups=groups), AskFill)
    found = host.found(host.filled(fill, namespace=OTHER.digest.hex()))
    assert (asked(fill), found.boundary) == ([21, 31], 4)


def test_a_hit_over_groups_falls_back_before_a_block_of_another_namespace() -> None:
    """bob's own groups reach 8 tokens, but its window's second block is ada's: 4 tokens are left.

    Two of the blocks of the larger boundary were pinned for a moment; none of them stays so.
    """
    host = Host(slots=8)
    joined_by_bob(host)
    stored_by_bob(host, 21, 22, 31)
    host.store(2)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    found = host.found(asked_by_bob(host, 21, 22, 31, 2, groups=groups))
    assert (found.boundary, found.reason) == (4, "other_namespace")
    assert found.slots == [host.slot_of(21), host.slot_of(31)]
    assert host.slots["active"] == 2


def test_what_did_not_come_is_told_and_not_what_is_anothers_after_it() -> None:
    """bob's block 31 of the window is lost on the way: that is why its hit is short. The window's
    second block, which would be needed for a larger one, is here, and ada's."""
    host = Host(slots=8)
    joined_by_bob(host)
    stored_by_bob(host, 21, 22)
    host.store(2)
    below(host, "disk", [31], OTHER.digest)
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    [fill] = of(asked_by_bob(host, 21, 22, 31, 2, groups=groups), AskFill)
    found = host.found(host.filled(fill, 31))
    assert (asked(fill), found.boundary, found.reason) == ([31], 0, "gone")


def test_an_operators_prefetch_has_no_namespace() -> None:
    """Blocks of any namespace are brought; none is leased."""
    host = Host()
    host.disk_stored(1)
    request = PrefetchRequest(hashes=[name(1).hex()], deadline_ms=100)
    [fill] = of(host.step(AdminAsked(4, "prefetch", request)), AskFill)
    [answer] = of(host.filled(fill), Answer)
    assert answer.reply == PrefetchReply(blocks=1, filled=1, reason="")


@pytest.mark.parametrize("namespace", [OTHER, WINDOWED])
def test_a_lookup_in_another_namespace_is_refused(namespace: Namespace) -> None:
    """The engine is told with a code, it is counted, and nothing is looked up."""
    host = Host()
    joined_by_bob(host)
    host.store(1)
    effects = host.look_up(1, namespace=namespace)
    refused = host.refusal(effects)
    assert (refused.about, refused.code, refused.field) == ("lookup", "namespace", "namespace")
    assert host.core.view.counts["refused.lookup_namespace"] == 1
    assert (host.core.view.counts["lookups"], host.slots["active"]) == (0, 0)
    assert len(host.found(host.look_up(1, namespace=NAMESPACE)).slots) == 1
