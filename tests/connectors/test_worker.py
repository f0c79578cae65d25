"""The worker half: loads out of a real arena, into the right blocks, and verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvbm_common.arena import Arena
from kvbm_common.checksum import block_checksum
from kvbm_common.layout import CHUNK_BYTES
from kvbm_common.wire.local import Hello
from kvbm_connectors.messages import Load

from tests.connectors.endpoints import host_tier, wait_for, welcome
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


@pytest.mark.parametrize("mover", ["nixl", "auto"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_load_over_nixl_from_another_process(
    tmp_path: Path, arena: Arena, owner: Owner, mover: str, pieces: int
) -> None:
    """As one region or as many; `auto` measures both ways, and either is right."""
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
                     tuple(block_checksum(blocks[i]) for i in (2, 1, 0)), size, 2**60)  # fmt: skip
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


def test_a_block_that_cannot_be_read_for_verification_fails(
    tmp_path: Path, arena: Arena, owner: Owner
) -> None:
    """The engine waits for the end of every load, whatever goes wrong in it."""

    def broken(_block: int) -> np.ndarray:
        raise ZeroDivisionError("CUDA error")

    rank = Rank(tmp_path, read_block=broken)
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        rank.start_load(load([1, 2]))
        result = rank.result()
        assert (result.intact, result.reason) == ((False, False), "ZeroDivisionError")
        assert rank.loading == 0
        rank.close()
