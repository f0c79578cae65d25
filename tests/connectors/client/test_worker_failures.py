"""The worker half when time runs out, arenas change, peers die or a host tier is confused."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from kvbm_common.copying import COPIER, Lanes, Places
from kvbm_common.copying.rank_pieces import BlockCopy
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import (
    MoverThread,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from kvbm_common.wire.local import Found, Hello, Pulled
from kvbm_connectors.client import arena_access, bounce_pool
from kvbm_connectors.client.arena_access import Access, ArenaAccess
from kvbm_connectors.client.arena_reader import Brought
from kvbm_connectors.client.bounce_pool import BUFFERS

from tests.connectors.endpoints import DEADLINE_S, host_tier, welcome
from tests.connectors.helpers import EPOCH
from tests.connectors.ranks import (
    BLOCK_BYTES,
    SIZE,
    SLOT_COUNT,
    THEIRS,
    Host,
    Rank,
    load,
)
from tests.libs.nixl_owner import Owner
from tests.recording import recorded
from tests.waiting import stop_child, wait_for

# --- time, and arenas that change ---------------------------------------------------------------


class Held:
    """A reader whose reads end when the test says so."""

    name = "held"
    chunk_bytes = 1 << 20

    def __init__(self) -> None:
        self.reads: list[Future[Brought]] = []

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        self.reads.append(Future())
        return self.reads[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The reader of the arena that the worker is about to meet."""
    reader = Held()
    monkeypatch.setattr(arena_access, "reader_of", lambda *_, **__: reader)
    return reader


