"""Lookups that the miss filter answers: nothing is asked, and all of it is told afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvbm_common.identity import unpack_hashes
from kvbm_common.tier.kv_groups import GroupRun, indispensable
from kvbm_common.wire.local import Lookup, Misses, Outcome
from kvbm_connectors.core.messages import ConnectorMisuse, Hit, Origin
from kvbm_connectors.core.outbox import BLOCKS_PER_MESSAGE, LOOKUPS_PER_MESSAGE, UNTOLD_LOOKUPS_MAX

from tests.connectors.helpers import LEASE_MS, LIMITS, Engine, answer, name, numbers, of

NOTHING = Hit(0, reason="not_stored")


def ask(
    engine: Engine,
    *wanted: int,
    request: str = "r",
    is_absent: bool | None = True,
    groups: Sequence[GroupRun] = (),
    origin: Origin | None = None,
) -> Hit | None:
    """Look up, with the filter's word."""
    hit, effects = engine.core.lookup(
        request, [name(n) for n in wanted], engine.now_ms, groups=groups,
        origin=origin or Origin(), is_absent=is_absent,
    )  # fmt: skip
    engine.took(effects)
    return hit


def told(engine: Engine) -> list[list[int]]:
    """The blocks of each missed lookup that the host tier has heard of."""
    lookups = [one for message in of(engine.to_host, Misses) for one in message.lookups]
    return [numbers(unpack_hashes(one.hashes)) for one in lookups]


def count(engine: Engine, counter: str) -> int:
    return engine.core.view.counts.get(counter, 0)


def test_a_miss_is_answered_in_the_call_and_told_at_the_next_tick() -> None:
    engine = Engine()
    assert ask(engine, 1, 2) == NOTHING
    assert not engine.to_host
    engine.wait(1)
    assert told(engine) == [[1, 2]]
    assert not of(engine.to_host, Lookup)
    engine.wait(1)
    assert len(engine.to_host) == 1
    assert (count(engine, "lookups"), count(engine, "lookups_at_once")) == (1, 1)


def test_a_tick_is_needed_for_misses_and_offers_alone() -> None:
    """Goal: an engine's call wakes no thread for a lookup by itself.

    1. One is asked of the host tier. 2. A miss is to be told. 3. Something is on offer."""
    engine = Engine()
    rests: list[bool] = []
    ask(engine, 5, request="asked", is_absent=None)
    rests.append(engine.core.view.may_rest)
    ask(engine, 1, 2)
    rests.append(engine.core.view.may_rest)
    engine.wait(1)
    rests.append(engine.core.view.may_rest)
    engine.offer(7)
    rests.append(engine.core.view.may_rest)
    assert rests == [True, False, True, False]


def test_a_request_that_asks_again_is_told_once() -> None:
    """vLLM asks again while it has no room. When a lease would have ended, it is another lookup."""
    engine = Engine()
    for _ in range(3):
        assert ask(engine, 1) == NOTHING
    engine.wait(LEASE_MS)
    assert ask(engine, 1) == Hit(0, reason="lease_ended")
    assert ask(engine, 1) == NOTHING
    engine.wait(1)
    assert told(engine) == [[1], [1]]


def test_other_blocks_of_a_request_are_another_lookup() -> None:
    engine = Engine()
    ask(engine, 1, 2)
    assert ask(engine, 3, 4) == NOTHING
    assert ask(engine, 5, is_absent=False) is None
    engine.wait(1)
    assert told(engine) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("is_absent", [False, None])
def test_without_a_no_it_asks(is_absent: bool | None) -> None:
    engine = Engine()
    assert ask(engine, 1, is_absent=is_absent) is None
    assert len(of(engine.to_host, Lookup)) == 1
    engine.wait(1)
    assert told(engine) == []


def test_hope_in_vain_is_told_by_number() -> None:
    """Only where the filter has spoken: a lookup that had no filter errs by nothing."""
    engine = Engine()
    for request, is_absent, found in (("a", False, 0), ("b", None, 0), ("c", False, 1)):
        ask(engine, 1, request=request, is_absent=is_absent)
        number = of(engine.to_host, Lookup)[-1].lookup
        engine.hear(answer(number, found))
    engine.wait(1)
    [misses] = of(engine.to_host, Misses)
    assert (misses.in_vain, misses.lookups, count(engine, "lookups_in_vain")) == (1, [], 1)


