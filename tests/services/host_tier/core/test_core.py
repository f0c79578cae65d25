"""The host tier's core as a whole: announcements, verbs, figures."""

from __future__ import annotations

import pytest
from kvbm_common.tier.layout import Layout
from kvbm_common.wire.events import Cleared
from kvbm_common.wire.explain import ExplainListRequest
from kvbm_common.wire.verbs import ErrorBody, LeaseReply, LeaseRequest
from kvbm_host_tier.core.arena import LEASE_MS_MAX
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.messages import (
    Answer,
    ArenaInfo,
    AskFill,
    AskLowerTierSnapshot,
    LeaseAsked,
    LowerEventsLost,
    LowerTierEvent,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
    Publish,
    StartPull,
)
from kvbm_host_tier.core.scrub import EMPTY_MS

from tests.services.host_tier.helpers import (
    DIGEST,
    EPOCH,
    SLOT_BYTES,
    Host,
    checksum,
    name,
    of,
    on_disk,
)

# --- the view -----------------------------------------------------------------------------------


def test_the_view_is_live_and_read_only() -> None:
    """Made once; what it shows is the core as it is now, and no attribute of it can be set."""
    host = Host(attach=False)
    view = host.core.view
    assert (view.layout, view.arena.path) == (None, "/arena")
    host.attach()
    host.store(1, 2)
    assert view.layout == Layout(SLOT_BYTES, 4, 1)
    assert view.counts["offload_blocks_d2h"] == 2
    assert host.core.view is view
    with pytest.raises(AttributeError):
        view.instance = "1"  # type: ignore[misc]
    with pytest.raises(TypeError):
        view.counts["offload_blocks_d2h"] = 0  # type: ignore[index]


def test_a_lookup_is_explained_when_the_view_is_asked() -> None:
    """The explanation of the last lookup waits for the next input, or for a question."""
    host = Host()
    host.settles = False
    host.look_up(1)
    assert host.core.view.explanation_count == 0
    found, following = host.core.view.latest_explanations(ExplainListRequest(limit=1))
    assert [(one.blocks, one.reason) for one in found] == [(1, "never_stored")]
    assert (following, host.core.view.explanation_count) == (0, 1)


# --- announcements ------------------------------------------------------------------------------


def test_a_life_begins_and_ends_with_cleared() -> None:
    """Seq 1 says that nothing of the former life is left; the last one that nothing stays."""
    host = Host()
    host.store(1)
    [goodbye] = host.core.stop()
    assert isinstance(goodbye, Publish)
    events = [*host.events, goodbye.event]
    assert [(event.epoch, event.seq) for event in events] == [(EPOCH, 1), (EPOCH, 2), (EPOCH, 3)]
    assert isinstance(events[0], Cleared)
    assert isinstance(events[-1], Cleared)
    assert (events[0].source, events[0].tier) == ("host-tier-0", "host")


def test_a_snapshot_is_the_sum_of_the_events() -> None:
    """As of the last number; a staged block is not in it."""
    host = Host(slots=3)
    host.store(1, 2)
    host.store(5)
    host.offer(11)
    reply = host.core.view.snapshot()
    assert (reply.epoch, reply.seq) == (EPOCH, len(host.events))
    [part] = reply.parts
    listed = {int(text, 16) for run in part.runs for text in run.hashes}
    assert listed == host.announced


def test_before_the_first_engine_there_is_an_arena_without_slots() -> None:
    """Everybody may ask already."""
    host = Host(attach=False)
    reply = host.core.view.arena_reply()
    assert (reply.slot_bytes, reply.slot_count, reply.epoch) == (0, 0, EPOCH)
    assert host.core.view.snapshot().parts == []
    assert host.lease(1).slots == []
    assert host.core.view.statistics(host.now_ms).slots["total"] == 0


# --- leases for the disk tier -------------------------------------------------------------------


