"""Reads at their edges: whole messages and answers, exact limits, counts that add up."""

from __future__ import annotations

from functools import partial

import pytest
from kvbm_common.eviction import make_policy
from kvbm_common.wire.events import Removed
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import ErrorBody, FillReply
from kvbm_disk_tier.core.effects import Answer, Effect, ReadSlots
from kvbm_disk_tier.core.health import SLOW_MS
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import ReadDone, ReadFailed, ReadLanded

from tests.services.disk_tier.helpers import (
    ARENA_SLOTS,
    BLOCK_BYTES,
    FILL_MS,
    HOST_EPOCH,
    NAMESPACE,
    SLOT_BYTES,
    Disk,
    block,
    checksum,
    filled,
    name,
    of,
    one,
    refusal,
)


def errors(effects: list[Effect]) -> list[ErrorBody]:
    """The refusals among the answers."""
    replies = [answer.reply for answer in of(effects, Answer)]
    return [reply for reply in replies if isinstance(reply, ErrorBody)]


def stored(*numbers: int, limits: DiskTierLimits | None = None, slots: int = 8) -> Disk:
    """A disk that holds these blocks."""
    disk = Disk(slots=slots, limits=limits)
    disk.store(*numbers)
    return disk


# --- messages -----------------------------------------------------------------------------------


def test_every_field_of_a_read() -> None:
    disk = stored(1, 2)
    read = one(disk.fill(2, 1, slots=[50, 51]), ReadSlots)
    assert read == ReadSlots(
        read.read, HOST_EPOCH, (1, 0), (50, 51), (block(2), block(1)), SLOT_BYTES,
        disk.now_ms + FILL_MS,
    )  # fmt: skip


def test_every_field_of_an_answer() -> None:
    """In the asked order: 1 is good, 7 never was here, 2 is wrong."""
    disk = stored(1, 2)
    effects = disk.read(one(disk.fill(1, 7, 2, slots=[50, 51, 52]), ReadSlots), 2)
    assert of(effects, Answer) == [
        Answer(1, FillReply(slots=[
            FilledSlot(hash=name(1).hex(), slot=50, ok=True, parent=name(0).hex(),
                       namespace=NAMESPACE.hex(), checksum=checksum(1), bytes=BLOCK_BYTES),
            FilledSlot(hash=name(7).hex(), slot=51, ok=False, reason="gone"),
            FilledSlot(hash=name(2).hex(), slot=52, ok=False, reason="corrupt"),
        ]))
    ]  # fmt: skip
    assert of(disk.fill(7), Answer)[0].reply_to == 2


@pytest.mark.parametrize(
    ("code", "field", "message", "request_of"),
    [
        ("stale_arena", "epoch", "another arena", lambda d: d.fill(1, 2, epoch=HOST_EPOCH + 1)),
        ("too_late", "until_ms", "the deadline", lambda d: d.fill(1, 2, until_ms=d.now_ms)),
        ("bad_slot", "slots", "no such arena", lambda d: d.fill(1, 2, slots=[1, ARENA_SLOTS])),
        ("duplicate", "slots", "a slot twice", lambda d: d.fill(1, 2, slots=[5, 5])),
        ("duplicate", "slots", "a hash twice", lambda d: d.fill(1, 1, slots=[5, 6])),
    ],
)
def test_a_refusal_names_the_field_and_counts_the_blocks(
    code: str, field: str, message: str, request_of: object
) -> None:
    """Twice, so that the count adds up."""
    disk = stored(1, 2)
    assert callable(request_of)
    for times in (1, 2):
        [error] = errors(request_of(disk))
        assert (error.code, error.field) == (code, field)
        assert error.message.startswith(message)
        assert disk.counts[f"dropped.fill_{code}"] == 2 * times


def test_a_tier_that_stops_reads_nothing_more() -> None:
    disk = Disk()
    disk.core.stop()
    [error] = errors(disk.fill(1, 2))
    assert (error.code, error.field) == ("stopping", "")
    assert error.message == "this disk tier is stopping"


def test_a_disk_that_is_bypassed_reads_nothing_until_it_is_tried() -> None:
    """Three troubles in a row, and the breaker is open."""
    disk = stored(1)
    while disk.core.health.reads:
        read = one(disk.fill(1), ReadSlots)
        disk.step(ReadFailed(read.read, "transfer_failed"))
    [error] = errors(disk.fill(1))
    assert (error.code, error.message) == ("disk_bypassed", "the disk fails or is too slow")


