"""Offload at its edges: whole messages, exact instants, why a block was not stored, counts."""

from __future__ import annotations

import pytest
from kvbm_common.identity import pack_hashes
from kvbm_common.tier.parts import share_of_rank
from kvbm_common.wire.local import Lookup, Pulled
from kvbm_common.wire.verbs import OFFER_BLOCKS_MAX
from kvbm_host_tier.core import offload
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import PullPart, PullSettled, StartPull, ToEngine

from tests.services.host_tier.helpers import (
    BLOCK_BYTES,
    LEASE_MS,
    LOOKUP_MS,
    NAMESPACE,
    OFFER_MS,
    Host,
    engine_id,
    hello,
    incarnation,
    name,
    of,
)
from tests.services.host_tier.offers import one_pull, told_pulled
from tests.services.host_tier.peer_helpers import HostWithPeers

LIMITS = HostTierLimits()


def why(host: Host, number: int) -> tuple[int, str, str] | None:
    """When and why a block was not stored."""
    host.attach(engine="witness")
    lookup = Lookup(
        engine="witness", incarnation=incarnation(1), lookup=1, namespace=NAMESPACE.digest,
        hashes=pack_hashes([name(number)]), lease_ms=LEASE_MS, deadline_ms=LOOKUP_MS, request="why",
    )  # fmt: skip
    host.say(lookup)
    [segment] = host.core.view.explanations("why")[0].segments
    failed = segment.reason == "offload_failed"
    return (segment.at_ms, "offload", segment.detail) if failed else None


def dropped(host: Host) -> dict[str, int]:
    """What was dropped, by the name of the reason."""
    counts = host.core.view.counts
    return {k.removeprefix("dropped."): n for k, n in counts.items() if k.startswith("dropped.")}


# --- messages -----------------------------------------------------------------------------------


def test_every_field_of_a_pull() -> None:
    """The first is number 1, the next number 2."""
    host = Host(batch_blocks_max=2)
    first, second = of(host.offer(1, 2, 3), StartPull)
    part = PullPart("ada-1-0", tuple(hello().regions), share_of_rank(0, 1))
    deadline_ms = min(OFFER_MS, LIMITS.pull_deadline_ms)
    assert first == StartPull(1, (part,), (1, 2), (0, 1), BLOCK_BYTES, deadline_ms)
    assert second == StartPull(2, (part,), (3,), (2,), BLOCK_BYTES, deadline_ms)


def test_every_field_of_pulled() -> None:
    """One is here, one fails, one comes."""
    host = Host(batch_blocks_max=1)
    host.store(1)
    good, bad = of(host.offer(1, 2, 3, offer=9), StartPull)
    host.pull_failed(bad, reason="why")
    assert told_pulled(host, host.pulled(good)) == Pulled(
        offer=9, pulled=1, skipped=1, failed=1, reason="why", confirm=True
    )


def test_the_diary_follows_a_block() -> None:
    host = Host()
    pull = one_pull(host.offer(1, offer=5))
    host.now_ms += 10
    host.pulled(pull)
    host.confirm(5)
    assert host.diary(1) == [
        (1_000, f"staged in slot 0 for {engine_id()}"), (1_010, "committed in slot 0"),
    ]  # fmt: skip


# --- instants -----------------------------------------------------------------------------------


def test_an_offer_ends_at_its_deadline_and_not_before() -> None:
    host = Host()
    host.offer(1, deadline_ms=100)
    host.wait(99)
    assert dropped(host) == {}
    host.wait(1)
    assert why(host, 1) is None, "its pull is still in flight"
    assert host.figure("offers") == 1


def test_a_confirm_in_time_is_one_before_its_deadline() -> None:
    """The engine has `confirm_ms` from the last byte on, whatever its offer had left."""
    host = Host()
    pull = one_pull(host.offer(1, offer=5, deadline_ms=100))
    host.now_ms += 99
    host.pulled(pull)
    host.wait(LIMITS.confirm_ms - 1)
    host.confirm(5)
    assert host.announced == {1}


def test_a_pull_has_at_least_a_millisecond() -> None:
    """Its offer's deadline passes with the batch before it, and no tick has noticed."""
    host = Host(transfers_max=1, batch_blocks_max=1)
    first = one_pull(host.offer(1, 2, deadline_ms=100))
    host.now_ms += 100
    assert one_pull(host.pulled(first)).deadline_ms == 1


# --- reasons ------------------------------------------------------------------------------------


