"""What a connector tells a host tier that explains, and that it tells nothing to another."""

from __future__ import annotations

import pytest
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local import Lookup, Outcome
from kvbm_connectors.core.messages import LoadResult, Origin

from tests.connectors.helpers import ANSWER_MS, LEASE_MS, Engine, answer, name, of


def outcomes(engine: Engine) -> list[tuple[str, str, int, bool]]:
    """(request, reason, blocks, whether a lookup was sent)."""
    told = of(engine.to_host, Outcome)
    return [(one.request, one.reason, one.blocks, one.lookup > 0) for one in told]


def explained() -> Engine:
    """An engine whose host tier explains."""
    engine = Engine()
    engine.attached(explains=True)
    return engine


def ask(engine: Engine, request: str, *wanted: int, origin: Origin | None = None) -> str:
    """Look up; returns the reason of a hit, "asked" when none is there yet."""
    names = [name(number) for number in wanted]
    hit, effects = engine.core.lookup(request, names, engine.now_ms, origin=origin or Origin())
    engine.took(effects)
    return "asked" if hit is None else hit.reason


def last_lookup(engine: Engine) -> Lookup:
    """The last one that was sent."""
    return of(engine.to_host, Lookup)[-1]


def loaded(engine: Engine, request: str, *, intact: bool, corrupt: bool = False,
           reason: str = "") -> None:  # fmt: skip
    """A load of one block ends."""
    ask(engine, request, 1)
    engine.took(engine.core.found(answer(last_lookup(engine).lookup, 1)))
    load = engine.core.take(request, [0], engine.now_ms)
    result = LoadResult(load, (intact,), (0,) if corrupt else (), reason)
    engine.took(engine.core.load_ended(result, engine.now_ms))


def test_a_lookup_says_who_asks_and_what_for() -> None:
    engine = explained()
    ask(engine, "cmpl-1", 1, origin=Origin(b"c" * 16, "trace", 7, "parent"))
    sent = last_lookup(engine)
    assert (sent.request, sent.content) == ("cmpl-1", b"c" * 16)
    assert (sent.trace, sent.sent_us, sent.parent) == ("trace", 7, "parent")


def test_who_does_not_explain_is_told_nothing() -> None:
    engine = Engine()
    ask(engine, "cmpl-1", 1, origin=Origin(b"c" * 16))
    assert (last_lookup(engine).request, last_lookup(engine).content) == ("", b"")
    loaded(engine, "s", intact=False)
    assert outcomes(engine) == []


def test_no_answer() -> None:
    engine = explained()
    ask(engine, "r", 1, 2)
    engine.wait(ANSWER_MS)
    assert ask(engine, "r", 1, 2) == "no_answer"
    assert outcomes(engine) == [("r", "no_answer", 2, True)]


def test_a_lease_that_ended_before_it_was_used() -> None:
    engine = explained()
    ask(engine, "r", 1)
    engine.took(engine.core.found(answer(last_lookup(engine).lookup, 1)))
    engine.wait(LEASE_MS)
    assert ask(engine, "r", 1) == "lease_ended"
    assert outcomes(engine) == [("r", "lease_ended", 1, True)]


@pytest.mark.parametrize(
    ("corrupt", "reason", "expected"),
    [(True, "corrupt", "corrupt"), (False, "lease_ended", "lease_ended"),
     (False, "transfer_timeout", "load_failed")],
)  # fmt: skip
def test_a_load_that_failed_and_what_follows(corrupt: bool, reason: str, expected: str) -> None:
    """The block is avoided afterwards: in part (the lookup says so), or as a whole (told)."""
    engine = explained()
    loaded(engine, "r", intact=False, corrupt=corrupt, reason=reason)
    assert outcomes(engine) == [("r", expected, 1, True)]
    assert ask(engine, "s", 1) == "avoided"
    assert outcomes(engine)[1:] == [("s", "avoided", 1, False)]
    ask(engine, "t", 2, 1, 3)
    assert last_lookup(engine).avoided == 2


def test_a_long_prompt_tells_each_block_once() -> None:
    """1. What a lookup has no room for. 2. Its first block has failed: the others are avoided."""
    engine = explained()
    loaded(engine, "r", intact=False)
    over = 7
    assert ask(engine, "s", *range(1, MATCH_BLOCKS_MAX + over + 1)) == "avoided"
    assert outcomes(engine)[1:] == [
        ("s", "too_long", over, False), ("s", "avoided", MATCH_BLOCKS_MAX, False),
    ]  # fmt: skip


def test_a_lone_surrogate_in_a_name_is_a_question_mark() -> None:
    engine = explained()
    ask(engine, "r\ud800", 1)
    assert last_lookup(engine).request == "r?"


def test_a_load_that_went_well_is_no_news() -> None:
    engine = explained()
    loaded(engine, "r", intact=True)
    assert outcomes(engine) == []


def test_an_answer_that_is_not_believed() -> None:
    engine = explained()
    ask(engine, "r", 1)
    engine.took(engine.core.found(answer(last_lookup(engine).lookup, 2)))
    assert outcomes(engine) == [("r", "malformed", 2, True)]


def test_a_long_request_id_is_cut() -> None:
    engine = explained()
    ask(engine, "x" * 1000, 1)
    assert last_lookup(engine).request == "x" * 256
