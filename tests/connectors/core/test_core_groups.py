"""The connector's core over several KV groups: a hit is loaded as a whole, or not at all.

A block has four tokens. The full group's blocks are 1, 2, 3; those of the group with a window of
one block are 11, 12, 13: a hit of 12 tokens needs 1, 2, 3 and 13.
"""

from __future__ import annotations

import pytest
from kvbm_common.identity import unpack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local import Found, Lookup, to_host_tier
from kvbm_connectors.core.messages import ConnectorMisuse, Hit, LoadResult, OfferRun

from tests.connectors.helpers import BLOCK_BYTES, EPOCH, LIMITS, NAMESPACE, Engine, name, numbers

GROUPS = [GroupRun(4, 3), GroupRun(4, 3, 1)]
WANTED = (1, 2, 3, 11, 12, 13)


def ask(engine: Engine) -> Hit | None:
    return engine.look_up(*WANTED, groups=GROUPS)


def answer(engine: Engine, boundary: int, count: int, *, shared: int = 12) -> None:
    """The host tier has `count` blocks, for a hit of `boundary` tokens."""
    lookup = engine.lookups[-1].lookup
    engine.hear(
        Found(
            lookup=lookup, epoch=EPOCH, lease=50 if count else 0, slots=list(range(10, 10 + count)),
            checksums=list(range(count)), block_bytes=BLOCK_BYTES if count else 0,
            boundary=boundary, shared=shared, reason="" if boundary == 12 else "not_stored",
        )
    )  # fmt: skip


def found(engine: Engine, boundary: int, count: int) -> Hit:
    assert ask(engine) is None
    answer(engine, boundary, count)
    hit = ask(engine)
    assert hit is not None
    return hit


def test_a_prompt_too_long_for_a_lookup_is_asked_for_as_far_as_it_goes() -> None:
    """Goal: what a host tier is sent, it can read. 72,000 blocks of two groups, of one 90,000."""
    engine = Engine()
    groups = [GroupRun(4, 48_000), GroupRun(8, 24_000, 2)]
    assert engine.look_up(*range(1, 72_001), groups=groups) is None
    question = to_host_tier.decode(to_host_tier.encode(engine.lookups[-1]))
    assert isinstance(question, Lookup)
    asked = [43_690, 21_845]  # 174,760 tokens; one boundary more would be 65,538 blocks.
    assert [one.blocks for one in question.groups] == asked
    assert engine.asked() == [*range(1, 1 + asked[0]), *range(48_001, 48_001 + asked[1])]
    engine = Engine()
    assert engine.look_up(*range(1, 90_001)) is None
    assert engine.asked() == list(range(1, MATCH_BLOCKS_MAX + 1))
    assert engine.core.view.counts["blocks_not_asked_for"] == 90_000 - MATCH_BLOCKS_MAX


def test_a_hit_is_taken_with_the_names_of_what_it_needs() -> None:
    engine = Engine()
    assert found(engine, 8, 3) == Hit(3, host=3, reason="not_stored", boundary=8, shared=12)
    [question] = engine.lookups
    assert (question.groups, engine.asked()) == (GROUPS, list(WANTED))
    load = engine.take(70, 71, 72)
    assert (load.whole, load.slots, load.blocks) == (True, (10, 11, 12), (70, 71, 72))
    assert load.hashes == (name(1), name(2), name(12))
    engine.load_ended(load)
    assert engine.released == [50]
    assert engine.idle()


def test_a_part_of_a_hit_cannot_be_taken() -> None:
    engine = Engine()
    found(engine, 12, 4)
    with pytest.raises(ConnectorMisuse, match="2 of 4 blocks"):
        engine.take(70, 71)
    assert engine.take(70, 71, 72, 73).whole


@pytest.mark.parametrize(("boundary", "count"), [(12, 3), (12, 5), (6, 3), (16, 4), (8, 0), (0, 1)])
def test_an_answer_that_does_not_fit_its_boundary_is_not_believed(
    boundary: int, count: int
) -> None:
    engine = Engine()
    hit = found(engine, boundary, count)
    assert (hit.blocks, hit.boundary, hit.reason) == (0, 0, "malformed")
    assert engine.released == ([50] if count else [])
    assert engine.core.view.counts["answers_malformed"] == 1


