"""The connector's core, offload: what is offered is held, and every hold ends."""

from __future__ import annotations

from kvbm_common.identity import unpack_hashes
from kvbm_connectors.core.messages import OfferEnded

from tests.connectors.helpers import EPOCH, INCARNATION, LIMITS, NAMESPACE, Engine, name, numbers


def test_an_offer_from_the_engine_to_the_confirm() -> None:
    """1. The consolidator hears of two blocks. 2. They are pulled: the engine held them until now,

    says so, and frees them.
    """
    engine = Engine()
    offer = engine.offer(1, 2, priority=3)
    assert offer is not None
    [offered] = engine.offered
    [run] = offered.runs
    assert (offered.engine, offered.incarnation) == ("ada", INCARNATION)
    assert (offered.offer, offered.priority) == (offer, 3)
    assert (offered.namespace, offered.deadline_ms) == (
        NAMESPACE.digest,
        LIMITS.offer_deadline_ms,
    )
    assert run.parent == name(0)
    assert (numbers(unpack_hashes(run.hashes)), run.blocks) == ([1, 2], [1, 2])
    assert engine.held == {offer}
    engine.pulled(offer, 2)
    assert engine.confirms == [(offer, True)]
    assert engine.ended == [OfferEnded(offer, 2, complete=True)]
    assert engine.idle()
    assert engine.core.view.counts["offload_blocks"] == 2
    assert engine.core.view.counts["offers_ended.pulled"] == 1


def test_an_offer_that_nobody_wants_ends_without_a_confirm() -> None:
    """All of it was there already."""
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    engine.pulled(offer, 0, confirm=False, reason="busy")
    assert engine.confirms == []
    assert engine.ended == [OfferEnded(offer, 0, complete=True)]
    assert engine.core.view.counts["offers_ended.busy"] == 1


def test_an_offer_of_which_something_failed_is_not_complete() -> None:
    engine = Engine()
    offer = engine.offer(1, 2)
    assert offer is not None
    engine.pulled(offer, 1, failed=1, reason="no_room")
    assert engine.ended == [OfferEnded(offer, 1, complete=False)]


def test_an_offer_that_nobody_answers_ends_by_its_deadline() -> None:
    """The engine needs its blocks. A pull that ends after that is told that they were not held."""
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    assert engine.wait(LIMITS.offer_deadline_ms - 1) == []
    engine.wait(1)
    assert engine.ended == [OfferEnded(offer, 0)]
    assert engine.core.view.counts["offers_ended.deadline"] == 1
    engine.pulled(offer)
    assert engine.confirms == [(offer, False)]
    assert len(engine.ended) == 1


def test_a_revoked_offer_is_not_confirmed() -> None:
    """Preempted: the blocks are rewritten, so what was pulled is worthless."""
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    engine.revoke(offer)
    engine.revoke(offer)
    assert engine.ended == [OfferEnded(offer, 0)]
    engine.pulled(offer)
    assert engine.confirms == [(offer, False)]


def test_a_pull_is_confirmed_once() -> None:
    """A second question is answered with no: the blocks have been freed since."""
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    engine.pulled(offer)
    engine.pulled(offer)
    assert engine.confirms == [(offer, True), (offer, False)]
    assert len(engine.ended) == 1


def test_a_pull_of_what_was_never_offered_is_not_confirmed() -> None:
    engine = Engine()
    engine.pulled(99)
    assert engine.confirms == [(99, False)]
    assert engine.ended == []


def test_offers_are_bounded() -> None:
    """Four are in flight: the fifth is not made, and counted block by block."""
    engine = Engine()
    offers = [engine.offer(number) for number in range(1, 5)]
    assert None not in offers
    assert engine.offer(5, 6) is None
    assert engine.core.view.counts["offers_dropped_busy"] == 2
    assert offers[0] is not None
    engine.pulled(offers[0])
    assert engine.offer(5, 6) is not None
    assert len(engine.offered) == 5


def test_a_host_tier_that_goes_away_ends_every_offer() -> None:
    engine = Engine()
    offers = {engine.offer(1), engine.offer(2)}
    engine.detached()
    assert {ended.offer for ended in engine.ended} == offers
    assert engine.core.view.counts["offers_ended.host_tier_lost"] == 2


def test_offers_to_the_life_before_end_with_it() -> None:
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    engine.attached(EPOCH + 1)
    assert engine.ended == [OfferEnded(offer, 0)]
    engine.pulled(offer)
    assert engine.confirms == [(offer, False)]
    assert engine.offer(2) not in (None, offer)


def test_without_a_consolidator_nothing_is_offered() -> None:
    """Nobody would hear of it, and the engine would hold its blocks until the deadline.

    What was offered before goes on: the host tier may have it already. Lookups are not affected.
    """
    engine = Engine()
    offer = engine.offer(1)
    assert offer is not None
    engine.core.take_offers(taken=False)
    assert engine.offer(2, 3) is None
    assert engine.core.view.counts["offers_passed_through"] == 2
    assert engine.look_up(1) is None
    engine.pulled(offer)
    assert engine.confirms == [(offer, True)]
    engine.core.take_offers(taken=True)
    assert engine.offer(2, 3) is not None