@pytest.mark.slow
def test_an_arena_that_comes_after_the_look_is_not_read(
    rank: Rank, host: Host, owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: slots of one life are read in no other one's arena, verified or not. A host tier is
    met again between the two looks of an engine's thread."""
    look = ArenaAccess.access

    def late(access: ArenaAccess, epoch: int) -> Access:
        found = look(access, epoch)
        if found is Access.READY:
            access.welcomed(
                welcome(
                    EPOCH + 1, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT,
                    arena_path=str(other.path), arena_address=THEIRS, agent=owner.metadata,
                )
            )  # fmt: skip
            wait_for(lambda: epoch_of(access) == EPOCH + 1)
        return found

    with Arena.create(tmp_path, "other", SIZE) as other:
        monkeypatch.setattr(ArenaAccess, "access", late)
        rank.start_load(load([5, 0, 63]))
        result = rank.result()
    assert (result.intact, result.reason) == ((False,) * 3, "arena_changed")


def epoch_of(access: ArenaAccess) -> int:
    """The life whose arena is attached."""
    attached = access.attached()
    return 0 if attached is None else attached.welcome.epoch


def test_a_lease_that_runs_out_under_the_copy_fails_the_load(
    reader: Held, rank: Rank, host: Host
) -> None:
    """The bytes may be another block's by then, however good they look."""
    late = load([1, 2], in_ms=30)
    rank.start_load(late)
    wait_for(lambda: time.monotonic_ns() // 1_000_000 >= late.deadline_ms)
    rank.memory[:2] = 7
    reader.reads[0].set_result(Brought([sums[0] for sums in late.checksums], 0.0, 0.001))
    result = rank.result()
    assert (result.intact, result.reason, result.usable) == ((False, False), "lease_ended", 0)
    assert not rank.counts["bytes.h2d"]
    assert not rank.memory.any()


def test_a_lease_that_has_run_out_is_not_even_read(reader: Held, rank: Rank, host: Host) -> None:
    rank.start_load(load([1], in_ms=-1))
    assert rank.result().reason == "lease_ended"
    assert reader.reads == []


def test_a_load_ends_when_no_late_byte_can_reach_its_blocks(
    reader: Held, rank: Rank, host: Host
) -> None:
    """1. The read times out and drains: the engine may not reuse the blocks. 2. It has settled."""
    settling: Future[None] = Future()
    rank.start_load(load([1]))
    reader.reads[0].set_exception(TransferTimeout("late", settling))
    rank.start_load(load([2]))
    reader.reads[1].set_exception(TransferFailed("busy"))
    assert rank.result().load.slots == (2,)  # The one that came later has ended, and only that one.
    assert rank.loading == 1
    settling.set_result(None)
    assert rank.result().reason == "transfer_timeout"


@pytest.mark.slow
def test_a_peer_that_dies_fails_what_it_had_not_sent(tmp_path: Path) -> None:
    """kill -9 of the arena's owner; the next load fails, and says why."""
    rank = Rank(tmp_path, mover="nixl")
    with Owner(SIZE, os.environ) as dying, host_tier(rank.endpoint) as host:
        rank.meet(host, arena_address=dying.address, agent=dying.metadata)
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        dying.process.kill()
        dying.process.wait(DEADLINE_S)
        rank.start_load(load([1, 2], in_ms=2_000))
        result = rank.result()
        assert result.intact == (False, False)
        assert result.reason in ("peer_lost", "transfer_timeout", "lease_ended")
        rank.close()


def test_a_peer_that_was_lost_fails_the_blocks_of_its_chunk(
    reader: Held, rank: Rank, host: Host
) -> None:
    rank.start_load(load([1, 2]))
    reader.reads[0].set_exception(PeerLost("gone"))
    assert rank.result().reason == "peer_lost"
    assert rank.counts["loads_failed.peer_lost"] == 1


def test_a_load_of_another_arena_fails(
    rank: Rank, host: Host, arena: Arena, owner: Owner, tmp_path: Path
) -> None:
    """1. A load of a life that is to come is parked until the worker has its arena, which it reads.
    2. A load of the life before fails.
    """
    with Arena.create(tmp_path, "another", SIZE) as another:
        another.array[:] = 3
        rank.start_load(load([1], epoch=EPOCH + 1, expected=another.array))
        host.say(welcome(EPOCH + 1, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT,
                         arena_path=str(another.path), arena_address=THEIRS,
                         agent=owner.metadata))  # fmt: skip
        assert rank.result().intact == (True,)
        assert (rank.memory[0] == 3).all()
        rank.start_load(load([1]))
        assert rank.result().reason == "arena_changed"


def test_a_load_before_the_first_welcome_waits_for_it(
    tmp_path: Path, arena: Arena, owner: Owner
) -> None:
    """The scheduler half was welcomed a moment earlier, and has been told of blocks."""
    rank = Rank(tmp_path)
    rank.start_load(load([1, 2]))
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS, agent=owner.metadata)
        assert rank.result().intact == (True, True)
        rank.close()


def test_a_welcome_that_does_not_come_costs_one_deadline(tmp_path: Path) -> None:
    """1. A load waits until its lease ends. 2. The next one of that life does not wait."""
    rank = Rank(tmp_path)
    rank.start()
    rank.start_load(first := load([1], in_ms=300))
    assert rank.result().reason == "no_arena"
    assert time.monotonic_ns() // 1_000_000 >= first.deadline_ms
    rank.start_load(load([2]))
    [second] = rank.drain_ended()
    assert second.reason == "no_arena"
    assert rank.counts["loads_failed.no_arena"] == 2
    rank.close()


def test_before_the_start_and_after_the_end_no_load_is_forgotten(tmp_path: Path) -> None:
    """Nobody waits for ever, and nobody gets an exception."""
    rank = Rank(tmp_path)
    rank.start_load(load([1]))
    rank.close()  # It was never started.
    assert rank.result().reason == "closed"
    rank.start_load(load([1]))
    assert rank.result().reason == "closed"
    assert rank.loading == 0


def test_a_load_in_flight_ends_with_the_worker(
    rank: Rank, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy stands still when the engine stops: it ends first."""
    held, copy = threading.Event(), COPIER.copy

    def late(target: Places, source: Places, *, summed: bool, lanes: Lanes) -> list[int]:
        assert held.wait(DEADLINE_S)
        return copy(target, source, summed=summed, lanes=lanes)

    monkeypatch.setattr(COPIER, "copy", late)
    rank.start_load(load([1]))
    closing = threading.Thread(target=rank.close)
    closing.start()
    held.set()
    closing.join(DEADLINE_S)
    assert rank.result().intact == (True,)


# --- a host tier that stands still ---------------------------------------------------------------


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts without RDMA: UCX emulates READ, and the owner takes part."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.slow
def test_a_stopped_host_tier_fails_loads_at_their_deadline_and_its_late_bytes_land_elsewhere(
    tcp_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The owner of the arena is stopped: loads end by their deadlines, blocks untouched, while
    NIXL still has them open. 2. More of them than there are buffers: the pool is exhausted, which
    is said at once and counted. 3. It runs again: the late bytes come, into the buffers; the blocks
    stay zero. Then loads go on as before."""
    pools = recorded(monkeypatch, arena_access, "BouncePool")
    buffers = recorded(monkeypatch, bounce_pool, "map_shared")
    rank = Rank(tmp_path, mover="nixl")
    with Owner(SIZE, os.environ) as stopped, host_tier(rank.endpoint) as host:
        rank.meet(host, arena_address=stopped.address, agent=stopped.metadata)
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        rank.memory[:] = 0
        stop_child(stopped.process.pid)
        for number in range(BUFFERS + 1):
            started = time.monotonic()
            rank.start_load(load([2, 3], in_ms=300))
            result = rank.result()
            assert time.monotonic() - started < 0.3 + 1
            assert result.intact == (False, False)
            assert (result.reason == "bounce_exhausted") is (number == BUFFERS)
        [pool] = pools
        assert pool.lost == BUFFERS
        assert rank.counts["loads_failed.bounce_exhausted"] == 1
        assert not rank.memory.any()
        stopped.process.send_signal(signal.SIGCONT)
        wait_for(lambda: pool.lost == 0)
        assert buffers[0][: 2 * BLOCK_BYTES].any()
        assert not rank.memory.any()
        rank.start_load(load([4]))
        assert rank.result().intact == (True,)
        rank.close()


# --- confused host tiers ------------------------------------------------------------------------


def test_metadata_that_is_none_leaves_the_worker_without_an_arena(
    tmp_path: Path, arena: Arena, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and lives; loads do not wait. What it is told next is another chance."""
    rank = Rank(tmp_path)
    with host_tier(rank.endpoint) as host:
        rank.start()
        host.hear(Hello)
        host.say(welcome(EPOCH, agent=b"garbage"))
        wait_for(lambda: "cannot be reached" in caplog.text)
        rank.start_load(load([1]))
        assert rank.result().reason == "no_arena"
        place = {"arena_path": str(arena.path), "arena_address": THEIRS}
        host.say(welcome(EPOCH, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT,
                         agent=owner.metadata, **place))  # fmt: skip
        wait_for(lambda: rank.epoch == EPOCH)
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        rank.close()


def test_a_second_welcome_does_not_take_away_what_the_first_has_given(
    tmp_path: Path,
    owner: Owner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every greeting is answered, and the second answer may come while the first is attached."""
    gate = threading.Event()
    add_peer = MoverThread.add_peer

    def slow(mover: MoverThread, metadata: bytes) -> Future[str]:
        assert gate.wait(DEADLINE_S)
        return add_peer(mover, metadata)

    monkeypatch.setattr(MoverThread, "add_peer", slow)
    attachers = recorded(monkeypatch, arena_access, "ThreadPoolExecutor")
    rank = Rank(tmp_path, mover="nixl")
    with host_tier(rank.endpoint) as host:
        rank.start()
        host.hear(Hello)
        for _ in range(2):
            host.say(welcome(EPOCH, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT,
                             arena_address=owner.address, agent=owner.metadata))  # fmt: skip
        host.send(b"garbage")
        wait_for(lambda: "was dropped" in caplog.text)
        gate.set()
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        attachers[0].submit(lambda: None).result(DEADLINE_S)
        rank.start_load(load([2]))
        assert rank.result().intact == (True,)
        rank.close()


def test_an_arena_that_cannot_be_reached_is_tried_again(
    tmp_path: Path, arena: Arena, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine in trouble: NIXL fails twice, or does not answer. Nobody says welcome again."""
    failures: list[Exception] = [TransferFailed("busy"), TimeoutError()]
    add_peer = MoverThread.add_peer

    def fails_at_first(mover: MoverThread, metadata: bytes) -> Future[str]:
        if not failures:
            return add_peer(mover, metadata)
        failed: Future[str] = Future()
        failed.set_exception(failures.pop())
        return failed

    monkeypatch.setattr(MoverThread, "add_peer", fails_at_first)
    monkeypatch.setattr("kvbm_connectors.client.arena_access.RETRY_MS", 20)
    rank = Rank(tmp_path, mover="nixl")
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=owner.address,
                  agent=owner.metadata)  # fmt: skip
        assert failures == []
        assert rank.counts["arena_failures"] == 2
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        rank.close()


def test_who_maps_an_arena_is_no_peer_of_its_host_tier(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host tier polls for peers that may read from it, and such an engine never does."""
    added: list[bytes] = []
    monkeypatch.setattr(MoverThread, "add_peer", lambda _mover, agent: added.append(agent))
    rank = Rank(tmp_path)
    with host_tier(rank.endpoint) as host:
        rank.meet(host, arena_path=str(arena.path), arena_address=THEIRS)
        rank.start_load(load([1]))
        assert rank.result().intact == (True,)
        rank.close()
    assert not added


def test_what_is_not_for_a_worker_is_passed_over(
    rank: Rank, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """A confused host tier answers lookups to the wrong half."""
    host.say(Pulled(offer=1, pulled=1, skipped=0))
    host.say(Found(lookup=1, epoch=EPOCH, lease=0, slots=[], checksums=[], block_bytes=0))
    host.send(b"garbage")
    wait_for(lambda: "was dropped" in caplog.text)
    rank.start_load(load([1]))
    assert rank.result().intact == (True,)


@pytest.mark.parametrize("slots", [[SLOT_COUNT], [1, 2**40]])
def test_slots_beyond_the_arena_fail(rank: Rank, host: Host, slots: list[int]) -> None:
    rank.start_load(replace(load([1] * len(slots)), slots=tuple(slots)))
    assert not any(rank.result().intact)
