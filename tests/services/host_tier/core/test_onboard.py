"""Onboard: lookups over host and disk, joined fills, cuts, leases, and slots on loan."""

from __future__ import annotations

import pytest
from kvbm_common.identity import pack_hashes
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.local import Found, Lookup
from kvbm_common.wire.verbs import FILL_GRACE_MS, FillReply
from kvbm_host_tier.core.messages import (
    AskFill,
    Effect,
    FillDone,
    LowerTierEvent,
    StartPull,
    TellHits,
)

from tests.services.host_tier.helpers import (
    DIGEST,
    EPOCH,
    LEASE_MS,
    LOOKUP_MS,
    NAMESPACE,
    Host,
    asked,
    incarnation,
    name,
    numbers,
    of,
    on_disk,
)


def one_fill(effects: list[Effect]) -> AskFill:
    """The one fill that was asked for."""
    [fill] = of(effects, AskFill)
    return fill


def no_answer(host: Host, effects: list[Effect]) -> None:
    """The lookup waits."""
    assert of(host.told(effects), Found) == []


# --- from the host ------------------------------------------------------------------------------


def test_a_prefix_in_the_host_is_answered_at_once_and_leased() -> None:
    """1, 2 are here, 3 is not: a run of two, pinned."""
    host = Host()
    host.store(1, 2)
    found = host.found(host.look_up(1, 2, 3, lookup=9))
    assert (found.lookup, found.epoch, found.reason) == (9, EPOCH, "not_stored")
    assert found.slots == [host.slot_of(1), host.slot_of(2)]
    assert found.disk_blocks == []
    assert host.slots["active"] == 2


def test_all_found_has_no_reason() -> None:
    """There is nothing to explain."""
    host = Host()
    host.store(1)
    assert host.found(host.look_up(1)).reason == ""


def test_a_run_ends_at_its_first_hole() -> None:
    """1 and 3 are here, 2 is not: 3 is of no use, and not pinned."""
    host = Host()
    host.store(1)
    host.store(3)
    found = host.found(host.look_up(1, 2, 3))
    assert found.slots == [host.slot_of(1)]
    assert host.slots["active"] == 1


def test_a_miss_and_an_empty_question_are_answers() -> None:
    """Lease 0: nothing to give back."""
    host = Host()
    assert host.found(host.look_up(1)).lease == 0
    assert host.found(host.look_up()).reason == ""


def test_hits_in_the_host_are_told_to_the_disk_tier_unless_it_has_them() -> None:
    """1 is on disk already, 2 deserves to be."""
    host = Host()
    host.store(1, 2)
    host.disk_stored(1)
    [told] = of(host.look_up(1, 2), TellHits)
    assert (numbers(told.hits.hashes), told.hits.namespace) == ([2], DIGEST)


def test_a_lease_pins_until_it_is_released() -> None:
    """Two readers of 1: it can be evicted when both are done."""
    host = Host(slots=1)
    host.store(1)
    first, second = host.found(host.look_up(1)), host.found(host.look_up(1))
    assert first.lease != second.lease
    host.release(first.lease)
    host.offer(11)
    assert host.announced == {1}
    host.release(second.lease)
    host.offer(11)
    assert host.announced == set()


def test_a_lease_ends_at_its_deadline_on_our_clock() -> None:
    """1,000 ms after the question came. A release after that is counted, nothing else."""
    host = Host()
    host.store(1)
    found = host.found(host.look_up(1))
    host.wait(LEASE_MS - 1)
    assert host.slots["active"] == 1
    host.wait(1)
    assert host.slots["active"] == 0
    host.release(found.lease)
    host.release(0)
    assert host.core.view.counts["released_late"] == 2


def test_nobody_releases_the_lease_of_another() -> None:
    """Bob names Ada's lease: she keeps it, and gives it back herself."""
    host = Host()
    host.attach(engine="bob")
    host.store(1)
    found = host.found(host.look_up(1))
    host.release(found.lease, engine="bob")
    assert host.slots["active"] == 1
    host.release(found.lease)
    assert host.slots["active"] == 0


