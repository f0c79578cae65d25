"""The connector's core at its edges: whole messages, exact instants, counts that add up."""

from __future__ import annotations

import pytest
from kvbm_common.checksum import pack_sums
from kvbm_common.config.settings import Settings
from kvbm_common.identity import pack_hashes
from kvbm_common.wire.consolidator import Offered, OfferedRun
from kvbm_common.wire.local import Confirm, Lookup, Outcome, Release
from kvbm_connectors.core.core import ConnectorCore
from kvbm_connectors.core.messages import (
    ConnectorLimits,
    ConnectorMisuse,
    Hit,
    OfferEnded,
    Origin,
    ToHost,
)
from kvbm_connectors.core.outbox import REQUEST_CHARS_MAX

from tests.connectors.helpers import (
    ANSWER_MS,
    EPOCH,
    INCARNATION,
    LEASE_MS,
    LIMITS,
    NAMESPACE,
    Engine,
    answer,
    name,
    of,
)


def counted(engine: Engine, prefix: str) -> dict[str, int]:
    """The counters whose names begin so, and that have counted."""
    return {key: n for key, n in engine.core.view.counts.items() if key.startswith(prefix) and n}


# --- messages -----------------------------------------------------------------------------------


def test_the_configuration_bounds_the_core() -> None:
    settings = Settings.load(
        {}, {"lease_ms": 110, "onboard_deadline_ms": 120, "offer_deadline_ms": 130}
    )
    assert ConnectorLimits.of(settings) == ConnectorLimits(
        lease_ms=110, onboard_deadline_ms=120, offer_deadline_ms=130
    )


def test_every_field_of_a_lookup() -> None:
    """To a host tier that explains, with a deadline of its own and a name of 300 characters."""
    engine = Engine()
    engine.attached(explains=True)
    engine.core.lookup("bad", [name(2)], 1_000)
    engine.hear(answer(1, 1))
    engine.load_ended(engine.take(0, request="bad"), 0)
    request = "x" * (REQUEST_CHARS_MAX + 44)
    origin = Origin(b"c" * 16, "trace", 7, "parent")
    hit, effects = engine.core.lookup(
        request, [name(1), name(2), name(3)], 1_000, onboard_deadline_ms=30, origin=origin
    )
    engine.took(effects)
    assert hit is None
    assert engine.lookups[-1] == Lookup(
        engine="ada", incarnation=INCARNATION, lookup=2, namespace=NAMESPACE.digest,
        hashes=pack_hashes([name(1)]), lease_ms=30 + LIMITS.lease_ms, deadline_ms=30,
        request="x" * REQUEST_CHARS_MAX, content=b"c" * 16, avoided=2, trace="trace", sent_us=7,
        parent="parent",
    )  # fmt: skip
    assert engine.core.view.counts["avoided_blocks"] == 2


def test_every_field_of_an_outcome_a_release_and_a_confirm() -> None:
    engine = Engine()
    engine.attached(explains=True)
    request = "x" * (REQUEST_CHARS_MAX + 1)
    assert engine.found(1, 2, request=request).blocks == 2
    lookup = engine.lookups[-1].lookup
    load = engine.take(0, 1, request=request)
    engine.load_ended(load, corrupt=[1])
    assert of(engine.to_host, Outcome) == [
        Outcome(engine="ada", incarnation=INCARNATION, request="x" * REQUEST_CHARS_MAX,
                lookup=lookup, reason="corrupt", blocks=1)
    ]  # fmt: skip
    assert of(engine.to_host, Release) == [
        Release(engine="ada", incarnation=INCARNATION, lease=100 + lookup, corrupt=[1])
    ]
    offer = engine.offer(7)
    assert offer is not None
    engine.pulled(offer)
    assert of(engine.to_host, Confirm) == [
        Confirm(engine="ada", incarnation=INCARNATION, offer=offer, held=True)
    ]


def test_every_field_of_an_offer() -> None:
    engine = Engine()
    offer = engine.offer(4, 5, priority=9)
    assert offer == 1
    assert engine.offered == [
        Offered(
            engine="ada", incarnation=INCARNATION, offer=1, namespace=NAMESPACE.digest,
            deadline_ms=LIMITS.offer_deadline_ms, priority=9,
            runs=[OfferedRun(parent=name(3), hashes=pack_hashes([name(4), name(5)]),
                             blocks=[4, 5])],
        )
    ]  # fmt: skip
    assert engine.offer(6) == 2
    assert engine.offered[-1].priority == 0
    hit, effects = engine.core.offer([], engine.now_ms)
    engine.held.add(3)
    engine.took(effects)
    assert (hit, engine.offered[-1].priority) == (3, 0)


