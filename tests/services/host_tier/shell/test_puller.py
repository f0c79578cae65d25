"""The puller: when a pull has ended, what it sums up, and which slots it gives back."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.copying import thread_count
from kvbm_common.memory.arena import Arena, ArenaNoSpace
from kvbm_common.nixl.mover_thread import (
    MoverThread,
    PeerLost,
    TransferFailed,
    Transferred,
    TransferTimeout,
)
from kvbm_common.nixl.pump import QUIET_POLL_S
from kvbm_common.nixl.spans import Spans
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.parts import Grid, Share, share_of_rank
from kvbm_common.wire.local import Region
from kvbm_host_tier.core.messages import (
    NO_ARENA,
    AttachPeer,
    EngineId,
    PeerAttached,
    PeerFailed,
    PullDone,
    PullFailed,
    PullPart,
    PullSettled,
    StartPull,
)
from kvbm_host_tier.shell.puller import Puller

from tests.waiting import wait_until

SLOT_BYTES = 4096


class Reads:
    """In the place of NIXL: every read is a future that the test ends."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Future[Transferred]]] = {}
        self.spans: dict[str, tuple[Spans, Spans]] = {}
        """Of the last read from each peer: ours and theirs."""

    def read(self, peer: str, into: Spans, source: Spans, **_: object) -> Future[Transferred]:
        """Ask."""
        read: Future[Transferred] = Future()
        self.asked.setdefault(peer, []).append(read)
        self.spans[peer] = into, source
        return read


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[Puller]:
    """With an arena of four slots."""
    puller = Puller(tmp_path, name="test", counters=Metrics())
    puller.make_arena(4 * SLOT_BYTES)
    yield puller
    puller.close()