# --- limits -------------------------------------------------------------------------------------


def test_the_last_slot_of_the_arena_and_the_last_millisecond_are_good() -> None:
    disk = stored(1)
    one(disk.fill(1, slots=[ARENA_SLOTS - 1], until_ms=disk.now_ms + 1), ReadSlots)


def test_so_many_may_wait_and_no_more() -> None:
    """One is in flight, two wait, the fourth is turned away; the count is that of its blocks."""
    disk = stored(1, limits=DiskTierLimits(reads_max=1, reads_waiting_max=2))
    read = one(disk.fill(1), ReadSlots)
    assert disk.fill(1) == disk.fill(1) == []
    reads = disk.core.reads
    assert (len(reads.in_flight), len(reads.waiting)) == (1, 2)
    [error] = errors(disk.fill(1, 2))
    assert (error.code, error.message) == ("busy", "too many fills are waiting")
    assert disk.counts["dropped.fill_busy"] == 2
    disk.read(read)
    assert (len(reads.in_flight), len(reads.waiting)) == (1, 1)


def test_fills_of_one_turn_are_served_in_the_order_in_which_they_came() -> None:
    disk = stored(1, 2, 3, limits=DiskTierLimits(reads_max=1))
    served = [one(disk.fill(1), ReadSlots)]
    assert disk.fill(2) == disk.fill(3) == []
    for _ in range(2):
        served.append(one(disk.read(served[-1]), ReadSlots))
    assert [read.blocks for read in served] == [(block(n),) for n in (1, 2, 3)]


def test_blocks_in_flight_are_counted_whole_and_those_that_have_landed_half() -> None:
    """Two blocks may be in flight, four be on their way: fills of one block each."""
    disk = stored(1, 2, 3, 4, 5, 6, limits=DiskTierLimits(read_blocks_max=2, ahead_batches=0))
    in_flight = [one(disk.fill(n), ReadSlots) for n in (1, 2)]
    assert disk.fill(3) == disk.fill(4) == disk.fill(5) == []
    in_flight.append(one(disk.step(ReadLanded(in_flight[0].read)), ReadSlots))
    in_flight.append(one(disk.step(ReadLanded(in_flight[1].read)), ReadSlots))
    assert disk.step(ReadLanded(in_flight[2].read)) == []
    assert one(disk.read(in_flight[0]), ReadSlots).blocks == (block(5),)


def test_an_unknown_read_that_lands_is_no_news() -> None:
    disk = stored(1)
    read = one(disk.fill(1), ReadSlots)
    assert disk.step(ReadLanded(read.read + 1)) == []
    assert filled(disk.read(read)) == {1: ""}


# --- ends ---------------------------------------------------------------------------------------


def test_each_block_that_is_wrong_has_its_own_reason_and_fate() -> None:
    """1 is good, 2 corrupt, 3 gone from the medium, 4 may be read again."""
    disk = stored(1, 2, 3, 4)
    read = one(disk.fill(1, 2, 3, 4), ReadSlots)
    reasons = ("", "corrupt", "gone", "sealed")
    effects = disk.step(ReadDone(read.read, (True, False, False, False), reasons))
    assert filled(effects) == {1: "", 2: "corrupt", 3: "gone", 4: "sealed"}
    assert disk.announced == {1, 4}
    assert disk.counts["fill_blocks"] == 1
    assert disk.counts["bytes.read"] == 4 * SLOT_BYTES
    assert [disk.counts[f"dropped.fill_{why}"] for why in reasons[1:]] == [1, 1, 1]
    story = [text for _, text in disk.core.inventory.diary.entries(name(4))]
    assert story[-1] == "was read: sealed"
    assert disk.core.inventory.diary.entries(name(4))[-1][0] == disk.now_ms


def test_counts_of_reads_add_up() -> None:
    """Everything twice: two blocks read, one gone before, one corrupt, one failed."""
    disk = stored(1, 2, 3, 4, 5, 6)
    for times in (1, 2):
        disk.read(one(disk.fill(1, 2, 77), ReadSlots))
        disk.read(one(disk.fill(2 + times), ReadSlots), 2 + times)
        read = one(disk.fill(5, 6), ReadSlots)
        disk.step(ReadFailed(read.read, "transfer_failed"))
        assert disk.counts["fill_blocks"] == 2 * times
        assert disk.counts["bytes.read"] == 3 * times * SLOT_BYTES
        assert disk.counts["dropped.fill_gone"] == times
        assert disk.counts["dropped.fill_corrupt"] == times
        assert disk.counts["dropped.fill_transfer_failed"] == 2 * times


