"""The connector's core when its host tier comes, goes, is silent, or is another one."""

from __future__ import annotations

from kvbm_connectors.core.messages import Hit

from tests.connectors.helpers import (
    EPOCH,
    Engine,
    answer,
)


def test_without_a_host_tier_everything_passes_through() -> None:
    """Lookups are answered at once, offers are not made: the engine computes, as without us."""
    engine = Engine(attach=False)
    assert engine.look_up(1, 2) == Hit(0, reason="no_host_tier")
    assert engine.offer(1) is None
    assert engine.to_host == engine.to_events == []
    assert engine.core.view.counts["lookups_passed_through"] == 1
    assert engine.core.view.counts["offers_passed_through"] == 1
    engine.attached()
    assert engine.look_up(1, 2) is None
    assert engine.offer(1) is not None


def test_a_host_tier_that_goes_away_answers_every_question_with_a_miss() -> None:
    engine = Engine()
    engine.look_up(1)
    engine.detached()
    assert engine.look_up(1) == Hit(0, reason="no_host_tier")
    assert engine.idle()
    assert engine.core.view.counts["lookups_dropped.host_tier_lost"] == 1


def test_a_hit_whose_host_tier_goes_away_may_still_be_taken() -> None:
    """The engine had been told. Its load fails in the worker, and nothing is given back twice."""
    engine = Engine()
    engine.found(1, 2)
    engine.detached()
    load = engine.take(8, 9)
    assert load.epoch == EPOCH
    engine.load_ended(load, 0, 1)
    assert engine.released == []
    assert engine.idle()


def test_a_lost_hit_that_is_asked_for_again_is_a_new_question() -> None:
    engine = Engine()
    engine.found(1)
    engine.attached(EPOCH + 1)
    assert engine.look_up(1) is None
    assert engine.released == []  # That lease ended with its arena.
    engine.hear(answer(engine.lookups[1].lookup, 1, epoch=EPOCH + 1))
    assert engine.look_up(1) == Hit(1, host=1)


def test_a_lost_hit_of_the_same_life_gives_its_lease_back() -> None:
    """It was only silent for a while: its slots are still pinned."""
    engine = Engine()
    engine.found(1)
    engine.detached()
    engine.attached()
    engine.forget()
    assert len(engine.released) == 1
    assert engine.idle()


def test_the_same_life_welcomes_twice() -> None:
    """A repeated hello changes nothing."""
    engine = Engine()
    engine.found(1)
    offer = engine.offer(1)
    engine.attached()
    assert engine.look_up(1) == Hit(1, host=1)
    assert engine.held == {offer}


def test_an_answer_of_another_life_is_asked_for_again() -> None:
    """Its lease id may mean another lease by now: it is not given back."""
    engine = Engine()
    engine.look_up(1)
    engine.hear(answer(engine.lookups[0].lookup, 1, epoch=EPOCH - 1))
    assert engine.released == []
    assert engine.look_up(1) is None
    assert len(engine.lookups) == 2


def test_a_load_of_the_life_before_is_neither_given_back_nor_avoided() -> None:
    engine = Engine()
    engine.found(1)
    load = engine.take(9)
    engine.attached(EPOCH + 1)
    engine.load_ended(load, 0)
    assert engine.released == []
    assert engine.look_up(1) is None


def test_a_silence_does_not_make_a_bad_block_good() -> None:
    """The same life is back, with the same arena."""
    engine = Engine()
    engine.found(1)
    engine.load_ended(engine.take(9), 0)
    engine.detached()
    engine.attached()
    assert engine.look_up(1) == Hit(0, reason="avoided")