def test_a_corrupt_block_is_found_by_nobody_again() -> None:
    """Ada says that the second block of her run was wrong; Bob, who also reads it, is not cut off.

    Its slot is free when Bob is done.
    """
    host = Host()
    host.attach(engine="bob")
    host.store(1, 2, 3)
    mine = host.found(host.look_up(1, 2, 3))
    his = host.found(host.look_up(1, 2, 3, engine="bob"))
    host.release(mine.lease, 1)
    assert host.announced == {1, 3}
    assert host.events[-1].reason == "corrupt"  # type: ignore[union-attr]
    assert host.slots["active"] == 3
    host.release(his.lease, engine="bob")
    assert host.slots["reset"] == 2
    assert host.found(host.look_up(1, 2, 3)).slots == [host.slot_of(1)]


def test_a_corrupt_index_beyond_the_run_is_ignored() -> None:
    """A confused engine does no harm."""
    host = Host()
    host.store(1)
    host.release(host.found(host.look_up(1)).lease, 5)
    assert host.announced == {1}


def test_silence_ends_no_lease() -> None:
    """A stalled engine's worker may still be reading: its slots are safe until the deadline."""
    host = Host()
    host.store(1)
    host.found(host.look_up(1, lease_ms=20_000))
    host.wait(5_001)
    assert host.core.view.counts["engines_lost"] == 1
    assert host.slots["active"] == 1
    host.wait(20_000)
    assert host.slots["active"] == 0


def test_a_newer_life_ends_no_lease_of_the_old() -> None:
    """The old process may not know yet."""
    host = Host()
    host.store(1)
    host.found(host.look_up(1))
    host.attach(life=2)
    assert host.slots["active"] == 1
    host.wait(LEASE_MS)
    assert host.slots["active"] == 0


def test_good_bye_gives_everything_back() -> None:
    """Who says Bye reads no more."""
    host = Host()
    host.store(1)
    host.found(host.look_up(1))
    host.bye()
    assert host.slots["active"] == 0


@pytest.mark.parametrize("wrong", ["partial", "twice", "namespace"])
def test_a_question_that_makes_no_sense_is_refused(wrong: str) -> None:
    """A partial hash, the same block twice in a chain, a digest that is none."""
    host = Host()
    hashes = {"partial": b"x" * 17, "twice": pack_hashes([name(1), name(1)])}.get(wrong, b"")
    effects = host.say(
        Lookup(
            engine="ada",
            incarnation=incarnation(1),
            lookup=1,
            namespace=b"short" if wrong == "namespace" else NAMESPACE.digest,
            hashes=hashes,
            lease_ms=1,
            deadline_ms=1,
        )
    )
    refused = host.refusal(effects)
    assert (refused.about, refused.code, refused.field) == ("lookup", "bad_identity", "hashes")


# --- from disk ----------------------------------------------------------------------------------


def test_a_block_on_disk_is_staged_filled_committed_and_leased() -> None:
    """1. 1 is on disk: a slot is lent to the disk tier. 2. It is filled, and only now answered."""
    host = Host()
    host.disk_stored(1)
    effects = host.look_up(1)
    no_answer(host, effects)
    fill = one_fill(effects)
    assert (asked(fill), fill.instance) == ([1], "0")
    assert (fill.request.epoch, fill.request.until_ms) == (EPOCH, host.now_ms + LOOKUP_MS)
    assert host.slots["staged"] == 1
    found = host.found(host.filled(fill))
    assert found.slots == [fill.request.slots[0].slot]
    assert found.disk_blocks == [0]
    assert host.announced == {1}
    assert host.core.view.counts["promoted_blocks"] == 1


def test_host_disk_object() -> None:
    """1 here, 2 on disk, 3 in the bucket: one run; each tier is asked, told and counted apart."""
    host = Host()
    host.store(1)
    host.disk_stored(2)
    host.object_stored(2, 3)
    effects = host.look_up(1, 2, 3)
    disk, objects = of(effects, AskFill)
    assert (disk.tier, asked(disk), objects.tier, asked(objects)) == ("disk", [2], "object", [3])
    host.filled(objects)
    found = host.found(host.filled(disk))
    assert (found.disk_blocks, found.object_blocks) == ([1], [2])
    counts = host.core.view.counts
    assert (counts["onboard_blocks_h2d"], counts["onboard_blocks_d2d"]) == (1, 1)
    assert (counts["onboard_blocks_o2d"], counts["lookup_blocks.object"]) == (1, 1)
    figures = host.core.view.statistics(host.now_ms).figures
    assert round(figures["object_cache_hit_rate"], 3) == 0.333
    assert (figures["known_on_disk"], figures["known_on_object"]) == (1, 2)