def test_a_load_carries_what_was_found() -> None:
    """Two of three blocks: slots, checksums and hashes are cut, the rest is as found."""
    engine = Engine()
    engine.found(1, 2, 3)
    load = engine.take(70, 71)
    assert (load.request, load.lookup, load.lease) == ("r", 1, 101)
    assert (load.slots, load.checksums, load.blocks) == (
        (10, 11), (pack_sums([0]), pack_sums([1])), (70, 71),
    )  # fmt: skip
    assert load.hashes == (name(1), name(2))
    assert load.deadline_ms == engine.now_ms + LEASE_MS


# --- instants -----------------------------------------------------------------------------------


def test_an_answer_is_awaited_up_to_the_very_last_moment() -> None:
    engine = Engine()
    assert engine.look_up(1) is None
    engine.now_ms += ANSWER_MS - 1
    assert engine.look_up(1) is None
    engine.now_ms += 1
    assert engine.look_up(1) == Hit(0, reason="no_answer")
    assert engine.core.view.counts["lookups_unanswered"] == 1


def test_a_hit_is_told_up_to_the_end_of_its_lease() -> None:
    """Then its lease goes back, once."""
    engine = Engine()
    engine.attached(explains=True)
    engine.found(1, 2)
    engine.now_ms += LEASE_MS - 1
    assert engine.look_up(1, 2) == Hit(2, host=2)
    engine.now_ms += 1
    assert engine.look_up(1, 2) == Hit(0, reason="lease_ended")
    assert engine.released == [101]
    [told] = of(engine.to_host, Outcome)
    assert (told.reason, told.lookup, told.blocks) == ("lease_ended", 1, 2)


def test_an_offer_ends_at_its_deadline_and_not_before() -> None:
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    assert engine.wait(LIMITS.offer_deadline_ms - 1) == []
    assert engine.wait(1) == [OfferEnded(offer, 0, False)]
    assert counted(engine, "offers_ended") == {"offers_ended.deadline": 1}


def test_an_offer_is_complete_when_no_block_of_it_has_failed() -> None:
    engine = Engine()
    for failed, complete in ((0, True), (1, False)):
        offer = engine.offer(1)
        assert offer is not None
        assert engine.pulled(offer, 3, failed=failed)[-1] == OfferEnded(offer, 3, complete)
    revoked = engine.offer(2)
    assert revoked is not None
    engine.revoke(revoked)
    assert engine.ended[-1] == OfferEnded(revoked, 0, False)


# --- moving to another host tier ----------------------------------------------------------------


def test_while_it_moves_nothing_new_begins_and_what_runs_goes_on() -> None:
    """1. A lookup, an offer. 2. Moved: others pass through. 3. It may leave when both ended."""
    engine = Engine()
    assert engine.look_up(1) is None
    offer = engine.offer(1)
    assert offer is not None
    engine.core.moved(engine.now_ms, 300)
    assert engine.look_up(2, request="s") == Hit(0, reason="moving")
    assert engine.offer(2) is None
    assert not engine.may_leave()
    engine.hear(answer(1, 1))
    assert engine.look_up(1) == Hit(1, host=1)
    engine.pulled(offer)
    assert not engine.may_leave()
    load = engine.take(0)
    engine.forget()
    assert not engine.may_leave(), "a load is under way"
    engine.load_ended(load)
    assert engine.may_leave()
    assert engine.core.view.counts["lookups_passed_through"] == 1
    assert engine.core.view.counts["offers_passed_through"] == 1


def test_each_thing_under_way_alone_keeps_it() -> None:
    """Only a question, only an offer, only a load."""
    asked, offering, loading = Engine(), Engine(), Engine()
    asked.look_up(1)
    assert not asked.may_leave()
    asked.forget()
    assert asked.may_leave()
    offering.offer(1)
    assert not offering.may_leave()
    loading.found(1)
    loading.take(0)
    assert not loading.may_leave()


def test_what_has_not_ended_in_time_is_given_up_once() -> None:
    """At 299 it waits, at 300 it has ended; a lookup that was found becomes a load that fails."""
    engine = Engine()
    engine.found(1)
    assert engine.look_up(2, request="s") is None
    offer = engine.offer(3)
    assert offer is not None
    engine.core.moved(engine.now_ms, 300)
    assert engine.wait(299) == []
    assert not engine.may_leave()
    assert engine.wait(1) == [OfferEnded(offer, 0, False)]
    assert engine.may_leave()
    assert counted(engine, "lookups_dropped") == {"lookups_dropped.moved": 2}
    assert counted(engine, "offers_ended") == {"offers_ended.moved": 1}
    assert engine.wait(1) == []
    assert counted(engine, "lookups_dropped") == {"lookups_dropped.moved": 2}
    assert engine.take(0).epoch == EPOCH
    assert engine.look_up(4, request="t") == Hit(0, reason="moving")


