"""The worker half: loads out of a real arena, into the right blocks, and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.copying import COPIER, Places
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.layout import CHUNK_BYTES
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.wire.local import Hello
from kvbm_connectors.core.messages import Load

from tests.connectors.endpoints import host_tier, welcome
from tests.connectors.helpers import EPOCH, name
from tests.connectors.ranks import (
    BLOCK_BYTES,
    SIZE,
    THEIRS,
    Host,
    Rank,
    load,
    loaded,
)
from tests.libs.nixl_owner import Owner, content
from tests.waiting import wait_for

# --- the good path ------------------------------------------------------------------------------


def test_a_load_brings_the_right_slots_into_the_right_blocks(rank: Rank, host: Host) -> None:
    rank.start_load(load([5, 0, 63]))
    result = rank.result()
    assert (result.intact, result.corrupt, result.reason) == ((True, True, True), (), "")
    assert result.seconds > 0
    assert loaded(rank, [5, 0, 63])
    assert not rank.memory[3:].any()
    assert (rank.counts["verified_blocks"], rank.counts["bytes.h2d"]) == (3, 3 * BLOCK_BYTES)
    assert rank.loading == 0
    assert rank.drain_ended() == []


@pytest.mark.parametrize(("every", "said"), [(0, "never"), (1, "always"), (16, "sampled")])
def test_a_worker_says_which_loads_it_verifies(tmp_path: Path, every: int, said: str) -> None:
    """An engine's connector may be configured otherwise than the host tier."""
    rank = Rank(tmp_path, verify_every=every)
    with host_tier(rank.endpoint) as host:
        rank.start()
        assert host.hear(Hello).verify == said
        rank.close()


