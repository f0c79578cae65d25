"""The puller: when a pull has ended, what it sums up, and which slots it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.checksum import block_checksum
from kvbm_common.counters import Counters
from kvbm_common.nixl import Moved, PeerLost, TransferTimeout
from kvbm_common.wire.local import Region
from kvbm_host_tier.messages import PullDone, PullFailed, PullPart, PullSettled, StartPull
from kvbm_host_tier.puller import Puller

from tests.waiting import wait_until

SLOT_BYTES = 4096


class Reads:
    """In the place of NIXL: every read is a future that the test ends."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Future[Moved]]] = {}

    def read(self, peer: str, *_: object, **__: object) -> Future[Moved]:
        """Ask."""
        read: Future[Moved] = Future()
        self.asked.setdefault(peer, []).append(read)
        return read


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[Puller]:
    """With an arena of four slots."""
    puller = Puller(tmp_path, name="test", counters=Counters())
    puller.make_arena(4 * SLOT_BYTES)
    yield puller
    puller.close()


@pytest.fixture
def reads(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Its reads do nothing by themselves."""
    reads = Reads()
    monkeypatch.setattr(puller.mover, "read", reads.read)
    return reads


def start_pull(*, ranks: int) -> StartPull:
    """Blocks 5 and 6 into slots 2 and 0, each of so many parts of 64 bytes."""
    region = Region(address=1 << 20, stride=64, piece_bytes=64, blocks=9)
    parts = tuple(PullPart(f"rank-{rank}", (region,), 64 * rank) for rank in range(ranks))
    return StartPull(
        pull=1, parts=parts, blocks=(5, 6), slots=(2, 0), block_bytes=64 * ranks, deadline_ms=1000
    )


def begin(puller: Puller, *, ranks: int) -> asyncio.Task[PullDone | PullFailed]:
    """A pull on its way."""
    pulling: Any = puller.pull(start_pull(ranks=ranks), slot_bytes=SLOT_BYTES)
    return asyncio.create_task(pulling)


async def test_sums_are_in_the_order_of_the_slots(puller: Puller, reads: Reads) -> None:
    """Over both ranks' parts of each block."""
    pulling = begin(puller, ranks=2)
    await wait_until(lambda: len(reads.asked) == 2)
    arena = puller._live
    for slot in (2, 0):
        arena.view(slot * SLOT_BYTES, 128)[:] = bytes([slot + 1]) * 128
    for [read] in reads.asked.values():
        read.set_result(Moved(128, 0.001))
    done = await pulling
    assert isinstance(done, PullDone)
    assert done.checksums == (block_checksum(b"\3" * 128), block_checksum(b"\1" * 128))


async def test_a_pull_ends_when_every_rank_has(puller: Puller, reads: Reads) -> None:
    """Goal: no slot is given back while another rank's bytes are on their way into it."""
    pulling = begin(puller, ranks=2)
    await wait_until(lambda: len(reads.asked) == 2)
    reads.asked["rank-0"][0].set_exception(PeerLost("gone"))
    ended, _ = await asyncio.wait({pulling}, timeout=0.1)
    assert not ended
    reads.asked["rank-1"][0].set_result(Moved(128, 0.001))
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