def test_a_welcome_ends_a_move() -> None:
    """Moves are counted, also before there is a host tier: then there is nothing to leave."""
    engine = Engine(attach=False)
    engine.core.moved(engine.now_ms, 300)
    engine.attached()
    assert engine.look_up(1, request="q") is None
    engine.core.moved(engine.now_ms, 300)
    engine.core.moved(engine.now_ms, 300)
    assert engine.core.view.counts["moves"] == 3
    engine.attached()
    assert engine.look_up(2) is None
    engine.core.moved(engine.now_ms, 300)
    engine.detached()
    engine.attached()
    assert engine.look_up(3, request="s") is None


# --- lives of the host tier ---------------------------------------------------------------------


def test_each_way_to_lose_the_host_tier_is_counted_by_its_name() -> None:
    """Three lookups are dropped: one by silence, two by another life."""
    engine = Engine()
    engine.look_up(1)
    engine.offer(1)
    engine.detached()
    engine.detached()
    assert counted(engine, "lookups_dropped") == {"lookups_dropped.host_tier_lost": 1}
    assert counted(engine, "offers_ended") == {"offers_ended.host_tier_lost": 1}
    engine.attached()
    for request in ("r", "s"):
        engine.look_up(1, request=request)
    engine.attached(EPOCH)
    assert counted(engine, "lookups_dropped") == {"lookups_dropped.host_tier_lost": 1}
    engine.attached(EPOCH + 1)
    assert counted(engine, "lookups_dropped") == {
        "lookups_dropped.host_tier_lost": 1, "lookups_dropped.host_tier_restarted": 2,
    }  # fmt: skip


def test_blocks_that_failed_are_avoided_until_the_arena_is_another() -> None:
    """Silence in between changes nothing; another life does."""
    engine = Engine()
    engine.found(1)
    engine.load_ended(engine.take(0), 0)
    engine.detached()
    engine.attached()
    assert engine.look_up(1) == Hit(0, reason="avoided")
    engine.attached(EPOCH + 1)
    assert engine.look_up(1) is None


def test_a_load_of_a_former_life_gives_nothing_back_and_is_not_held_against_the_block() -> None:
    engine = Engine()
    engine.attached(explains=True)
    engine.found(1)
    load = engine.take(0)
    engine.attached(EPOCH + 1)
    engine.load_ended(load, 0)
    assert (engine.released, of(engine.to_host, Outcome)) == ([], [])
    assert engine.look_up(1) is None
    assert engine.core.view.counts["load_failed_blocks"] == 1


# --- counts and misuse --------------------------------------------------------------------------


def test_counts_add_up() -> None:
    """Everything twice."""
    engine = Engine()
    for round_ in (1, 2):
        engine.found(1, 2, 3)
        engine.load_ended(engine.take(0, 1, 2), 2)
        engine.wait(LIMITS.avoid_ms)
        offer = engine.offer(5, 6)
        assert offer is not None
        engine.pulled(offer, 2)
        engine.look_up(9, request="late")
        engine.now_ms += ANSWER_MS
        engine.look_up(9, request="late")
        engine.found(8, request="slow")
        engine.now_ms += LEASE_MS
        engine.look_up(8, request="slow")
        engine.hear(answer(999, 1))
        engine.look_up(7, request="wrong")
        engine.hear(answer(engine.lookups[-1].lookup, 2))
        engine.forget("wrong")
        assert {key: n / round_ for key, n in engine.core.view.counts.items() if n} == {
            "lookups": 4, "loads": 1, "loaded_blocks": 2, "load_failed_blocks": 1,
            "offered_blocks": 2, "offers_ended.pulled": 1, "offload_blocks": 2,
            "lookups_unanswered": 1, "lookups_outlived_lease": 1, "answers_unwanted": 1,
            "answers_malformed": 1,
        }  # fmt: skip


def test_what_is_not_offered_is_counted_by_its_blocks() -> None:
    engine = Engine()
    for _ in range(LIMITS.offers_max):
        assert engine.offer(1) is not None
    for _ in range(2):
        assert engine.offer(2, 3) is None
    assert engine.core.view.counts["offers_dropped_busy"] == 4
    engine.core.take_offers(taken=False)
    for _ in range(2):
        assert engine.offer(2, 3, 4) is None
    assert engine.core.view.counts["offers_passed_through"] == 6