def test_what_the_bucket_has_lost_is_forgotten_there_and_not_on_disk() -> None:
    """A block that only the bucket lacks is still had from disk."""
    host = Host()
    host.object_stored(1)
    fill = one_fill(host.look_up(1))
    assert fill.tier == "object"
    assert host.found(host.filled(fill, 1)).slots == []
    no_fill = host.look_up(1)
    assert not of(no_fill, AskFill)
    host.disk_stored(1)
    assert one_fill(host.look_up(1)).tier == "disk"


def test_host_disk_host() -> None:
    """1 and 3 are in the host, 2 on disk: one run of three, the middle one from disk.

    While 2 is on its way, 1 and 3 cannot be evicted.
    """
    host = Host(slots=3)
    host.store(1)
    host.store(3)
    host.disk_stored(2)
    fill = one_fill(host.look_up(1, 2, 3))
    assert host.slots == {
        "reset": 0,
        "staged": 1,
        "inactive": 0,
        "active": 2,
        "retired": 0,
        "total": 3,
    }
    found = host.found(host.filled(fill))
    assert found.slots == [host.slot_of(1), host.slot_of(2), host.slot_of(3)]
    assert found.disk_blocks == [1]


def test_fills_go_out_in_batches_prefix_first() -> None:
    """Five blocks in batches of two; the answer comes with the last of them, in any order."""
    host = Host(slots=5, batch_blocks_max=2)
    host.disk_stored(1, 2, 3, 4, 5)
    fills = of(host.look_up(1, 2, 3, 4, 5), AskFill)
    assert [asked(fill) for fill in fills] == [[1, 2], [3, 4], [5]]
    no_answer(host, host.filled(fills[2]))
    no_answer(host, host.filled(fills[0]))
    assert len(host.found(host.filled(fills[1])).slots) == 5


def test_each_disk_tier_is_asked_for_what_it_has() -> None:
    """1 is with instance 0, 2 with instance 1."""
    host = Host()
    host.disk_stored(1)
    other = Announcer(host="h", source="disk-tier-1", tier="disk", epoch=1)
    for event in other.stored([on_disk(2)]):
        host.step(LowerTierEvent("1", event))
    fills = of(host.look_up(1, 2), AskFill)
    assert [(fill.instance, asked(fill)) for fill in fills] == [("0", [1]), ("1", [2])]


def test_two_lookups_share_a_fill() -> None:
    """Ada asks for 1, 2; Bob for 1, 2, 3, where 3 is on disk as well: only 3 is asked for."""
    host = Host()
    host.attach(engine="bob")
    host.disk_stored(1, 2, 3)
    first = one_fill(host.look_up(1, 2))
    second = one_fill(host.look_up(1, 2, 3, engine="bob"))
    assert asked(second) == [3]
    no_answer(host, host.filled(second))
    answers = of(host.told(host.filled(first)), Found)
    assert [len(found.slots) for found in answers] == [2, 3]
    assert answers[1].disk_blocks == [0, 1, 2]
    assert host.slots["active"] == 3


def test_a_fill_that_fails_cuts_the_run_there() -> None:
    """1 host, 2 disk (gone), 3 host: a run of one, and nothing else stays pinned.

    The disk tier does not have 2: it is not asked again until it says that it has.
    """
    host = Host()
    host.store(1)
    host.store(3)
    host.disk_stored(2)
    found = host.found(host.filled(one_fill(host.look_up(1, 2, 3)), 2))
    assert (found.slots, found.reason) == ([host.slot_of(1)], "gone")
    assert host.slots["active"] == 1
    assert host.slots["staged"] == 0
    assert of(host.look_up(1, 2, 3), AskFill) == []
    host.disk_stored(2)
    assert asked(one_fill(host.look_up(1, 2, 3))) == [2]


def test_a_failed_fill_does_not_wait_for_what_is_behind_it() -> None:
    """1 fails while 2 is still being read: answered at once; 2 is promoted when it comes."""
    host = Host(batch_blocks_max=1)
    host.disk_stored(1, 2)
    first, second = of(host.look_up(1, 2), AskFill)
    assert host.found(host.filled(first, 1, reason="corrupt")).slots == []
    assert of(host.told(host.filled(second)), Found) == []
    assert host.announced == {2}
    assert host.slots["active"] == 0