def test_a_read_that_is_slow_is_held_against_the_disk() -> None:
    """One millisecond less is not; a good one after it does not undo the count."""
    disk = stored(1)
    for waited, slow in ((SLOW_MS - 1, 0), (SLOW_MS, 1)):
        read = one(disk.fill(1, until_ms=disk.now_ms + 2 * SLOW_MS), ReadSlots)
        disk.now_ms += waited
        disk.read(read)
        assert disk.counts.get("disk_troubles.slow", 0) == slow


@pytest.mark.parametrize(
    ("reason", "waited", "troubles"),
    [
        ("transfer_failed", 0, 1),
        ("transfer_timeout", 0, 0),
        ("transfer_timeout", SLOW_MS - 1, 0),
        ("transfer_timeout", SLOW_MS, 1),
        ("stale_arena", 0, 0),
    ],
)
def test_a_failed_read_is_held_against_the_disk_where_it_is_to_blame(
    reason: str, waited: int, troubles: int
) -> None:
    """A short deadline that has passed says nothing of it, nor does an old arena."""
    disk = stored(1)
    read = one(disk.fill(1, until_ms=disk.now_ms + 2 * SLOW_MS), ReadSlots)
    disk.now_ms += waited
    assert filled(disk.step(ReadFailed(read.read, reason))) == {1: reason}
    assert disk.counts.get("disk_troubles.failed", 0) == troubles
    assert disk.core.inventory.table.counts()["active"] == 0


def test_a_fill_whose_deadline_passes_while_it_waits_is_refused_with_its_blocks_counted() -> None:
    disk = stored(1, 2, limits=DiskTierLimits(reads_max=1))
    read = one(disk.fill(1), ReadSlots)
    assert disk.fill(1, 2, until_ms=disk.now_ms + 5) == []
    disk.now_ms += 5
    assert refusal(disk.read(read)[1:]) == "too_late"
    assert disk.counts["dropped.fill_too_late"] == 2


def test_answers_go_to_the_question() -> None:
    """A refusal, a failure and a good one, each by the number of its question."""
    disk = stored(1)
    assert of(disk.fill(1, until_ms=disk.now_ms), Answer)[0].reply_to == 1
    read = one(disk.fill(1), ReadSlots)
    assert of(disk.step(ReadFailed(read.read, "transfer_failed")), Answer)[0].reply_to == 2
    assert of(disk.read(one(disk.fill(1), ReadSlots)), Answer)[0].reply_to == 3


def test_what_cannot_be_right_does_not_wait_for_its_turn() -> None:
    """Another read is in flight: the refusal comes at once."""
    disk = stored(1, limits=DiskTierLimits(reads_max=1))
    one(disk.fill(1), ReadSlots)
    assert refusal(disk.fill(1, epoch=HOST_EPOCH + 1)) == "stale_arena"
    assert len(disk.core.reads.waiting) == 0


def test_some_reads_are_handed_over_ahead() -> None:
    """One block may be in flight and one wait in the mover: the third read waits here."""
    limits = DiskTierLimits(read_blocks_max=1, batch_blocks_max=1, ahead_batches=1)
    disk = stored(1, 2, 3, 4, limits=limits)
    in_flight = [one(disk.fill(n), ReadSlots) for n in (1, 2)]
    assert disk.fill(3) == disk.fill(4) == []
    assert one(disk.step(ReadLanded(in_flight[0].read)), ReadSlots).blocks == (block(3),)
    assert disk.step(ReadLanded(in_flight[1].read)) == [], "three are on their way"
    assert one(disk.read(in_flight[0]), ReadSlots).blocks == (block(4),)


def test_reads_are_uses() -> None:
    """1 is read three times; the policy that counts uses gives up 2."""
    disk = stored(2, 1, slots=2)
    disk.core.inventory.table.use_policy(partial(make_policy, "lfu"))
    for _ in range(3):
        disk.read(one(disk.fill(1), ReadSlots))
    disk.read(one(disk.fill(2), ReadSlots))
    disk.store(9)
    assert disk.announced == {1, 9}


def test_a_block_that_is_gone_from_the_medium_is_announced_as_gone() -> None:
    disk = stored(1)
    read = one(disk.fill(1), ReadSlots)
    disk.step(ReadDone(read.read, (False,), ("gone",)))
    removed = one(disk.events, Removed)
    assert (removed.hashes, removed.reason) == ([name(1).hex()], "gone")