def test_a_welcome_makes_it_ready_for_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier has just added the worker's agent. An idle agent would answer a step of the
    handshake every quarter of a second, and the first read would wait for it."""
    expected: list[MoverThread] = []
    monkeypatch.setattr(MoverThread, "expect_peer", lambda mover: expected.append(mover))
    rank = Rank(tmp_path)
    rank.start()
    with host_tier(rank.endpoint) as host:
        host.hear(Hello)
        assert not expected
        host.say(welcome(EPOCH, slot_bytes=BLOCK_BYTES, slot_count=1))
        wait_for(lambda: expected)
    rank.close()


@pytest.mark.parametrize("mover", ["nixl", "auto"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_load_over_nixl_from_another_process(
    tmp_path: Path, arena: Arena, owner: Owner, mover: str, pieces: int
) -> None:
    """As one region or as many; `auto` maps what can be mapped."""
    rank = Rank(tmp_path, mover=mover, pieces=pieces)
    with host_tier(rank.endpoint) as host:
        path = str(arena.path) if mover == "auto" else "/nowhere"
        address = owner.address
        rank.meet(host, arena_path=path, arena_address=address, agent=owner.metadata)
        for slots in ([1, 2, 3], [9, 8]):
            rank.start_load(load(slots))
            assert all(rank.result().intact)
            assert loaded(rank, slots)
        rank.close()


@pytest.mark.slow
def test_a_load_of_many_chunks_is_one_result(tmp_path: Path, owner: Owner) -> None:
    """Blocks larger than a chunk: each is read, summed up and counted by itself."""
    size = CHUNK_BYTES + 4096
    rank = Rank(tmp_path, block_bytes=size)
    bytes_there = np.random.default_rng(1).integers(0, 256, 3 * size, dtype=np.uint8)
    with (
        Arena.create(tmp_path, "arena", 3 * size) as arena,
        host_tier(rank.endpoint) as host,
    ):
        arena.array[:] = bytes_there
        rank.start()
        host.hear(Hello)
        host.say(welcome(EPOCH, slot_bytes=size, slot_count=3, arena_path=str(arena.path),
                         arena_address=THEIRS, agent=owner.metadata))  # fmt: skip
        wait_for(lambda: rank.epoch == EPOCH)
        blocks = bytes_there.reshape(3, size)
        whole = Load("r", EPOCH, 5, (2, 1, 0), (0, 1, 2), (name(1), name(2), name(3)),
                     tuple(pack_sums([block_checksum(blocks[i])]) for i in (2, 1, 0)), size,
                     2**60)  # fmt: skip
        rank.start_load(whole)
        assert rank.result().intact == (True, True, True)
        assert np.array_equal(rank.memory[:3], blocks[[2, 1, 0]])
        arena.array[size] ^= 1
        rank.start_load(whole)
        result = rank.result()
        assert (result.intact, result.corrupt) == ((True, False, True), (1,))
        rank.close()


# --- wrong bytes --------------------------------------------------------------------------------


def test_a_corrupt_byte_fails_its_block_and_no_other(rank: Rank, host: Host, arena: Arena) -> None:
    """One bit of slot 7: the block is named corrupt, so that nobody is served it again."""
    arena.array[7 * BLOCK_BYTES + 100] ^= 1
    rank.start_load(load([6, 7, 8]))
    result = rank.result()
    assert (result.intact, result.corrupt) == ((True, False, True), (1,))
    assert (result.reason, result.usable) == ("corrupt", 1)
    assert rank.counts["loads_failed.corrupt"] == 1
    assert rank.counts["bytes.h2d"] == 2 * BLOCK_BYTES


def test_a_corrupt_byte_in_another_process_is_found_too(tmp_path: Path, owner: Owner) -> None:
    """The checksum says what had been stored; what NIXL reads is something else."""
    rank = Rank(tmp_path, mover="nixl")
    other = content(SIZE)
    other[BLOCK_BYTES] ^= 1
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_address=owner.address, agent=owner.metadata)
        rank.start_load(load([0, 1], expected=other))
        result = rank.result()
        assert (result.intact, result.corrupt) == ((True, False), (1,))
        rank.close()


def test_sampled_verification_looks_at_one_load_in_so_many(
    tmp_path: Path, arena: Arena, owner: Owner
) -> None:
    rank = Rank(tmp_path, verify_every=3)
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        for _ in range(6):
            rank.start_load(load([1, 2]))
            rank.result()
        assert rank.counts["verified_blocks"] == 4
        rank.close()


def test_each_rank_verifies_its_own_part_of_every_block(
    tmp_path: Path, arena: Arena, owner: Owner
) -> None:
    """1. Rank 1 of two takes the second half of each slot. 2. A byte of rank 0's half is not its
    business. 3. A byte of its own is: the block is corrupt, and zeroed."""
    half = BLOCK_BYTES // 2
    rank = Rank(tmp_path, block_bytes=half, rank=1, world_size=2)
    sums = [
        pack_sums(block_checksum(part) for part in (slot[:half], slot[half:]))
        for slot in content(SIZE).reshape(-1, BLOCK_BYTES)[[3, 4]]
    ]
    both = replace(load([3, 4]), checksums=tuple(sums))
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        arena.array[4 * BLOCK_BYTES] ^= 1
        rank.start_load(both)
        assert rank.result().intact == (True, True)
        assert np.array_equal(rank.memory[0], arena.array[3 * BLOCK_BYTES + half : 4 * BLOCK_BYTES])
        arena.array[4 * BLOCK_BYTES + half] ^= 1
        rank.start_load(both)
        result = rank.result()
        assert (result.intact, result.corrupt) == ((True, False), (1,))
        assert not rank.memory[1].any()
        assert rank.counts["verified_blocks"] == 4
        rank.close()


def test_a_block_without_a_checksum_for_this_rank_is_not_used(
    tmp_path: Path, arena: Arena, owner: Owner
) -> None:
    """One checksum, and two ranks: nothing says whether this rank's part is what was stored."""
    rank = Rank(tmp_path, block_bytes=BLOCK_BYTES // 2, rank=0, world_size=2)
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        rank.start_load(load([3]))
        result = rank.result()
        assert (result.intact, result.corrupt, result.reason) == ((False,), (), "no_checksum")
        assert not rank.memory.any()
        rank.close()


def test_a_part_that_cannot_be_summed_up_fails(
    rank: Rank, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits for the end of every load, whatever goes wrong in it."""

    def broken(*_: object, **__: object) -> list[int]:
        raise ZeroDivisionError("CUDA error")

    monkeypatch.setattr(COPIER, "copy", broken)
    rank.start_load(load([1, 2]))
    result = rank.result()
    assert (result.intact, result.reason) == ((False, False), "ZeroDivisionError")
    assert rank.loading == 0


# --- what is not verified does not stay ---------------------------------------------------------

NAN = 0xFF
"""Bytes that are not a number in every float format."""


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_corrupt_block_is_zeroed_and_no_other(
    tmp_path: Path, arena: Arena, owner: Owner, pieces: int
) -> None:
    """What came for it is gone before the engine hears of it, in every piece; the blocks beside it
    are left alone."""
    arena.array[7 * BLOCK_BYTES : 8 * BLOCK_BYTES] = NAN
    rank = Rank(tmp_path, pieces=pieces)
    rank.memory[3:] = 5
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        rank.start_load(load([6, 7, 8]))
        assert rank.result().intact == (True, False, True)
        expected = content(SIZE).reshape(-1, BLOCK_BYTES)
        assert np.array_equal(rank.memory[[0, 2]], expected[[6, 8]])
        assert not rank.memory[1].any()
        assert (rank.memory[3:] == 5).all()
        assert rank.counts["cleared_blocks"] == 1
        rank.close()


def test_a_copy_that_breaks_off_leaves_nothing_behind(
    rank: Rank, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a block has been written when the copy fails."""

    def torn(target: Places, source: Places, *, summed: bool) -> list[int]:
        rank.memory[:2, :100] = NAN
        raise OSError("the mapping has lost its file")

    monkeypatch.setattr(COPIER, "copy", torn)
    rank.start_load(load([1, 2]))
    assert rank.result().intact == (False, False)
    assert not rank.memory.any()