def test_a_disk_in_trouble_is_left_alone_for_a_while() -> None:
    """A fill times out: the block may well be there. 30 s later it is asked for again."""
    host = Host()
    host.disk_stored(1)
    host.fill_failed(one_fill(host.look_up(1)))
    host.wait(29_000)
    host.attach()
    assert of(host.look_up(1), AskFill) == []
    host.wait(1_000)
    assert asked(one_fill(host.look_up(1))) == [1]


@pytest.mark.parametrize(
    "reason",
    ["stale_arena", "bus_unavailable", "no_responder", "busy", "not_ready", "stopping", "too_late"],
)
def test_a_failure_that_says_nothing_of_the_block_is_soon_tried_again(reason: str) -> None:
    """NATS was away, or the disk tier is starting: half a second of misses, not 30 s."""
    host = Host()
    host.disk_stored(1)
    host.fill_failed(one_fill(host.look_up(1)), reason=reason)
    assert of(host.look_up(1), AskFill) == []
    host.wait(500)
    assert asked(one_fill(host.look_up(1))) == [1]


def test_a_block_that_the_reply_does_not_mention_has_failed() -> None:
    """The other one is used."""
    host = Host()
    host.disk_stored(1, 2)
    fill = one_fill(host.look_up(1, 2))
    reply = host.step(FillDone(fill.fill, FillReply(slots=[])))
    found = host.found(reply)
    assert (found.slots, found.reason) == ([], "no_answer")
    assert host.slots["reset"] == 4


def test_the_deadline_answers_with_what_is_here() -> None:
    """1 is filled, 2 is late: a run of one at the deadline. 2 comes after it and stays."""
    host = Host(batch_blocks_max=1)
    host.disk_stored(1, 2)
    first, second = of(host.look_up(1, 2), AskFill)
    no_answer(host, host.filled(first))
    no_answer(host, host.wait(LOOKUP_MS - 1))
    found = host.found(host.wait(1))
    assert (found.slots, found.reason) == ([host.slot_of(1)], "deadline")
    assert host.core.view.counts["lookups_cut_by_deadline"] == 1
    no_answer(host, host.filled(second))
    assert host.announced == {1, 2}
    assert host.slots["active"] == 1


def test_without_room_the_run_is_cut() -> None:
    """Two slots, one of them leased: of 1, 2, 3 on disk only the first can come."""
    host = Host(slots=2)
    host.store(11)
    host.found(host.look_up(11))
    host.disk_stored(1, 2, 3)
    fill = one_fill(host.look_up(1, 2, 3))
    assert asked(fill) == [1]
    found = host.found(host.filled(fill))
    assert (len(found.slots), found.reason) == (1, "no_room")
    assert host.core.view.counts["dropped.fill_no_room"] == 2


def test_without_any_room_the_host_prefix_is_answered_at_once() -> None:
    """One slot holds 1, pinned by the question itself; 2 on disk has nowhere to go."""
    host = Host(slots=1)
    host.store(1)
    host.disk_stored(2)
    found = host.found(host.look_up(1, 2))
    assert (len(found.slots), found.reason) == (1, "no_room")


def test_a_fill_evicts_but_never_what_the_run_needs() -> None:
    """Slots hold 1 and 11. The run is 1 (host), 2 (disk): 11 goes."""
    host = Host(slots=2)
    host.store(1)
    host.store(11)
    host.disk_stored(2)
    found = host.found(host.filled(one_fill(host.look_up(1, 2))))
    assert len(found.slots) == 2
    assert host.announced == {1, 2}


def test_a_block_that_an_offer_is_bringing_is_not_asked_from_disk() -> None:
    """1 is on disk and being pulled: the run ends before it, rather than twice in the arena."""
    host = Host()
    host.disk_stored(1)
    [pull] = of(host.offer(1), StartPull)
    assert host.found(host.look_up(1)).slots == []
    host.pulled(pull)


def test_an_engine_that_leaves_is_not_answered() -> None:
    """Its fill goes on and the block is promoted; nothing stays pinned."""
    host = Host()
    host.store(1)
    host.disk_stored(2)
    fill = one_fill(host.look_up(1, 2))
    host.bye()
    assert host.slots["active"] == 0
    no_answer(host, host.filled(fill))
    assert host.announced == {1, 2}
    assert host.wait(LOOKUP_MS) == []