def test_of_what_it_has_offered_lately_it_asks() -> None:
    """The host tier may have it sooner than the filter is read; after that time it is believed."""
    engine = Engine()
    engine.offer(1, 2)
    assert ask(engine, 1) is None
    engine.forget()
    for _ in range(2):
        engine.wait(LIMITS.offer_deadline_ms + LIMITS.answer_margin_ms)
    assert ask(engine, 1) == NOTHING


def test_misses_are_told_before_their_blocks_are_offered() -> None:
    engine = Engine()
    ask(engine, 1)
    engine.offer(1)
    assert told(engine) == [[1]]


def test_many_misses_are_told_in_several_messages() -> None:
    """Bounded by their number, and by their blocks: one that is longer goes alone."""
    engine = Engine()
    for number in range(LOOKUPS_PER_MESSAGE + 1):
        ask(engine, 1, request=f"r{number}")
    for request in ("long", "longer"):
        ask(engine, *range(1, BLOCKS_PER_MESSAGE + 1), request=request)
    engine.wait(1)
    messages = [[len(one.hashes) // 16 for one in message.lookups]
                for message in of(engine.to_host, Misses)]  # fmt: skip
    assert messages == [[1] * LOOKUPS_PER_MESSAGE, [1], [BLOCKS_PER_MESSAGE], [BLOCKS_PER_MESSAGE]]


def test_too_many_misses_are_dropped_and_counted() -> None:
    engine = Engine()
    for number in range(UNTOLD_LOOKUPS_MAX + 2):
        assert ask(engine, 1, request=f"r{number}") == NOTHING
    engine.wait(1)
    assert len(told(engine)) == UNTOLD_LOOKUPS_MAX
    assert count(engine, "misses_not_told") == 2


def test_a_host_tier_that_is_gone_is_told_nothing() -> None:
    engine = Engine()
    ask(engine, 1)
    engine.detached()
    assert ask(engine, 1) == Hit(0, reason="no_host_tier")
    engine.attached(epoch=8)
    engine.wait(1)
    assert not engine.to_host
    assert count(engine, "misses_not_told") == 1


def test_nothing_can_be_taken_of_a_miss() -> None:
    engine = Engine()
    ask(engine, 1)
    with pytest.raises(ConnectorMisuse):
        engine.core.take("r", [0], engine.now_ms)
    engine.forget()
    assert engine.idle()


def test_avoided_blocks_are_told_with_the_miss() -> None:
    """A block that failed to load is not asked for; those before it are missed."""
    engine = Engine()
    engine.attached(explains=True)
    engine.found(2, request="failed")
    engine.load_ended(engine.take(0, request="failed"), 0)
    ask(engine, 1, 2, 3, origin=Origin(b"c" * 16, "trace", 7, "parent"))
    engine.wait(1)
    [missed] = of(engine.to_host, Misses)[-1].lookups
    assert (numbers(unpack_hashes(missed.hashes)), missed.avoided) == ([1], 2)
    assert (missed.request, missed.content) == ("r", b"c" * 16)
    assert (missed.trace, missed.sent_us, missed.parent) == ("trace", 7, "parent")
    assert of(engine.to_host, Outcome)


def test_of_groups_the_first_block_of_each_prefix_is_needed() -> None:
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1), GroupRun(8, 1), GroupRun(4, 0)]
    names = [name(n) for n in (1, 2, 11, 12, 21)]
    assert indispensable(groups, names) == [name(1), name(21)]
    assert indispensable([GroupRun(4, 5, 1)], names) == []
    assert indispensable((), names) == [name(1)]
    assert indispensable((), []) == []


def test_a_lookup_over_groups_is_told_with_its_groups() -> None:
    engine = Engine()
    groups = [GroupRun(4, 2), GroupRun(4, 2, 1)]
    assert ask(engine, 1, 2, 11, 12, groups=groups) == NOTHING
    engine.wait(1)
    [missed] = of(engine.to_host, Misses)[-1].lookups
    assert missed.groups == groups