@pytest.mark.parametrize("shared", [4, 7, 10, 13, 16])
def test_where_prompts_part_is_a_boundary_behind_the_hit(shared: int) -> None:
    """Goal: windows are held before that boundary, so that a wrong number must not get so far."""
    engine = Engine()
    assert ask(engine) is None
    answer(engine, 8, 3, shared=shared)
    assert ask(engine) == Hit(0, reason="malformed")
    assert engine.released == [50]


def test_an_answer_without_groups_has_no_boundary() -> None:
    engine = Engine()
    assert engine.look_up(1, 2) is None
    answer(engine, 0, 2, shared=4)
    assert engine.look_up(1, 2) == Hit(0, reason="malformed")


def test_a_host_tier_that_does_not_say_where_prompts_part_is_believed() -> None:
    engine = Engine()
    assert ask(engine) is None
    answer(engine, 8, 3, shared=0)
    assert ask(engine) == Hit(3, host=3, reason="not_stored", boundary=8)


def test_nothing_found_is_an_answer() -> None:
    engine = Engine()
    assert found(engine, 0, 0) == Hit(0, reason="not_stored", shared=12)


def test_if_one_block_fails_none_can_be_used() -> None:
    engine = Engine()
    found(engine, 12, 4)
    load = engine.take(70, 71, 72, 73)
    result = LoadResult(load, (True, True, True, False), (3,))
    assert (result.usable, LoadResult(load, (True,) * 4).usable) == (0, 4)


def test_behind_a_failed_block_nothing_is_asked_for_in_any_group() -> None:
    """Goal: an engine that recomputes asks again at once; the same bad block would come again.

    1. 13 has failed: the longest hit that is asked for ends before it, in both groups.
    2. 1 has failed: nothing is asked for.
    3. The time is over: everything is.
    """
    engine = Engine()
    found(engine, 12, 4)
    engine.load_ended(engine.take(70, 71, 72, 73), corrupt=[3])
    assert ask(engine) is None
    assert engine.asked() == [1, 2, 11, 12]
    assert engine.lookups[-1].groups == [GroupRun(4, 2), GroupRun(4, 2, 1)]
    assert engine.core.view.counts["avoided_blocks"] == 2
    answer(engine, 8, 3, shared=8)
    assert ask(engine) == Hit(3, host=3, reason="not_stored", boundary=8, shared=8)
    engine.load_ended(engine.take(70, 71, 72), corrupt=[0])
    assert ask(engine) == Hit(0, reason="avoided")
    engine.wait(LIMITS.avoid_ms)
    assert ask(engine) is None
    assert engine.asked() == list(WANTED)


def test_a_failed_block_of_a_window_hides_neither_a_larger_hit_nor_a_smaller_one() -> None:
    """Goal: 12 has failed, and a hit of 12 tokens does not need it: it is asked for.

    A hit of 8 tokens does. Where that is the answer it goes back, and what is asked next cannot
    need it: a hit of 4 tokens.
    """
    engine = Engine()
    found(engine, 8, 3)
    engine.load_ended(engine.take(70, 71, 72), corrupt=[2])
    assert found(engine, 12, 4).boundary == 12
    engine.load_ended(engine.take(70, 71, 72, 73))
    assert ask(engine) is None
    answer(engine, 8, 3)
    assert engine.released == [50, 50, 50]
    assert ask(engine) is None
    assert engine.asked() == [1, 11]
    answer(engine, 4, 2, shared=4)
    assert ask(engine) == Hit(2, host=2, reason="not_stored", boundary=4, shared=4)
    engine.load_ended(engine.take(70, 71))
    assert engine.idle()


def test_the_blocks_of_a_group_are_offered_under_its_namespace() -> None:
    engine = Engine()
    run = OfferRun(name(0), (name(1),), (1,))
    for namespace in (b"", b"g" * 32):
        offer, effects = engine.core.offer([run], engine.now_ms, namespace=namespace)
        assert offer is not None
        engine.held.add(offer)
        engine.took(effects)
    assert [one.namespace for one in engine.offered] == [NAMESPACE.digest, b"g" * 32]
    assert numbers(unpack_hashes(engine.offered[0].runs[0].hashes)) == [1]