def test_blocks_of_a_refused_offer_are_remembered_with_the_reason() -> None:
    """Busy, draining and incomplete are ours; a malformed offer says nothing of its blocks."""
    host = Host(offers_max=1)
    host.offer(1)
    for _ in range(2):
        assert told_pulled(host, host.offer(11, 12)).reason == "busy"
    assert why(host, 11) == why(host, 12) == (1_000, "offload", "busy")
    assert dropped(host) == {"offer_busy": 4}
    strange = Host()
    strange.offer(11, life=9)
    assert why(strange, 11) is None
    assert dropped(strange) == {"offer_unknown_engine": 1}


def test_a_draining_tier_takes_nothing() -> None:
    host = Host()
    host.drain()
    assert told_pulled(host, host.offer(1, 2)) == Pulled(
        offer=1, pulled=0, skipped=0, failed=2, reason="draining", confirm=False
    )
    assert (why(host, 2), dropped(host)) == ((1_000, "offload", "draining"), {"offer_draining": 2})


def test_blocks_without_room_are_remembered_in_the_batch_and_after_it() -> None:
    """One slot of two is leased. 11 goes in; 12 is in the same batch, 13 and 14 after it."""
    host = Host(slots=2, batch_blocks_max=2)
    host.store(1)
    host.found(host.look_up(1))
    pull = one_pull(host.offer(11, 12, 13, 14, offer=5))
    assert pull.blocks == (11,)
    assert [why(host, n) for n in (12, 13, 14)] == [(1_000, "offload", "no_room")] * 3
    assert why(host, 11) is None
    pulled = told_pulled(host, host.pulled(pull))
    assert (pulled.pulled, pulled.failed) == (1, 3)
    assert dropped(host) == {"offer_no_room": 3}


def test_blocks_of_an_incomplete_engine_are_remembered() -> None:
    """The worker is lost with the first of three: the two after it cannot be pulled."""
    host = Host(transfers_max=1, batch_blocks_max=1)
    host.pull_failed(one_pull(host.offer(1, 2, 3)), reason="peer_lost")
    assert why(host, 1) == (1_000, "offload", "peer_lost")
    assert why(host, 2) == why(host, 3) == (1_000, "offload", "incomplete_engine")
    assert dropped(host) == {"pull_peer_lost": 1, "offer_incomplete_engine": 2}
    told_pulled(host, host.offer(4))
    assert why(host, 4) == (1_000, "offload", "incomplete_engine")
    assert dropped(host)["offer_incomplete_engine"] == 3


def test_a_revoked_offer_is_remembered_and_counted_once() -> None:
    host = Host()
    host.pulled(one_pull(host.offer(1, 2, offer=5)))
    host.confirm(5, held=False)
    assert why(host, 1) == why(host, 2) == (1_000, "offload", "revoked")
    assert dropped(host) == {"offer_revoked": 2}


def test_each_block_of_a_dead_offer_is_counted_once() -> None:
    """1 is in, 2 is in flight, 3 waits, when the deadline comes; then 2 fails."""
    host = Host(batch_blocks_max=1, transfers_max=1)
    second = one_pull(host.pulled(one_pull(host.offer(1, 2, 3, deadline_ms=100))))
    host.wait(100)
    assert dropped(host) == {"offer_deadline": 2}
    assert why(host, 1) == why(host, 3) == (1_100, "offload", "deadline")
    host.pull_failed(second, reason="late")
    assert dropped(host) == {"offer_deadline": 2, "pull_late": 1}
    assert why(host, 2) == (1_100, "offload", "late")
    assert (host.figure("offers"), host.slots["reset"]) == (0, 4)


def test_a_dead_offer_is_not_killed_again() -> None:
    """Its deadline passes, its engine ends, its pull is in flight: one reason, counted once."""
    host = Host(batch_blocks_max=1, transfers_max=1)
    pull = one_pull(host.offer(1, 2, deadline_ms=100))
    host.wait(100)
    host.wait(1)
    host.bye()
    assert dropped(host) == {"offer_deadline": 1}
    host.pulled(pull)
    assert dropped(host) == {"offer_deadline": 2}
    assert host.figure("offers") == 0


def test_only_the_offers_of_the_engine_that_ends_are_dropped() -> None:
    """Ada has one on its way and one that waits for its confirm; so has Bob, whose are stored."""
    host = Host(slots=8)
    host.attach(engine="bob")
    pulls = {}
    for engine, base in (("ada", 10), ("bob", 20)):
        host.pulled(one_pull(host.offer(base, offer=1, engine=engine)))
        pulls[engine] = one_pull(host.offer(base + 1, offer=2, engine=engine))
    host.bye()
    assert dropped(host) == {"offer_engine_lost": 1}
    host.confirm(1, engine="bob")
    host.pulled(pulls["bob"])
    host.confirm(2, engine="bob")
    assert host.announced == {20, 21}
    host.pulled(pulls["ada"])
    assert dropped(host) == {"offer_engine_lost": 2}