def test_the_disk_tier_leases_what_is_here() -> None:
    """1 is here, 2 is not, 1 again: one slot, with all that a copy needs."""
    host = Host()
    host.store(1)
    reply = host.lease(1, 2, 1)
    [leased] = reply.slots
    assert (leased.slot, leased.checksum, leased.bytes) == (host.slot_of(1), checksum(1), 64)
    assert (leased.hash, leased.parent) == (name(1).hex(), name(0).hex())
    assert leased.namespace == DIGEST
    assert host.slots["active"] == 1
    assert host.copied(reply.lease)
    assert host.slots["active"] == 0
    assert not host.copied(reply.lease), "a lease ends once"


def test_a_copy_that_took_longer_than_its_lease_is_worthless() -> None:
    """The disk tier learns it when it gives the lease back."""
    host = Host()
    host.store(1)
    reply = host.lease(1, lease_ms=100)
    host.wait(100)
    assert not host.copied(reply.lease)


def test_a_lease_request_cannot_pin_for_ever() -> None:
    """Asked for a day, granted for a minute."""
    host = Host()
    host.store(1)
    host.lease(1, lease_ms=86_400_000)
    for _ in range(LEASE_MS_MAX // 4_000):
        host.beat()
        host.wait(4_000)
    assert host.slots["active"] == 0


def test_a_lease_for_another_arena_is_refused() -> None:
    """The asker knows the life before."""
    reply = Host().lease(1, epoch=EPOCH - 1)
    assert isinstance(reply, ErrorBody)
    assert (reply.code, reply.field) == ("stale_epoch", "epoch")


def test_a_lease_request_with_a_hash_that_is_none_is_refused() -> None:
    """An answer, and no slot pinned."""
    host = Host()
    host.store(1)
    request = LeaseRequest(owner="d", epoch=EPOCH, hashes=[name(1).hex(), "?"], lease_ms=9)
    [answer] = of(host.step(LeaseAsked(1, request)), Answer)
    assert isinstance(answer.reply, ErrorBody)
    assert answer.reply.code == "bad_identity"
    assert host.slots["active"] == 0


def test_the_verb_gives_back_no_lease_of_an_engine() -> None:
    """The disk tier names an id that is not its own: the reader keeps its slots."""
    host = Host()
    host.store(1)
    found = host.found(host.look_up(1))
    assert not host.copied(found.lease)
    assert host.slots["active"] == 1


def test_leases_of_two_lives_have_different_ids() -> None:
    """A release that was meant for the life before must not hit a lease of this one."""
    ids: set[int] = set()
    for epoch in (EPOCH, EPOCH + 1):
        arena = ArenaInfo("/arena", 4096, 4096)
        core = HostTierCore(host="h", instance="0", epoch=epoch, arena=arena)
        request = LeaseRequest(owner="d", epoch=epoch, hashes=[], lease_ms=9)
        [answer] = of(core.step(LeaseAsked(1, request), 0), Answer)
        assert isinstance(answer.reply, LeaseReply)
        ids.add(answer.reply.lease)
    assert len(ids) == 2


# --- disk tiers come and go ---------------------------------------------------------------------


def test_a_disk_tier_that_joins_is_asked_what_it_holds() -> None:
    """And its blocks can be had from then on, until it leaves."""
    host = Host()
    assert host.step(LowerTierJoined("0")) == [AskLowerTierSnapshot("0")]
    host.step(LowerTierSnapshot("0", LowerSnapshot.of(host.disk.snapshot([on_disk(1)]))))
    assert of(host.look_up(1), AskFill)
    host.step(LowerTierLeft("0"))
    assert host.found(host.look_up(2)).reason == "not_stored"
    assert host.core.view.statistics(host.now_ms).figures["known_on_disk"] == 0


def test_a_stream_that_has_lost_events_is_mended_by_a_snapshot_of_each_lower_tier() -> None:
    """What was lost was the last that the tier has said: no gap shows it."""
    host = Host()
    host.disk_stored(1)
    assert host.step(LowerEventsLost()) == [AskLowerTierSnapshot("0")]
    host.disk_stored(2)  # It waited in the inbox, or came after the loss: both prove nothing.
    assert of(host.look_up(2), AskFill)
    snapshot = host.disk.snapshot([on_disk(number) for number in (1, 2, 3)])
    host.step(LowerTierSnapshot("0", LowerSnapshot.of(snapshot)))
    assert of(host.look_up(3), AskFill)
    host.step(LowerTierLeft("0"))
    assert host.step(LowerEventsLost()) == []


def test_the_last_words_of_a_disk_tier_that_has_left_bring_no_ghost() -> None:
    """They were under way. No lookup asks it for blocks, and no snapshot is asked for again."""
    host = Host()
    host.disk_stored(1)
    host.step(LowerTierLeft("0"))
    host.disk_stored(2)
    host.disk_stored(3)
    assert not of(host.wait(3_600_000), AskLowerTierSnapshot)
    host.attach(life=2)
    assert not of(host.look_up(2, life=2), AskFill)
    assert host.core.view.is_quiet


def test_a_gap_in_a_disk_tiers_events_is_asked_about() -> None:
    """The question goes out with the step that saw the gap."""
    host = Host()
    host.disk_stored(1)
    host.disk.stored([on_disk(2)])
    [event] = host.disk.stored([on_disk(3)])
    assert host.step(LowerTierEvent("0", event)) == [AskLowerTierSnapshot("0")]


# --- figures ------------------------------------------------------------------------------------


def test_hit_rates_are_over_the_last_lookups() -> None:
    """Window of two: (host 1 of 2) and (disk 1 of 2); the miss before them is forgotten."""
    host = Host(hit_window=2)
    host.look_up(9)
    host.store(1)
    host.disk_stored(3)
    host.look_up(1, 2)
    host.filled(of(host.look_up(3, 4), AskFill)[0])
    figures = host.core.view.statistics(host.now_ms).figures
    assert figures["host_cache_hit_rate"] == 0.25
    assert figures["disk_cache_hit_rate"] == 0.25
    assert figures["lookups_windowed"] == 2
    assert figures["lookup_blocks.host"] == 1
    assert figures["lookup_blocks.disk"] == 1
    assert figures["lookup_blocks.miss"] == 3


def test_a_blocks_story_names_its_slots() -> None:
    """What an operator, or a failed assertion, can read."""
    host = Host()
    host.store(1)
    assert [line.split(" ms ")[1] for line in host.core.story(name(1))] == [
        f"staged in slot {host.slot_of(1)} for ada:0000000000000001",
        f"committed in slot {host.slot_of(1)}",
    ]


def is_quiet(host: Host) -> bool:
    """Whether ticks may come seldom."""
    return host.core.view.is_quiet


def test_ticks_may_come_seldom_while_nothing_is_on_its_way() -> None:
    """An offer that is pulled, a lookup that waits for the disk, and what the scrubber is to read
    want ticks; a lease does not."""
    host = Host(scrub_cpu_percent=0.0)
    assert is_quiet(host)
    [pull] = of(host.offer(1, 2, offer=7), StartPull)
    assert not is_quiet(host)
    host.pulled(pull)
    host.confirm(7)
    assert is_quiet(host)
    host.disk_stored(3)
    [fill] = of(host.look_up(3), AskFill)
    assert not is_quiet(host)
    host.filled(fill)
    host.wait(1)
    assert is_quiet(host)
    assert host.core.view.statistics(host.now_ms).leases == 1


def test_a_scrubber_that_has_blocks_to_read_wants_ticks() -> None:
    host = Host(scrub_cpu_percent=1.0)
    host.wait(1)
    assert is_quiet(host), "there is no block to read"
    host.store(1)
    host.wait(EMPTY_MS)
    assert not is_quiet(host)
