"""The connector's core, onboard: each transition of a lookup, each deadline, each way to fail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvbm_common.checksum import pack_sums
from kvbm_common.wire.local import Found, Release
from kvbm_connectors.core.messages import ConnectorMisuse, Hit, LoadResult, merge_results

from tests.connectors.helpers import (
    ANSWER_MS,
    BLOCK_BYTES,
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


def test_a_lookup_from_the_question_to_the_release() -> None:
    """1. Asked: "ask me again". 2. Answered: three blocks, one from disk. 3. Taken: a load that

    says which slot goes where, until when. 4. Loaded: the lease goes back, nothing is left.
    """
    engine = Engine()
    assert engine.look_up(1, 2, 3, 4) is None
    [question] = engine.lookups
    assert engine.asked() == [1, 2, 3, 4]
    assert (question.engine, question.incarnation) == ("ada", INCARNATION)
    assert question.namespace == NAMESPACE.digest
    assert (question.deadline_ms, question.lease_ms) == (LIMITS.onboard_deadline_ms, LEASE_MS)
    engine.hear(answer(question.lookup, 3, lease=55, disk=[2]))
    assert engine.look_up(1, 2, 3, 4) == Hit(3, host=2, disk=1)
    load = engine.take(70, 71, 72)
    assert (load.slots, load.blocks, load.checksums) == (
        (10, 11, 12),
        (70, 71, 72),
        tuple(pack_sums([one]) for one in range(3)),
    )
    assert load.hashes == (name(1), name(2), name(3))
    assert (load.epoch, load.lease, load.block_bytes) == (EPOCH, 55, BLOCK_BYTES)
    assert load.deadline_ms == 1_000 + LEASE_MS
    engine.load_ended(load)
    assert engine.released == [55]
    assert engine.idle()
    assert engine.core.view.counts["loaded_blocks"] == 3


def test_asking_again_asks_nobody() -> None:
    """An engine asks at every step; the host tier hears it once."""
    engine = Engine()
    for _ in range(5):
        assert engine.look_up(1, 2) is None
    engine.hear(answer(engine.lookups[0].lookup, 2))
    for _ in range(5):
        assert engine.look_up(1, 2) == Hit(2, host=2)
    assert len(engine.lookups) == 1


def test_other_blocks_are_another_question() -> None:
    """The request has grown: the first lease goes back, the new run is asked for."""
    engine = Engine()
    assert engine.found(1, 2).blocks == 2
    assert engine.look_up(1, 2, 3) is None
    assert engine.released == [100 + engine.lookups[0].lookup]
    assert engine.asked() == [1, 2, 3]


def test_nothing_found_leaves_nothing_to_give_back() -> None:
    """Lease 0 is none."""
    engine = Engine()
    assert engine.found(1, 2, count=0) == Hit(0)
    engine.forget()
    assert engine.released == []
    assert engine.idle()


def test_a_question_of_no_blocks_is_not_asked() -> None:
    assert (engine := Engine()).look_up() == Hit(0)
    assert engine.lookups == []


def test_less_than_what_was_found_may_be_taken() -> None:
    """The engine had fewer free blocks; the whole lease goes back all the same."""
    engine = Engine()
    engine.found(1, 2, 3)
    load = engine.take(7)
    assert (load.slots, load.hashes) == ((10,), (name(1),))
    engine.load_ended(load)
    assert len(engine.released) == 1


@pytest.mark.parametrize("blocks", [(), (1, 2, 3)])
def test_taking_what_was_not_found_is_a_mistake_of_the_engine_side(blocks: tuple[int, ...]) -> None:
    """None, or more than found; and the lookup is as it was."""
    engine = Engine()
    engine.found(1, 2)
    with pytest.raises(ConnectorMisuse, match="of 2 blocks"):
        engine.take(*blocks)
    assert engine.take(1, 2).blocks == (1, 2)


def test_taking_without_a_hit_is_a_mistake_of_the_engine_side() -> None:
    """Never asked, not answered, or taken already."""
    engine = Engine()
    for _ in range(2):
        with pytest.raises(ConnectorMisuse, match="nothing to load"):
            engine.take(1)
        engine.look_up(1)
    engine.hear(answer(engine.lookups[0].lookup, 1))
    engine.take(1)
    with pytest.raises(ConnectorMisuse, match="nothing to load"):
        engine.take(1)


# --- deadlines ----------------------------------------------------------------------------------


def test_an_answer_that_does_not_come_is_a_miss() -> None:
    """1. Until its deadline and the margin: ask again. 2. Then a miss; a late lease goes back."""
    engine = Engine()
    engine.look_up(1, 2)
    engine.wait(ANSWER_MS - 1)
    assert engine.look_up(1, 2) is None
    engine.wait(1)
    assert engine.look_up(1, 2) == Hit(0, reason="no_answer")
    assert engine.core.view.counts["lookups_unanswered"] == 1
    assert engine.idle()
    engine.hear(answer(engine.lookups[0].lookup, 2, lease=55))
    assert engine.released == [55]
    assert engine.core.view.counts["answers_unwanted"] == 1


def test_a_hit_that_is_not_taken_in_time_is_none() -> None:
    """The lease runs from before the question, on our clock; then it goes back, and is a miss."""
    engine = Engine()
    engine.found(1, 2)
    engine.wait(LEASE_MS - 1)
    assert engine.look_up(1, 2) == Hit(2, host=2)
    engine.wait(1)
    assert engine.look_up(1, 2) == Hit(0, reason="lease_ended")
    assert len(engine.released) == 1
    assert engine.core.view.counts["lookups_outlived_lease"] == 1
    assert engine.look_up(1, 2) is None  # A new question.


# --- the engine changes its mind ----------------------------------------------------------------


def test_an_abort_before_the_answer_gives_the_lease_back_when_it_comes() -> None:
    engine = Engine()
    engine.look_up(1)
    engine.forget()
    assert engine.idle()
    engine.hear(answer(engine.lookups[0].lookup, 1, lease=55))
    assert engine.released == [55]


def test_an_abort_after_the_answer_gives_the_lease_back_at_once() -> None:
    engine = Engine()
    engine.found(1)
    engine.forget()
    engine.forget()
    assert len(engine.released) == 1
    assert engine.idle()


def test_an_abort_under_a_load_waits_for_the_load() -> None:
    """The worker still reads: the slots stay leased until it has ended."""
    engine = Engine()
    engine.found(1)
    load = engine.take(9)
    engine.forget()
    assert engine.released == []
    engine.load_ended(load)
    assert engine.released == [load.lease]
    assert engine.idle()


@pytest.mark.parametrize("blocks", [(1, 2), (1, 2, 3)])
def test_a_request_that_comes_again_under_its_load(blocks: tuple[int, ...]) -> None:
    """1. Preempted while it loads, and asked for anew: it has another hit. 2. Both leases end."""
    engine = Engine()
    engine.found(1, 2)
    load = engine.take(8, 9)
    engine.forget()
    assert engine.look_up(*blocks) is None
    engine.hear(answer(engine.lookups[1].lookup, len(blocks), lease=66))
    engine.load_ended(load)
    assert engine.released == [load.lease]
    engine.load_ended(engine.take(*blocks))
    assert engine.released == [load.lease, 66]
    assert engine.idle()


def test_a_loads_deadline_counts_from_the_question() -> None:
    """Goal: the lease of the host tier, which counts from the question too, never ends first."""
    engine = Engine()
    assert engine.look_up(1) is None
    asked_ms = engine.now_ms
    engine.wait(30)
    engine.hear(answer(engine.lookups[0].lookup, 1, lease=55))
    engine.wait(40)
    assert engine.take(70).deadline_ms == asked_ms + LEASE_MS


def test_every_rank_is_told_the_checksum_of_its_part() -> None:
    """Of two ranks: a pair for each block that is loaded."""
    engine = Engine()
    engine.look_up(1, 2, 3)
    good = answer(engine.lookups[0].lookup, 3, lease=55)
    parts = pack_sums([11, 12, 21, 22, 31, 32])
    engine.hear(msgspec.structs.replace(good, part_sums=parts))
    assert engine.take(70, 71).checksums == (pack_sums([11, 12]), pack_sums([21, 22]))


# --- bad answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"slots": [10, 11]},
        {"checksums": [0]},
        {"slots": list(range(9)), "checksums": list(range(9))},
        {"block_bytes": 0},
        {"lease": 0},
        {"checksums": [0, -1, 2]},
        {"checksums": [0, 1, 2**64]},
        {"part_sums": bytes(4 * 8)},
        {"part_sums": bytes(3)},
        {"slots": [], "checksums": [], "part_sums": bytes(8)},
        {"disk_blocks": [3]},
        {"disk_blocks": [0, 1, 2], "remote_blocks": [2]},
    ],
    ids=str,
)
def test_an_answer_that_does_not_fit_is_a_miss(change: dict[str, Any]) -> None:
    """It is counted, its lease goes back, and the engine computes."""
    engine = Engine()
    engine.look_up(1, 2, 3)
    good = answer(engine.lookups[0].lookup, 3, lease=55)
    bad: Found = msgspec.structs.replace(good, **change)
    engine.hear(bad)
    assert engine.look_up(1, 2, 3) == Hit(0, reason="malformed")
    assert engine.released == [55] * (bad.lease > 0)
    assert engine.core.view.counts["answers_malformed"] == 1


def test_an_answer_that_nobody_asked_for_gives_its_lease_back() -> None:
    engine = Engine()
    engine.hear(answer(999, 2, lease=55))
    assert engine.released == [55]
    assert engine.core.view.counts["answers_unwanted"] == 1


def test_a_second_answer_does_not_end_the_lease_of_the_first() -> None:
    """Its slots would be reused under the load."""
    engine = Engine()
    engine.look_up(1)
    found = answer(engine.lookups[0].lookup, 1, lease=55)
    engine.hear(found)
    load = engine.take(9)
    engine.hear(found)
    engine.look_up(2)  # Under the same load: it was preempted.
    engine.hear(found)
    assert engine.released == []
    engine.load_ended(load)
    assert engine.released == [55]


# --- avoided blocks -----------------------------------------------------------------------------


def test_a_block_that_failed_is_not_asked_for_again_for_a_while() -> None:
    """1. Block 2 of three arrives wrong: the host tier is told which. 2. Only 1 is asked for.

    3. A request that begins with 2 is not asked at all. 4. `avoid_ms` later it is again.
    """
    engine = Engine()
    engine.found(1, 2, 3)
    engine.load_ended(engine.take(7, 8, 9), corrupt=[1])
    assert of(engine.to_host, Release)[0].corrupt == [1]
    assert engine.core.view.counts["load_failed_blocks"] == 1
    assert engine.look_up(1, 2, 3) is None
    assert engine.asked() == [1]
    assert engine.core.view.counts["avoided_blocks"] == 2
    assert engine.look_up(2, 3, request="s") == Hit(0, reason="avoided")
    engine.wait(LIMITS.avoid_ms)
    assert engine.look_up(2, 3, request="s") is None
    assert engine.asked() == [2, 3]


def test_more_than_was_asked_for_is_no_answer() -> None:
    """2 is avoided, so that 1 was asked for: an answer with both is not believed."""
    engine = Engine()
    engine.found(1, 2)
    engine.load_ended(engine.take(8, 9), 1)
    engine.look_up(1, 2)
    engine.hear(answer(engine.lookups[1].lookup, 2))
    assert engine.look_up(1, 2) == Hit(0, reason="malformed")


def test_another_arena_starts_with_a_clean_sheet() -> None:
    engine = Engine()
    engine.found(1)
    engine.load_ended(engine.take(9), 0)
    engine.attached(EPOCH + 1)
    assert engine.look_up(1) is None


# --- results ------------------------------------------------------------------------------------


def test_a_block_is_good_if_it_is_good_on_every_rank() -> None:
    """Three ranks: each loses another block, one finds one corrupt, the slowest counts."""
    engine = Engine()
    engine.found(1, 2, 3, 4)
    load = engine.take(1, 2, 3, 4)
    result = merge_results(
        [
            LoadResult(load, (True, True, True, True), seconds=0.1),
            LoadResult(load, (True, True, False, True), corrupt=(2,), reason="corrupt"),
            LoadResult(load, (True, True, True, False), reason="peer_lost", seconds=0.3),
        ]
    )
    assert result == LoadResult(load, (True, True, False, False), (2,), "corrupt", 0.3)
    assert result.usable == 2
    assert LoadResult(load, (True,) * 4).usable == 4
