"""Programs that assert what the collector of a service leaves out, and finds in the end.

`python -m tests.libs.kvbm_common.service.garbage_programs NAME` runs one. A heap of its own is
small, and the collector of the tests stays as it is.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvbm_common.runtime.pauses import SHIFTS
from kvbm_common.service.footprint import MIB, memory_bytes
from kvbm_common.service.garbage import Garbage, Pace

from tests.waiting import wait_until

ENTRIES = 1_000_000
OBJECTS = 100_000


class Node:
    """A cycle of one object."""

    def __init__(self) -> None:
        self.itself = self
        self.page = b""


def garbage_of(long_s: float = 0.0) -> Garbage:
    pace = Pace(look_s=0.01, count_s=0.0, busy_s=0.0)
    garbage = Garbage(long_s=long_s, grown=100, grown_part=0.0, pace=pace)
    garbage.start()
    return garbage


@asynccontextmanager
async def running(garbage: Garbage) -> AsyncIterator[None]:
    """The collector of this process, which looks."""
    task = asyncio.create_task(garbage.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        garbage.end()


def entries_walked() -> int:
    """Count the entries of all lists that a full collection walks."""
    return sum(len(one) for one in gc.get_objects() if type(one) is list)


def what_there_is_when_a_service_is_ready_is_walked_no_more() -> None:
    """Goal: a table's columns, however they grow afterwards, are no part of any collection."""
    garbage = garbage_of(long_s=60)
    try:
        column = [b"name"] * ENTRIES
        assert entries_walked() >= ENTRIES
        garbage.settle()
        column += [b"name"] * ENTRIES
        assert entries_walked() < ENTRIES
    finally:
        garbage.end()
    assert entries_walked() >= 2 * ENTRIES


def what_a_long_collection_has_left_is_walked_no_more() -> None:
    """Goal: a table that is made while a service runs takes one long collection, not each."""
    garbage = garbage_of()
    try:
        column = [b"name"] * ENTRIES
        gc.collect(0)
        assert entries_walked() < ENTRIES
        assert len(column) == ENTRIES
    finally:
        garbage.end()


def a_frozen_cycle_is_collected_in_the_end() -> None:
    """Goal: garbage of frozen objects is bounded: a walk over all comes when enough has grown."""
    asyncio.run(_a_frozen_cycle_is_collected())


async def _a_frozen_cycle_is_collected() -> None:
    garbage = garbage_of()
    async with running(garbage):
        nodes = [Node() for _ in range(1_000)]
        last = weakref.ref(nodes[-1])
        gc.collect(0)
        nodes.clear()
        gc.collect()
        assert last() is not None
        assert garbage.is_due()
        await wait_until(lambda: last() is None)
        assert not garbage.is_due()