def test_too_many_waiting_lookups_are_turned_away() -> None:
    """The second of one: busy, at once."""
    host = Host(lookups_max=1)
    host.disk_stored(1, 2)
    one_fill(host.look_up(1))
    assert host.found(host.look_up(2)).reason == "busy"
    assert host.core.view.counts["dropped.lookup_busy"] == 1


# --- slots on loan ------------------------------------------------------------------------------


def lent(host: Host) -> AskFill:
    """A fill of block 1 that got no answer: its slot stays with the disk tier."""
    host.disk_stored(1)
    fill = one_fill(host.look_up(1))
    found = host.found(host.fill_failed(fill, settled=False))
    assert (found.slots, found.reason) == ([], "deadline_exceeded")
    assert host.slots["staged"] == 1
    return fill


def test_a_slot_on_loan_comes_back_after_the_grace() -> None:
    """10 s after the fill's deadline the disk tier touches it no more, whatever happens."""
    host = Host()
    until_ms = lent(host).request.until_ms
    host.wait(until_ms + FILL_GRACE_MS - 1 - host.now_ms)
    assert host.slots["staged"] == 1
    host.wait(1)
    assert host.slots["reset"] == 4


def test_a_fill_that_certainly_did_not_happen_gives_its_slot_back_at_once() -> None:
    """Nobody answers on the subject: no request was taken."""
    host = Host()
    host.disk_stored(1)
    host.fill_failed(one_fill(host.look_up(1)), settled=True)
    assert host.slots["reset"] == 4


def test_a_new_life_of_the_disk_tier_gives_the_slot_back() -> None:
    """Its store is locked by one process at a time: the old one is gone."""
    host = Host()
    lent(host)
    host.disk_restarts()
    assert host.slots["reset"] == 4


def test_a_dying_disk_tier_may_still_be_reading() -> None:
    """It says `cleared` as it stops, in its old life: the slot stays on loan."""
    host = Host()
    lent(host)
    host.step(LowerTierEvent("0", host.disk.cleared("stop")))
    assert host.slots["staged"] == 1


def test_an_old_event_gives_nothing_back() -> None:
    """The bus repeats the first `cleared` of the life that has the slot."""
    host = Host()
    first = host.disk.cleared("start")
    host.step(LowerTierEvent("0", first))
    lent(host)
    host.step(LowerTierEvent("0", first))
    assert host.slots["staged"] == 1


def test_a_block_whose_slot_is_on_loan_can_be_offered() -> None:
    """The engine has recomputed block 1: it goes into another slot, and is found there."""
    host = Host()
    slot = lent(host).request.slots[0].slot
    host.store(1)
    assert host.slot_of(1) not in (None, slot)
    host.wait(LOOKUP_MS + FILL_GRACE_MS)
    assert host.announced == {1}


# --- disk only ----------------------------------------------------------------------------------


def test_a_staging_arena_gives_up_only_what_is_on_disk() -> None:
    """Two slots: 1 is written, 2 is not. One of 11, 12 finds room; 2 stays."""
    host = Host(slots=2, staging=True)
    host.store(1)
    host.store(2)
    host.disk_stored(1)
    assert host.core.view.counts["offload_blocks_d2d"] == 1
    [pull] = of(host.offer(11, 12), StartPull)
    assert pull.blocks == (11,)
    assert host.announced == {2}
    assert host.core.view.arena_reply().staging


def test_a_full_staging_arena_reminds_the_disk_tier() -> None:
    """Nothing in it is on disk (its writes failed): the disk tier is told again, oldest first."""
    host = Host(slots=2, staging=True)
    host.store(1)
    host.store(3)
    [told] = of(host.offer(11), TellHits)
    assert numbers(told.hits.hashes) == [1, 3]
    host.disk_stored(1)
    host.store(11)
    assert host.announced == {3, 11}


def test_a_staging_arena_reads_through() -> None:
    """More blocks than slots come back from disk, one after the other."""
    host = Host(slots=1, staging=True)
    host.disk_stored(1, 2)
    for number in (1, 2, 1):
        found = host.found(host.filled(one_fill(host.look_up(number))))
        host.release(found.lease)
    assert host.announced == {1}
