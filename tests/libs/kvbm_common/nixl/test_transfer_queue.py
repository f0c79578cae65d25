"""Which transfer starts next, and when there is no room: without NIXL."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from kvbm_common.nixl import transfer_queue
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfer_queue import OVERTAKEN_S, Transfer, TransferQueue

BLOCK = 4096


def transfer(operation: str, blocks: int = 1, *, accepted: float = 0.0) -> Transfer:
    """A transfer of so many blocks of a file, handed over at a time."""
    spans = Spans.of([BLOCK * index for index in range(blocks)], BLOCK)
    made = Transfer(operation, "self", spans, spans.in_file(3), deadline=60.0)
    made.accepted = accepted
    return made


def queue_of(*transfers: Transfer) -> TransferQueue:
    queue = TransferQueue()
    queue.waiting.extend(transfers)
    return queue


def start_all(queue: TransferQueue, now: float = 0.0) -> list[Transfer]:
    """Start what may start; returns it in its order."""
    started: list[Transfer] = []
    while (following := queue.pop(now)) is not None:
        queue.note_posted(following)
        started.append(following)
    return started


def test_reads_overtake_writes_that_have_not_waited_long() -> None:
    write, later, read = transfer("WRITE"), transfer("WRITE"), transfer("READ")
    assert start_all(queue_of(write, later, read), OVERTAKEN_S) == [read, write, later]
    assert start_all(queue_of(write, later, read), 2 * OVERTAKEN_S) == [write, later, read]


def test_bytes_of_each_direction_are_limited_and_one_transfer_may_always_start() -> None:
    """A read larger than the limit is alone in flight; another begins when it has ended."""
    large, small, write = transfer("READ", 4), transfer("READ"), transfer("WRITE")
    queue = queue_of(large, small, write)
    queue.limit_files(read_bytes=2 * BLOCK, written_bytes=None)
    assert start_all(queue) == [large]
    assert list(queue.waiting) == [small, write]
    queue.note_ended(large)
    assert start_all(queue) == [small, write]


def test_a_write_that_waits_for_other_writes_holds_up_no_read() -> None:
    """It is overdue, and its direction is full. Where a read has no room either, nothing starts."""
    in_flight, overdue, read, more = (transfer(one) for one in ("WRITE", "WRITE", "READ", "READ"))
    queue = queue_of(in_flight, overdue, read, more)
    queue.limit_files(read_bytes=BLOCK, written_bytes=BLOCK)
    assert start_all(queue, 2 * OVERTAKEN_S) == [in_flight, read]
    queue.note_ended(in_flight)
    assert start_all(queue, 2 * OVERTAKEN_S) == [overdue]


def test_an_overdue_write_waits_for_room_and_reads_do_not_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five I/Os at most; a read of four is in flight, an overdue write needs two."""
    monkeypatch.setattr(transfer_queue, "POSIX_IO_COUNT_MAX", 5)
    in_flight, overdue, read = transfer("READ", 4), transfer("WRITE", 2), transfer("READ")
    queue = queue_of(in_flight, overdue, read)
    assert start_all(queue, 2 * OVERTAKEN_S) == [in_flight]
    queue.note_ended(in_flight)
    assert start_all(queue, 2 * OVERTAKEN_S) == [overdue, read]


@pytest.mark.parametrize(("limit", "most"), [("IN_FLIGHT_COUNT_MAX", 2), ("POSIX_IO_COUNT_MAX", 5)])
def test_nixl_gets_no_more_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Two transfers of two I/Os each: as many as may be in flight, or as many I/Os less one."""
    monkeypatch.setattr(transfer_queue, limit, most)
    first, second, third = (transfer("READ", 2) for _ in range(3))
    queue = queue_of(first, second, third)
    assert start_all(queue) == [first, second]
    queue.note_ended(first)
    assert start_all(queue) == [third]


def test_a_draining_transfer_leaves_its_place_but_not_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NIXL still has its I/Os, but it counts as failed."""
    monkeypatch.setattr(transfer_queue, "IN_FLIGHT_COUNT_MAX", 1)
    first, second, third = (transfer("READ") for _ in range(3))
    queue = queue_of(first, second, third)
    queue.limit_files(read_bytes=2 * BLOCK, written_bytes=None)
    assert start_all(queue) == [first]
    first.settling = Future()
    queue.draining += 1
    assert (queue.in_flight_count, start_all(queue)) == (0, [second])
    second.settling = Future()
    queue.draining += 1
    assert start_all(queue) == []
    queue.note_ended(first)
    assert (queue.draining, start_all(queue)) == (1, [third])