def a_table_that_fills_is_walked_few_times() -> None:
    """Goal: four times as much is frozen in the end, after a walk for each quarter more."""
    garbage = Garbage(long_s=0.0, grown=100)
    garbage.start()
    try:
        before, table, walks = gc.get_freeze_count(), list[list[object]](), 0
        while gc.get_freeze_count() < 4 * before:
            table += [[object()] for _ in range(before // 20)]
            gc.collect(0)
            if garbage.is_due():
                garbage.walk()
                walks += 1
        assert 4 <= walks <= 7
    finally:
        garbage.end()


def few_cycles_at_a_time_are_bounded_too() -> None:
    """Goal: cycles die in each round, a collection freezes them, and their number stays bounded."""
    garbage, most, there = garbage_of(), 0, weakref.WeakSet[Node]()
    try:
        for _ in range(50):
            nodes = [Node() for _ in range(20)]
            there.update(nodes)
            gc.collect(0)
            del nodes
            if garbage.is_due():
                garbage.walk()
            most = max(most, len(there))
        assert 20 <= most <= 100 + 2 * 20
    finally:
        garbage.end()


def a_table_that_turns_over_is_not_walked() -> None:
    """Goal: what has replaced frozen objects is frozen, though no collection comes."""
    asyncio.run(_a_table_turns_over())


async def _a_table_turns_over() -> None:
    garbage = Garbage(pace=Pace(look_s=0.01))
    garbage.start()
    async with running(garbage):
        table, collections = [[number] for number in range(OBJECTS)], list[str]()
        gc.freeze()
        gc.callbacks.append(lambda phase, _: collections.append(phase))
        for number in range(OBJECTS):
            table[number] = [number]
        assert len(gc.get_objects()) >= OBJECTS
        assert not collections
        await wait_until(lambda: len(gc.get_objects()) < OBJECTS // 10)


def what_failed_a_moment_ago_is_not_frozen() -> None:
    """Goal: a cycle that was made since the last look goes at the next one, without a walk."""
    asyncio.run(_what_failed_goes())


async def _what_failed_goes() -> None:
    garbage = Garbage(pace=Pace(look_s=0.01))
    garbage.start()
    async with running(garbage):
        node = Node()
        failed = weakref.ref(node)
        del node
        await wait_until(lambda: failed() is None)


def nothing_is_counted_before_the_service_is_idle() -> None:
    """Goal: a count, which walks what is frozen, is no pause of a service that works."""
    asyncio.run(_nothing_is_counted())


async def _nothing_is_counted() -> None:
    counts, asked = gc.get_freeze_count, list[int]()

    def counted() -> int:
        asked.append(counts())
        return asked[-1]

    gc.get_freeze_count = counted
    pace = Pace(look_s=0.1, count_s=0.0, busy_s=60.0)
    garbage = Garbage(long_s=0.0, grown=100, grown_part=0.0, pace=pace)
    garbage.start()
    async with running(garbage):
        asked.clear()
        until_s = time.process_time() + 0.5
        while time.process_time() < until_s:
            sum(range(10_000))
            await asyncio.sleep(0)
        assert not asked
        await wait_until(lambda: asked, poll_s=0.2)


def a_few_large_cycles_are_due() -> None:
    """Goal: what cycles hold is bounded, however few they are."""
    garbage = Garbage(grown=1_000_000, grown_bytes=16 * MIB)
    garbage.start()
    try:
        nodes = [Node() for _ in range(64)]
        for node in nodes:
            node.page = b"x" * MIB
        gc.freeze()
        nodes.clear()
        del node
        assert memory_bytes() > 64 * MIB
        assert garbage.is_due()
        garbage.walk()
        assert not garbage.is_due()
    finally:
        garbage.end()


def memory_that_fills_is_walked_few_times() -> None:
    """Goal: four times as much memory in the end, of few objects, takes a walk for each quarter."""
    garbage = Garbage(grown=1_000_000, grown_bytes=MIB)
    garbage.start()
    try:
        before, table, walks = memory_bytes(), list[bytes](), 0
        while memory_bytes() < 4 * before:
            table.append(b"x" * (before // 20))
            if garbage.is_due():
                garbage.walk()
                walks += 1
        assert 4 <= walks <= 7
    finally:
        garbage.end()


def memory_that_comes_and_goes_is_walked_once() -> None:
    """Goal: a walk that has found nothing is not repeated because memory was smaller meanwhile."""
    garbage, walks = Garbage(grown=1_000_000, grown_bytes=16 * MIB), 0
    garbage.start()
    try:
        for _ in range(4):
            pages = [b"x" * MIB for _ in range(64)]
            if garbage.is_due():
                garbage.walk()
                walks += 1
            pages.clear()
            assert not garbage.is_due()
        assert walks == 1
    finally:
        garbage.end()


def services_that_are_idle_together_count_in_turn() -> None:
    """Goal: each counts in a second of its own, of sixteen, though all have waited for long."""
    asyncio.run(_services_count_in_turn())


async def _services_count_in_turn() -> None:
    look_s = 0.02
    counted: dict[str, set[int]] = {"index-0": set(), "host-tier-0": set()}

    class Noted(Garbage):
        def __init__(self, name: str, pace: Pace) -> None:
            super().__init__(name=name, pace=pace)
            self.moments = counted[name]

        def is_due(self) -> bool:
            self.moments.add(round(time.time() / look_s))
            return super().is_due()

    pace = Pace(look_s=look_s, count_s=0.0, idle_part=10.0)
    services = [Noted(name, pace) for name in counted]
    for one in services:
        one.start()
    async with running(services[0]), running(services[1]):
        await wait_until(lambda: min(map(len, counted.values())) >= 2)
    turns = [{moment % SHIFTS for moment in moments} for moments in counted.values()]
    assert [len(one) for one in turns] == [1, 1]
    assert turns[0] != turns[1]


def what_has_left_makes_no_room_for_garbage() -> None:
    """Goal: after a table has gone, as few cycles are due as before it came."""
    garbage = garbage_of(long_s=60)
    try:
        table = [[number] for number in range(OBJECTS)]
        garbage.settle()
        table.clear()
        assert not garbage.is_due()
        nodes = [Node() for _ in range(1_000)]
        gc.freeze()
        assert nodes
        assert garbage.is_due()
    finally:
        garbage.end()


PROGRAMS = {
    program.__name__: program
    for program in (
        what_there_is_when_a_service_is_ready_is_walked_no_more,
        what_a_long_collection_has_left_is_walked_no_more,
        a_table_that_fills_is_walked_few_times,
        few_cycles_at_a_time_are_bounded_too,
        a_frozen_cycle_is_collected_in_the_end,
        a_table_that_turns_over_is_not_walked,
        what_failed_a_moment_ago_is_not_frozen,
        nothing_is_counted_before_the_service_is_idle,
        what_has_left_makes_no_room_for_garbage,
        a_few_large_cycles_are_due,
        memory_that_fills_is_walked_few_times,
        memory_that_comes_and_goes_is_walked_once,
        services_that_are_idle_together_count_in_turn,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