# --- limits and counts --------------------------------------------------------------------------


def test_an_offer_may_have_as_many_blocks_as_the_wire_says() -> None:
    """One more is malformed."""
    host = Host(slots=1, transfers_max=1, batch_blocks_max=1)
    assert one_pull(host.offer(*range(1, OFFER_BLOCKS_MAX + 1))).blocks == (1,)


def test_what_was_asked_is_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three offers that were confirmed, the last two are remembered: duplicates of those are
    dropped, the oldest would be taken for new."""
    monkeypatch.setattr(offload, "ASKED_MAX", 2)
    host = Host(slots=8)
    for number in (1, 2, 3):
        host.pulled(one_pull(host.offer(number, offer=number)))
        host.confirm(number)
    for number in (2, 3):
        assert host.offer(number + 20, offer=number) == []
    assert dropped(host) == {"offer_duplicate": 2}
    assert one_pull(host.offer(21, offer=1)).blocks == (21,)


def test_counts_add_up() -> None:
    """Everything twice: two blocks stored, one skipped, a duplicate, a confirm too early, and one
    block whose hold was broken."""
    host = Host(slots=16)
    for round_ in (1, 2):
        first, offer = 10 * round_, 50 + round_
        host.store(first, first + 1)
        pull = one_pull(host.offer(first, first + 5, offer=offer))
        host.offer(first, offer=offer)
        host.confirm(offer)
        host.pulled(pull)
        host.confirm(offer, held=False)
        counts = host.core.view.counts
        assert counts["offload_blocks_d2h"] == 2 * round_
        assert counts["bytes.d2h"] == 2 * round_ * BLOCK_BYTES
        assert counts["offload_skipped_blocks"] == round_
        assert dropped(host) == {
            "offer_duplicate": round_, "confirm_unknown": round_, "offer_revoked": round_,
        }  # fmt: skip


def test_unsettled_slots_are_counted_by_slot_and_settle_one_pull_at_a_time() -> None:
    """Two pulls of two blocks each are lost; a third fails and has settled."""
    host = Host(slots=8, batch_blocks_max=2)
    pulls = of(host.offer(1, 2, 3, 4, 5), StartPull)
    for pull in pulls:
        host.pull_failed(pull, settled=pull is pulls[2])
    assert host.figure("slots_unsettled") == 4
    assert host.slots["staged"] == 4
    host.step(PullSettled(pulls[1].pull))
    assert (host.slots["staged"], host.figure("slots_unsettled")) == (2, 2)
    assert host.slots["reset"] == 6
    assert dropped(host) == {"pull_transfer_timeout": 5}


def test_a_guest_that_is_offered_here_becomes_a_block_of_ours() -> None:
    """What an engine of this host computes is no other host's any more: it is announced."""
    host = HostWithPeers()
    [pull] = host.ask_peers(1)
    host.came(pull)
    assert (host.figure("guests"), host.announced) == (1, set())
    pulled = told_pulled(host, host.offer(1))
    assert (pulled.skipped, host.announced) == (1, {1})
    assert host.figure("guests") == 0


def test_an_engine_without_a_scheduler_is_told_nothing() -> None:
    """Only its worker is attached: its offer is incomplete, and there is no way to say so."""
    host = Host(attach=False)
    host.greet(hello())
    assert host.offer(1) == []
    assert dropped(host) == {"offer_incomplete_engine": 1}


def test_what_fails_in_several_pulls_adds_up() -> None:
    """Three blocks, three pulls, two fail; then another offer finds no room, twice."""
    host = Host(batch_blocks_max=1)
    first, second, third = of(host.offer(1, 2, 3), StartPull)
    host.pull_failed(first)
    host.pull_failed(second)
    assert told_pulled(host, host.pulled(third)).failed == 2
    full = Host(slots=1)
    full.store(9)
    full.found(full.look_up(9))
    for times in (1, 2):
        assert told_pulled(full, full.offer(1, 2)).failed == 2
        assert dropped(full) == {"offer_no_room": 2 * times}


def test_pulled_goes_to_the_scheduler_half() -> None:
    host = Host()
    host.store(1)
    [told] = of(host.offer(1), ToEngine)
    assert told.connection == b"ada:1/scheduler"
