"""How large batches of writes are, and what is dropped with a block that is not written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.core.effects import Effect, LeaseHost, WriteSlots
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import HostEvent, LeaseFailed, WritersKnown
from kvbm_disk_tier.core.pending import (
    ARENA_SHARE,
    FAST_MS,
    SLOW_MS,
    BatchSize,
)

from tests.services.disk_tier.helpers import ARENA_SLOTS, Disk, asked, block, of, one


@pytest.mark.parametrize(
    ("took_ms", "sizes"),
    [
        (FAST_MS, [2, 4, 4]),
        (FAST_MS + 1, [1, 1, 1]),
        (SLOW_MS + 1, [1, 1, 1]),
    ],
)
def test_a_fast_disk_gets_larger_batches(took_ms: int, sizes: list[int]) -> None:
    size, found = BatchSize(4), []
    for _ in sizes:
        size.ended(took_ms)
        found.append(size.transfers)
    assert found == sizes


def test_a_disk_that_becomes_slow_gets_smaller_ones() -> None:
    """4 → 4 where it is neither, then 2, 1, 1."""
    size, found = BatchSize(4), []
    for took_ms in (1, 1, SLOW_MS, 9_999, 9_999, 9_999):
        size.ended(took_ms)
        found.append(size.transfers)
    assert found == [2, 4, 4, 2, 1, 1]


@pytest.mark.parametrize(("took_ms", "second"), [(FAST_MS, [2, 3]), (FAST_MS + 1, [2])])
def test_the_next_batch_is_as_large_as_the_last_one_was_fast(
    took_ms: int, second: list[int]
) -> None:
    disk = Disk(slots=8, limits=DiskTierLimits(batch_blocks_max=1))
    write = one(disk.leased(one(disk.host_stored(1), LeaseHost)), WriteSlots)
    disk.wait(took_ms)
    disk.finish(disk.written(write))
    assert asked(of(disk.host_stored(2, 3, 4), LeaseHost)[0]) == second


def test_no_batch_pins_more_than_a_part_of_the_arena() -> None:
    """Four transfers would be four blocks; of 100 slots one part in 32 is three."""
    disk = Disk(slots=50, limits=DiskTierLimits(batch_blocks_max=1))
    for number in (1, 2):
        disk.store(number)
    assert ARENA_SLOTS // ARENA_SHARE == 3
    assert asked(of(disk.host_stored(*range(11, 30)), LeaseHost)[0]) == [11, 12, 13]


# --- chains ---------------------------------------------------------------------------------------


def narrow(**changes: Any) -> DiskTierLimits:
    """One block is written at a time, and one leased ahead."""
    return DiskTierLimits(writes_max=1, batch_blocks_max=1, ahead_batches=0, **changes)


def test_what_hangs_on_a_block_that_is_not_written_is_not_written() -> None:
    """1. 9 is leased, 1 and 11 wait, 2 finds no room. 2. Its child that comes later is refused,
    though there is room, for something waits. 3. When nothing waits any more, it may be written."""
    disk = Disk(slots=8, limits=narrow(pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    disk.host_stored(1)
    disk.host_stored(11)
    disk.host_stored(2)
    effects = disk.leased(lease)
    [second] = of(effects, LeaseHost)
    assert disk.host_stored(3) == []
    assert disk.counts["dropped.write_cut_off"] == 1
    disk.finish([*disk.written(one(effects, WriteSlots)), second])
    assert disk.announced == {9, 1, 11}
    disk.finish(disk.host_stored(3))
    assert disk.announced == {9, 1, 11, 3}


def test_what_failed_for_another_reason_takes_nothing_along() -> None:
    """The lease of 1 is refused; 2, which waits, is written."""
    disk = Disk(slots=8, limits=narrow())
    lease = one(disk.host_stored(1, 2, 11), LeaseHost)
    disk.finish(disk.step(LeaseFailed(lease.write, "bad_request")))
    assert disk.announced == {2, 11}
    assert "dropped.write_cut_off" not in disk.counts


def test_writers_that_change_begin_with_whole_chains() -> None:
    """2 was dropped here; another instance may have written it since, so that its child counts."""
    disk = Disk(slots=8, limits=narrow(pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    for number in (1, 11, 2):
        disk.host_stored(number)
    effects = disk.leased(lease)
    disk.step(WritersKnown(frozenset({"0"})))
    disk.host_stored(3)
    disk.finish(effects)
    assert disk.announced == {9, 1, 11, 3}


def test_what_waits_is_dropped_with_its_parent() -> None:
    """2 has left host memory when its turn comes: 3 and 4, which wait, could not be reached."""
    disk = Disk(slots=8, limits=narrow())
    lease = one(disk.host_stored(1, 2, 3, 4, 11), LeaseHost)
    effects = disk.leased(lease)
    second = one(effects, LeaseHost)
    rest = [*disk.written(one(effects, WriteSlots)), *disk.leased(second, 2)]
    disk.finish(rest)
    assert disk.announced == {1, 11}
    assert disk.counts["dropped.write_gone"] == 1
    assert disk.counts["dropped.write_cut_off"] == 2


def test_what_leaves_the_host_makes_room_at_once() -> None:
    """No lease is asked for 2, and 5 has its place."""
    disk = Disk(limits=narrow(pending_max=2))
    lease = one(disk.host_stored(9), LeaseHost)
    disk.host_stored(1, 2)
    for event in disk.host.removed([block(2)], "evicted"):
        assert disk.step(HostEvent("1", event)) == [], "another host tier still has it"
        assert disk.step(HostEvent("0", event)) == []
    disk.host_stored(5)
    disk.finish([lease])
    assert disk.announced == {9, 1, 5}


def test_a_staging_arena_has_all_of_its_blocks_written() -> None:
    """It can evict only what is on disk: 3 is written although 2 was not."""
    disk = Disk(slots=8, staging=True)
    disk.finish(disk.leased(one(disk.host_stored(1, 2, 3), LeaseHost), 2))
    assert disk.announced == {1, 3}


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), max_size=20),
    st.integers(1, 4),
)
def test_what_is_on_disk_can_be_reached(
    steps: list[tuple[int, int, bool]], pending_max: int
) -> None:
    """The host tells of a chain up to a block, again and again; one block has left its memory at
    times; the disk falls behind: the blocks on disk are the leading ones."""
    disk = Disk(slots=20, limits=narrow(pending_max=pending_max))
    held: list[Effect] = []
    for upto, missing, is_slow in steps:
        held += disk.host_stored(*range(1, upto + 1))
        if is_slow:
            continue
        while held:
            match held.pop(0):
                case LeaseHost() as lease:
                    held += disk.leased(lease, missing)
                case effect:
                    disk.finish([effect])
        assert disk.announced == set(range(1, len(disk.announced) + 1))