@pytest.fixture
def reads(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Its reads do nothing by themselves."""
    reads = Reads()
    for mover in puller.movers:
        monkeypatch.setattr(mover, "read", reads.read)
    return reads


def test_an_arena_goes_only_for_one_that_fits_in_its_place(
    puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One that cannot fit. 2. One whose space another process takes meanwhile. 3. One that does.
    `info` says each time what is there."""
    first = puller.info
    with pytest.raises(ArenaNoSpace):
        puller.make_arena(1 << 60)
    assert puller.info == first
    assert Path(first.path).stat().st_size == first.capacity_bytes

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(ArenaNoSpace):
            puller.make_arena(8 * SLOT_BYTES)
    assert puller.info == NO_ARENA
    assert list(tmp_path.iterdir()) == []
    assert puller.make_arena(8 * SLOT_BYTES) == puller.info
    assert puller.info.capacity_bytes == 8 * SLOT_BYTES


async def test_movers_rest_until_an_engine_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, no one reads the arena. Of several movers only the first is ever read from."""
    polls: dict[MoverThread, float | None] = {}
    monkeypatch.setattr(MoverThread, "look_out", lambda one, every_s: polls.update({one: every_s}))
    puller = Puller(tmp_path, name="test", counters=Metrics())
    try:
        puller.make_arena(4 * SLOT_BYTES)
        assert polls == dict.fromkeys(puller.movers)
        with MoverThread("worker") as worker:
            engine, agent = EngineId("ada", "0" * 16), worker.metadata().result(5)
            assert isinstance(await puller.attach(AttachPeer(engine, 0, agent)), PeerAttached)
        assert polls == dict.fromkeys(puller.movers) | {puller.mover: QUIET_POLL_S}
    finally:
        puller.close()


def test_the_arena_agent_stands_ready_only_for_engines_that_read_over_nixl(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most map the arena. For those a thousand polls a second would be for nothing."""
    told: list[tuple[MoverThread, float, bool]] = []

    def attend(mover: MoverThread, seconds: float, *, if_added: bool = False) -> None:
        told.append((mover, seconds, if_added))

    monkeypatch.setattr(MoverThread, "attend", attend)
    puller.expect_reads(60)
    assert told == [(puller.mover, 60, True)]


def start_pull(*, ranks: int) -> StartPull:
    """Blocks 5 and 6 into slots 2 and 0, each of so many parts of 64 bytes."""
    region = Region(address=1 << 20, stride=64, piece_bytes=64, blocks=9)
    parts = tuple(
        PullPart(f"rank-{rank}", (region,), share_of_rank(rank, ranks)) for rank in range(ranks)
    )
    return StartPull(
        pull=1, parts=parts, blocks=(5, 6), slots=(2, 0), block_bytes=64 * ranks, deadline_ms=1000
    )


def begin(puller: Puller, *, ranks: int) -> asyncio.Task[PullDone | PullFailed]:
    """A pull on its way."""
    pulling: Any = puller.pull(start_pull(ranks=ranks))
    return asyncio.create_task(pulling)


def attach(directory: Path) -> Arena:
    """The puller's arena, as an engine maps it."""
    [path] = directory.iterdir()
    return Arena.attach(path)


async def test_sums_are_in_the_order_of_the_slots(
    puller: Puller, reads: Reads, tmp_path: Path
) -> None:
    """Of each rank's part of each block."""
    pulling = begin(puller, ranks=2)
    await wait_until(lambda: len(reads.asked) == 2)
    with attach(tmp_path) as arena:
        for slot in (2, 0):
            arena.view(slot * SLOT_BYTES, 64)[:] = bytes([slot + 1]) * 64
            arena.view(slot * SLOT_BYTES + 64, 64)[:] = bytes([slot + 7]) * 64
    for [read] in reads.asked.values():
        read.set_result(Transferred(128, 0.001))
    done = await pulling
    assert isinstance(done, PullDone)
    parts = [[block_checksum(bytes([byte]) * 64) for byte in pair] for pair in ((3, 9), (1, 7))]
    assert done.sums == tuple(map(pack_sums, parts))


async def test_scattered_parts_go_where_they_belong(
    puller: Puller, reads: Reads, tmp_path: Path
) -> None:
    """Four layers and two heads of 16 bytes, on a rank for each head: a block's layers take turns.
    The sums are those of two ranges of layers by two heads, whichever rank brought them."""
    grid = Grid(ranges=2, layers=2, heads=2)
    region = Region(address=1 << 20, stride=64, piece_bytes=64, blocks=9)
    parts = tuple(
        PullPart(f"rank-{head}", (region,), Share(grid, 0, 2, head, head + 1)) for head in (1, 0)
    )
    pull = StartPull(pull=1, parts=parts, blocks=(5,), slots=(2,), block_bytes=128,
                     deadline_ms=1000)  # fmt: skip
    pulling: Any = puller.pull(pull)
    done = asyncio.create_task(pulling)
    await wait_until(lambda: len(reads.asked) == 2)
    data = bytes(range(128))
    with attach(tmp_path) as arena:
        arena.view(2 * SLOT_BYTES, 128)[:] = data
    for [read] in reads.asked.values():
        read.set_result(Transferred(64, 0.001))
    result = await done
    assert isinstance(result, PullDone)
    runs = [data[at : at + 16] for at in range(0, 128, 16)]
    expected = [runs[0] + runs[2], runs[1] + runs[3], runs[4] + runs[6], runs[5] + runs[7]]
    assert result.sums == (pack_sums(map(block_checksum, expected)),)
    for head, (into, source) in reads.spans.items():
        offsets = (into.rows[:, 0] - into.rows[0, 0]).tolist()
        assert offsets == [0, 32, 64, 96], head
        assert source.rows[:, 0].tolist() == [(1 << 20) + 5 * 64 + at for at in (0, 16, 32, 48)]
        assert set(into.rows[:, 1].tolist()) == set(source.rows[:, 1].tolist()) == {16}


async def test_chunks_are_shared_out_among_the_movers(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk goes to the mover with the fewest bytes to bring; each sums up what it brought."""
    asked: list[list[Future[Transferred]]] = [[] for _ in puller.movers]

    def read_of(index: int) -> Any:
        def read(*_: object, **__: object) -> Future[Transferred]:
            asked[index].append(Future())
            return asked[index][-1]

        return read

    for index, mover in enumerate(puller.movers):
        monkeypatch.setattr(mover, "read", read_of(index))
    monkeypatch.setattr("kvbm_host_tier.shell.puller.PULL_CHUNK_BYTES", 64)
    four = replace(start_pull(ranks=1), blocks=(5, 6, 7, 8), slots=(2, 0, 1, 3))
    pulling: Any = puller.pull(four)
    pulled = asyncio.create_task(pulling)
    await wait_until(lambda: sum(map(len, asked)) == 4)
    assert list(map(len, asked)) == [4 // len(puller.movers)] * len(puller.movers)
    for read in asked[-1]:
        read.set_result(Transferred(64, 0.001))
    # The last mover is free now, the first is not: the next two chunks are the last one's.
    two = replace(start_pull(ranks=1), pull=2)
    following: Any = puller.pull(two)
    followed = asyncio.create_task(following)
    await wait_until(lambda: sum(map(len, asked)) == 6)
    assert len(asked[-1]) == 4
    for read in (read for reads in asked for read in reads if not read.done()):
        read.set_result(Transferred(64, 0.001))
    done = await pulled
    assert isinstance(done, PullDone)
    assert done.sums == (pack_sums([block_checksum(bytes(64))]),) * 4
    assert isinstance(await followed, PullDone)
    assert len(puller.movers) == min(2, thread_count())


async def test_a_chunk_that_cannot_be_summed_up_ends_the_pull(
    puller: Puller, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object, **__: object) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr("kvbm_host_tier.shell.puller.COPIER.sums", broken)
    pulling = begin(puller, ranks=1)
    await wait_until(lambda: len(reads.asked) == 1)
    reads.asked["rank-0"][0].set_result(Transferred(128, 0.001))
    with pytest.raises(ZeroDivisionError):
        await pulling


async def test_a_pull_ends_when_every_rank_has(puller: Puller, reads: Reads) -> None:
    """Goal: no slot is given back while another rank's bytes are on their way into it."""
    pulling = begin(puller, ranks=2)
    await wait_until(lambda: len(reads.asked) == 2)
    reads.asked["rank-0"][0].set_exception(PeerLost("gone"))
    ended, _ = await asyncio.wait({pulling}, timeout=0.1)
    assert not ended
    reads.asked["rank-1"][0].set_result(Transferred(128, 0.001))
    assert await pulling == PullFailed(1, "peer_lost", settled=True)


async def test_an_unsettled_read_is_watched(puller: Puller, reads: Reads) -> None:
    """A late read is told of when its last byte has landed, not before."""
    settled: list[PullSettled] = []
    puller.on_settled = settled.append
    settling: Future[None] = Future()
    pulling = begin(puller, ranks=1)
    await wait_until(lambda: len(reads.asked) == 1)
    reads.asked["rank-0"][0].set_exception(TransferTimeout("late", settling))
    assert await pulling == PullFailed(1, "transfer_timeout", settled=False)
    assert settled == []
    settling.set_result(None)
    await wait_until(lambda: settled == [PullSettled(1)])


async def test_a_peer_that_one_mover_refuses_is_forgotten_by_the_others(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is the answer at once; a mover that adds the peer later removes it again."""
    first, *_, last = puller.movers
    late: Future[str] = Future()
    refused: Future[str] = Future()
    refused.set_exception(TransferFailed("no descriptors are left"))
    removed: list[str] = []
    monkeypatch.setattr(last, "add_peer", lambda _: refused)
    monkeypatch.setattr(first, "add_peer", lambda _: late)
    monkeypatch.setattr(first, "remove_peer", removed.append)
    answer = await puller.attach(AttachPeer(EngineId("ada", "0" * 16), 0, b"agent"))
    assert answer == PeerFailed(EngineId("ada", "0" * 16), 0, "no descriptors are left")
    assert not removed
    late.set_result("worker")
    assert removed == ["worker"]
