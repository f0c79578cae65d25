"""Lookups that only ask: an answer without a lease, and nothing that is told as a miss."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.wire.local import Lookup, Misses, Outcome, Release
from kvbm_connectors.core.messages import ConnectorMisuse, Hit

from tests.connectors.helpers import ANSWER_MS, Engine, answer, name, of


def ask(engine: Engine, *wanted: int, is_absent: bool | None = None) -> Hit | None:
    """Ask only, with the filter's word."""
    hit, effects = engine.core.lookup(
        "r", [name(n) for n in wanted], engine.now_ms, is_absent=is_absent, only_asks=True
    )
    engine.took(effects)
    return hit


def test_what_is_usable_is_a_hit_without_a_lease() -> None:
    engine = Engine()
    assert ask(engine, 1, 2, 3) is None
    [question] = of(engine.to_host, Lookup)
    assert question.only_asks
    assert question.request == ""
    engine.hear(msgspec.structs.replace(answer(question.lookup, 0), usable=2))
    assert ask(engine, 1, 2, 3) == Hit(2, host=2)
    with pytest.raises(ConnectorMisuse):
        engine.take(7, 8)
    engine.forget()
    assert of(engine.to_host, Release) == []
    assert engine.idle()


def test_an_older_host_tier_leases_and_gets_the_lease_back() -> None:
    """It does not know the field, and answers as to any lookup."""
    engine = Engine()
    ask(engine, 1, 2)
    engine.hear(answer(engine.lookups[0].lookup, 2, lease=55))
    assert ask(engine, 1, 2) == Hit(2, host=2)
    engine.forget()
    assert engine.released == [55]


@pytest.mark.parametrize(("only_asks", "usable"), [(False, 1), (True, 4)])
def test_a_number_that_was_not_asked_for_is_not_believed(*, only_asks: bool, usable: int) -> None:
    engine = Engine()
    if only_asks:
        ask(engine, 1, 2, 3)
    else:
        engine.look_up(1, 2, 3)
    engine.hear(msgspec.structs.replace(answer(engine.lookups[0].lookup, 0), usable=usable))
    assert engine.look_up(1, 2, 3) == Hit(0, reason="malformed")


def test_nothing_of_it_is_told() -> None:
    """Neither what the filter has answered, nor an answer that did not come."""
    engine = Engine()
    assert ask(engine, 1, is_absent=True) == Hit(0, reason="not_stored")
    engine.wait(1)
    assert ask(engine, 2) is None
    engine.wait(ANSWER_MS)
    assert ask(engine, 2) == Hit(0, reason="no_answer")
    assert [*of(engine.to_host, Misses), *of(engine.to_host, Outcome)] == []