def test_passing_through_says_why_and_is_counted() -> None:
    engine = Engine(attach=False)
    for _ in range(2):
        assert engine.look_up(1) == Hit(0, reason="no_host_tier")
    assert engine.core.view.counts["lookups_passed_through"] == 2
    engine.attached()
    engine.core.moved(engine.now_ms, 300)
    assert engine.look_up(1) == Hit(0, reason="moving")
    assert engine.core.view.counts["lookups_passed_through"] == 3


def test_avoided_blocks_end_a_lookup_and_are_told() -> None:
    """1 failed: 1, 2 is answered without asking. 3, 1 is asked for 3 only. Nothing is no miss."""
    engine = Engine()
    engine.attached(explains=True)
    engine.found(1)
    engine.load_ended(engine.take(0), 0)
    engine.to_host.clear()
    assert engine.look_up(1, 2) == Hit(0, reason="avoided")
    [told] = of(engine.to_host, Outcome)
    assert (told.request, told.lookup, told.reason, told.blocks) == ("r", 0, "avoided", 2)
    assert engine.look_up(3, 1) is None
    assert engine.asked() == [3]
    assert engine.core.view.counts["avoided_blocks"] == 3
    assert engine.look_up(request="empty") == Hit(0)
    assert len(of(engine.to_host, Outcome)) == 1


@pytest.mark.parametrize("blocks", [(), (0, 1)], ids=["none", "more than found"])
def test_a_load_of_another_size_is_misuse(blocks: tuple[int, ...]) -> None:
    """It names the request; then the right one goes through."""
    engine = Engine()
    engine.found(1)
    with pytest.raises(ConnectorMisuse, match=f"request r: {len(blocks)} of 1 blocks"):
        engine.take(*blocks)
    assert engine.take(0).slots == (10,)
    for request in ("r", "unknown"):
        with pytest.raises(ConnectorMisuse, match=f"request {request} has nothing to load"):
            engine.take(0, request=request)


def test_a_namespace_has_32_bytes() -> None:
    for length in (31, 33):
        with pytest.raises(AssertionError):
            ConnectorCore(engine="a", incarnation="1", namespace=bytes(length))
    core = ConnectorCore(engine="a", incarnation="1", namespace=bytes(32))
    core.attached(EPOCH)
    [asked] = core.lookup("r", [name(1)], 0)[1]
    assert isinstance(asked, ToHost)
    assert isinstance(asked.message, Lookup)
    limits = ConnectorLimits()
    assert asked.message.deadline_ms == limits.onboard_deadline_ms
    assert asked.message.lease_ms == limits.onboard_deadline_ms + limits.lease_ms


def test_an_offer_that_is_revoked_ends_with_the_reason_that_is_given() -> None:
    """`revoked` where none is; and one that has ended is not ended again."""
    engine = Engine()
    first, second = engine.offer(1), engine.offer(2)
    assert first is not None
    assert second is not None
    engine.revoke(first)
    engine.took(engine.core.revoke(second, "preempted"))
    engine.revoke(first)
    assert counted(engine, "offers_ended") == {
        "offers_ended.revoked": 1, "offers_ended.preempted": 1,
    }  # fmt: skip


def test_a_core_is_idle_without_offers_and_without_requests() -> None:
    asking, offering = Engine(), Engine()
    assert asking.idle()
    asking.look_up(1)
    offering.offer(1)
    assert not asking.idle()
    assert not offering.idle()


def test_answers_of_another_life_are_unwanted_and_counted() -> None:
    """Also one that was asked for; the engine asks again."""
    engine = Engine()
    for times in (1, 2):
        assert engine.look_up(1) is None
        engine.hear(answer(engine.lookups[-1].lookup, 1, epoch=EPOCH + 1))
        assert engine.core.view.counts["answers_unwanted"] == times
    assert engine.released == []
    engine.hear(answer(999, 1, epoch=EPOCH + 1))
    assert (engine.core.view.counts["answers_unwanted"], engine.released) == (3, [])


def test_a_hit_that_waits_for_a_host_tier_is_dropped_by_the_next_welcome() -> None:
    """It was found, its host tier went silent and came back as another life."""
    engine = Engine()
    engine.found(1)
    engine.detached()
    engine.attached(EPOCH + 1)
    assert counted(engine, "lookups_dropped") == {
        "lookups_dropped.host_tier_lost": 1, "lookups_dropped.attached": 1,
    }  # fmt: skip
    assert engine.take(0).epoch == EPOCH
