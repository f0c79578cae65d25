"""The mover on real NIXL: two processes, real files, and peers that stop, die and lie."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvbm_common.nixl import library, pump, transfer_queue
from kvbm_common.nixl.mover_thread import (
    JOB_COUNT_MAX,
    BadPeerMetadata,
    MoverBusy,
    MoverClosed,
    MoverThread,
    MoverUnavailable,
    PeerLost,
    TransferError,
    TransferFailed,
    Transferred,
    TransferTimeout,
    probe_posix,
)
from kvbm_common.nixl.pump import IDLE_POLL_S, PAUSE_S, QUIET_POLL_S, RING_PAUSE_S
from kvbm_common.nixl.spans import Spans
from numpy.typing import NDArray

from tests.libs.nixl_owner import Owner, content
from tests.waiting import stop_child, wait_for

SIZE = 32 << 20
BLOCK = 256 << 10
LIMIT_S = 10.0


@dataclass
class Memory:
    """Page-aligned memory, as O_DIRECT wants it."""

    mapping: mmap.mmap
    array: NDArray[np.uint8]

    @classmethod
    def of(cls, size_bytes: int) -> Memory:
        mapping = mmap.mmap(-1, size_bytes)
        return cls(mapping, np.frombuffer(mapping, dtype=np.uint8))

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def blocks(self, indices: range | list[int], length: int = BLOCK) -> Spans:
        return spans(self.address, indices, length)


def spans(base: int, indices: range | list[int], length: int = BLOCK) -> Spans:
    return Spans.of(base + np.asarray(indices, dtype=np.uint64) * np.uint64(length), length)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    with Owner(SIZE, os.environ) as owner:
        yield owner


@pytest.fixture
def memory() -> Memory:
    return Memory.of(SIZE)


@pytest.fixture
def mover(memory: Memory) -> Iterator[MoverThread]:
    with MoverThread("test") as mover:
        mover.register_memory(memory.address, SIZE).result(LIMIT_S)
        yield mover


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts without RDMA: UCX emulates READ, and the owner takes part."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def read_blocks(
    mover: MoverThread, peer: str, memory: Memory, owner: Owner, blocks: range, deadline_s: float
) -> Future[Transferred]:
    return mover.read(
        peer, memory.blocks(blocks), spans(owner.address, blocks), deadline_s=deadline_s
    )


def on_files(queue: str) -> MoverThread:
    """A mover that asks the kernel in this way, if it may."""
    try:
        return MoverThread(
            "files", backends=("POSIX",), posix_params={queue: "true", "ios_pool_size": "16384"}
        )
    except MoverUnavailable:
        pytest.skip(f"{queue} is not allowed here")


class TestRead:
    @pytest.mark.slow
    def test_a_pull_brings_the_owners_bytes_to_the_right_places(
        self, mover: MoverThread, memory: Memory, owner: Owner
    ) -> None:
        """Blocks are read in reverse order, so a mistake in pairing would show."""
        peer = mover.add_peer(owner.metadata).result(LIMIT_S)
        count = SIZE // BLOCK
        order = list(reversed(range(count)))

        moved = mover.read(
            peer, memory.blocks(order), spans(owner.address, range(count)), deadline_s=LIMIT_S
        ).result(LIMIT_S)

        expected = content(SIZE).reshape(count, BLOCK)[::-1]
        assert np.array_equal(memory.array.reshape(count, BLOCK), expected)
        assert moved.bytes == SIZE

    def test_many_transfers_in_flight_all_arrive(
        self, mover: MoverThread, memory: Memory, owner: Owner
    ) -> None:
        peer = mover.add_peer(owner.metadata).result(LIMIT_S)
        futures = [
            read_blocks(mover, peer, memory, owner, range(i, i + 1), LIMIT_S)
            for i in range(SIZE // BLOCK)
        ]

        assert sum(future.result(LIMIT_S).bytes for future in futures) == SIZE
        assert np.array_equal(memory.array, content(SIZE))
        assert mover.statistics().transfers_done == len(futures)

    @pytest.mark.slow
    def test_a_read_over_tcp_works_while_the_owner_is_idle(
        self, tcp_only: None, memory: Memory
    ) -> None:
        with Owner(SIZE, os.environ) as owner, MoverThread("tcp") as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            blocks = range(SIZE // BLOCK)
            read_blocks(mover, peer, memory, owner, blocks, LIMIT_S).result(LIMIT_S)
        assert np.array_equal(memory.array, content(SIZE))

    def test_a_range_that_the_owner_did_not_register_is_refused(
        self, mover: MoverThread, memory: Memory, owner: Owner
    ) -> None:
        peer = mover.add_peer(owner.metadata).result(LIMIT_S)
        beyond = spans(owner.address + SIZE, range(1))
        with pytest.raises(TransferFailed) as failed:
            mover.read(peer, memory.blocks(range(1)), beyond, deadline_s=1).result(LIMIT_S)
        assert failed.value.settled

    @pytest.mark.parametrize("metadata", [b"", b"garbage" * 40, None])
    def test_bad_metadata_is_a_typed_error(
        self, mover: MoverThread, owner: Owner, metadata: bytes | None
    ) -> None:
        cut = owner.metadata[:100] if metadata is None else metadata
        with pytest.raises(BadPeerMetadata):
            mover.add_peer(cut).result(LIMIT_S)

    def test_a_peer_whose_name_is_no_text_is_a_typed_error(
        self, mover: MoverThread, owner: Owner
    ) -> None:
        assert b"owner" in owner.metadata
        bad = owner.metadata.replace(b"owner", b"\xff" * len("owner"))
        with pytest.raises(BadPeerMetadata):
            mover.add_peer(bad).result(LIMIT_S)

    def test_an_unknown_peer_is_a_lost_peer(self, mover: MoverThread, memory: Memory) -> None:
        one = memory.blocks(range(1))
        with pytest.raises(PeerLost):
            mover.read("nobody", one, one, deadline_s=1).result(LIMIT_S)


class TestUnresponsivePeer:
    @pytest.mark.slow
    def test_a_stopped_peer_is_read_over_cma_once_connected(
        self, mover: MoverThread, memory: Memory
    ) -> None:
        """CMA copies out of another address space without asking it; documented behaviour."""
        with Owner(SIZE, os.environ) as owner:
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            read_blocks(mover, peer, memory, owner, range(1), LIMIT_S).result(LIMIT_S)
            memory.array[:] = 0
            stop_child(owner.process.pid)

            read_blocks(mover, peer, memory, owner, range(1), 1).result(LIMIT_S)
        assert np.array_equal(memory.array[:BLOCK], content(SIZE)[:BLOCK])

    @pytest.mark.slow
    def test_a_late_transfer_is_unsettled_until_nixl_has_ended_it(
        self, tcp_only: None, memory: Memory
    ) -> None:
        """1. Stop the owner. 2. Read: the deadline passes. 3. Let the owner run: the bytes still
        arrive, which is why the memory was not settled before."""
        with Owner(SIZE, os.environ) as owner, MoverThread("late") as mover:
            registration = mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            read_blocks(mover, peer, memory, owner, range(1), LIMIT_S).result(LIMIT_S)
            memory.array[:] = 0
            stop_child(owner.process.pid)

            with pytest.raises(TransferTimeout) as late:
                read_blocks(mover, peer, memory, owner, range(8), 0.2).result(LIMIT_S)
            assert not late.value.settled
            assert mover.statistics().draining == 1
            with pytest.raises(MoverBusy):
                mover.deregister(registration).result(LIMIT_S)

            owner.process.send_signal(signal.SIGCONT)
            assert late.value.settling is not None
            late.value.settling.result(LIMIT_S)
            assert np.array_equal(memory.array[: 8 * BLOCK], content(SIZE)[: 8 * BLOCK])
            statistics = mover.statistics()
            assert (statistics.draining, statistics.timeouts, statistics.failures) == (0, 1, 1)
            mover.deregister(registration).result(LIMIT_S)

    def test_removing_a_stopped_peer_fails_its_reads_and_waits_for_the_memory(
        self, tcp_only: None, memory: Memory
    ) -> None:
        with Owner(SIZE, os.environ) as owner, MoverThread("remover") as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            stop_child(owner.process.pid)
            reading = read_blocks(mover, peer, memory, owner, range(8), LIMIT_S)

            gone = mover.remove_peer(peer)
            with pytest.raises(PeerLost) as lost:
                reading.result(LIMIT_S)
            with pytest.raises(PeerLost):
                read_blocks(mover, peer, memory, owner, range(1), 1).result(LIMIT_S)
            assert gone.done() == lost.value.settled

            owner.process.send_signal(signal.SIGCONT)
            gone.result(LIMIT_S)
            assert lost.value.settled

    @pytest.mark.parametrize("transport", ["cma", "tcp"])
    def test_a_killed_peer_is_lost(
        self, transport: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if transport == "tcp":
            monkeypatch.setenv("UCX_TLS", "tcp,self")
        with Owner(SIZE, os.environ) as owner, MoverThread("bereaved") as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            read_blocks(mover, peer, memory, owner, range(8), LIMIT_S).result(LIMIT_S)
            owner.process.kill()
            owner.process.wait(LIMIT_S)

            for _ in range(2):  # The second read finds that NIXL has forgotten the peer.
                with pytest.raises(PeerLost) as lost:
                    read_blocks(mover, peer, memory, owner, range(8), LIMIT_S).result(LIMIT_S)
                assert lost.value.settled

    def test_a_peer_killed_in_mid_transfer_is_lost(self, tcp_only: None, memory: Memory) -> None:
        with Owner(SIZE, os.environ) as owner, MoverThread("bereaved") as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            read_blocks(mover, peer, memory, owner, range(1), LIMIT_S).result(LIMIT_S)
            stop_child(owner.process.pid)
            futures = [
                read_blocks(mover, peer, memory, owner, range(i, i + 8), LIMIT_S)
                for i in range(0, 32, 8)
            ]
            owner.process.kill()

            for future in futures:
                with pytest.raises(PeerLost) as lost:
                    future.result(LIMIT_S)
                assert lost.value.settled


class TestClose:
    @pytest.mark.slow
    def test_close_fails_what_is_in_flight_and_settles_it(
        self, tcp_only: None, memory: Memory
    ) -> None:
        with Owner(SIZE, os.environ) as owner:
            mover = MoverThread("closing")
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            stop_child(owner.process.pid)
            futures = [
                read_blocks(mover, peer, memory, owner, range(i, i + 1), LIMIT_S) for i in range(99)
            ]

            started = time.monotonic()
            mover.close(timeout_s=0.2)
            assert time.monotonic() - started < 2.0

            assert not wait(futures, 0).not_done
            for future in futures:
                error = future.exception(0)
                assert isinstance(error, MoverClosed)
                assert error.settled
            owner.process.send_signal(signal.SIGCONT)
            assert not memory.array.any()

    def test_a_closed_mover_refuses(self, memory: Memory) -> None:
        mover = MoverThread("closed")
        mover.close()
        mover.close()
        with pytest.raises(MoverClosed):
            mover.metadata().result(LIMIT_S)

    @pytest.mark.slow
    def test_more_jobs_than_the_limit_are_refused(self, tcp_only: None, memory: Memory) -> None:
        with Owner(SIZE, os.environ) as owner, MoverThread("full") as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            peer = mover.add_peer(owner.metadata).result(LIMIT_S)
            stop_child(owner.process.pid)
            futures = [
                read_blocks(mover, peer, memory, owner, range(1), LIMIT_S)
                for _ in range(JOB_COUNT_MAX + 1)
            ]
            with pytest.raises(MoverBusy):
                futures[-1].result(0)
            assert futures[-2].cancel()
            owner.process.send_signal(signal.SIGCONT)
            wait(futures, LIMIT_S)
            assert mover.statistics().transfers_done == JOB_COUNT_MAX - 1


class TestFiles:
    @pytest.fixture(params=["use_uring", "use_aio"])
    def files(self, request: pytest.FixtureRequest, memory: Memory) -> Iterator[MoverThread]:
        with on_files(request.param) as mover:
            mover.register_memory(memory.address, SIZE).result(LIMIT_S)
            yield mover

    @pytest.fixture
    def fd(self, tmp_path: Path) -> Iterator[int]:
        fd = os.open(tmp_path / "blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        yield fd
        os.close(fd)

    def test_blocks_come_back_from_a_direct_file(
        self, files: MoverThread, memory: Memory, fd: int
    ) -> None:
        count = SIZE // BLOCK
        memory.array[:] = content(SIZE)
        os.posix_fallocate(fd, 0, SIZE)
        registration = files.register_file(fd, SIZE).result(LIMIT_S)
        order = list(reversed(range(count)))

        files.write_file(
            fd, memory.blocks(range(count)), spans(0, order), deadline_s=LIMIT_S
        ).result(LIMIT_S)
        memory.array[:] = 0
        moved = files.read_file(
            fd, memory.blocks(order), spans(0, range(count)), deadline_s=LIMIT_S
        ).result(LIMIT_S)

        assert moved.bytes == SIZE
        expected = content(SIZE)
        assert np.array_equal(memory.array, expected)
        files.deregister(registration).result(LIMIT_S)

    def test_a_short_read_fails_and_its_neighbours_do_not(
        self, files: MoverThread, memory: Memory, fd: int
    ) -> None:
        memory.array[: 4 * BLOCK] = content(4 * BLOCK)
        files.register_file(fd, SIZE).result(LIMIT_S)
        files.write_file(
            fd, memory.blocks(range(4)), spans(0, range(4)), deadline_s=LIMIT_S
        ).result(LIMIT_S)
        os.ftruncate(fd, 3 * BLOCK + 4096)
        memory.array[:] = 0

        futures = [
            files.read_file(fd, memory.blocks([i]), spans(0, [i]), deadline_s=LIMIT_S)
            for i in range(4)
        ]

        for future in futures[:3]:
            future.result(LIMIT_S)
        assert np.array_equal(memory.array[: 3 * BLOCK], content(4 * BLOCK)[: 3 * BLOCK])
        with pytest.raises(TransferFailed) as short:
            futures[3].result(LIMIT_S)
        assert short.value.settled

    @pytest.mark.parametrize("blocks", [1, 4])
    def test_so_many_bytes_of_files_are_in_flight_and_the_rest_waits(
        self, files: MoverThread, memory: Memory, fd: int, blocks: int
    ) -> None:
        """Goal: as much as fits, never more; larger than that is alone in flight; each is followed
        at once. Method: from inside the mover, see what is in flight whenever one has ended."""
        os.posix_fallocate(fd, 0, SIZE)
        files.register_file(fd, SIZE).result(LIMIT_S)
        files.limit_files(read_bytes=BLOCK, written_bytes=2 * BLOCK).result(LIMIT_S)
        seen: list[tuple[int, int]] = []

        def note(_: Future[Transferred]) -> None:
            now = files.statistics()
            seen.append((now.in_flight, now.waiting))

        futures = []
        for start in range(0, 32, blocks):
            order = range(start, start + blocks)
            future = files.write_file(fd, memory.blocks(order), spans(0, order), deadline_s=LIMIT_S)
            future.add_done_callback(note)
            futures.append(future)
        wait(futures, LIMIT_S)
        most = 2 if blocks == 1 else 1
        assert max(in_flight for in_flight, _ in seen) <= most
        followed = [in_flight > 0 for in_flight, waiting in seen if waiting]
        assert all(followed), "who hears of an end finds the next one in flight"

    @pytest.mark.parametrize(("overtaken_s", "place"), [(60.0, 1), (-1.0, 2)])
    def test_a_read_overtakes_writes_that_have_not_waited_long(
        self,
        files: MoverThread,
        memory: Memory,
        fd: int,
        monkeypatch: pytest.MonkeyPatch,
        overtaken_s: float,
        place: int,
    ) -> None:
        """One of each direction is in flight at a time: the order of their ends is the disk's.

        Method: four writes and a read are handed over at one moment, from inside the mover, when
        the write before them has ended."""
        monkeypatch.setattr(transfer_queue, "OVERTAKEN_S", overtaken_s)
        started: list[str] = []
        is_awaited = threading.Event()
        start = pump.Pump._start

        def note(pump: pump.Pump, transfer: transfer_queue.Transfer) -> None:
            assert is_awaited.wait(LIMIT_S)
            started.append(transfer.operation)
            start(pump, transfer)

        monkeypatch.setattr(pump.Pump, "_start", note)
        os.posix_fallocate(fd, 0, SIZE)
        files.register_file(fd, SIZE).result(LIMIT_S)
        files.limit_files(read_bytes=BLOCK, written_bytes=BLOCK).result(LIMIT_S)
        left = threading.Semaphore(0)

        def hand_over(_: Future[Transferred]) -> None:
            for i in range(1, 6):
                move = files.read_file if i == 5 else files.write_file
                future = move(fd, memory.blocks([i]), spans(0, [i]), deadline_s=LIMIT_S)
                future.add_done_callback(lambda _: left.release())

        first = files.write_file(fd, memory.blocks([0]), spans(0, [0]), deadline_s=LIMIT_S)
        first.add_done_callback(hand_over)
        is_awaited.set()
        for _ in range(5):
            assert left.acquire(timeout=LIMIT_S)
        assert started.index("READ") == place

    def test_an_unregistered_file_is_refused(
        self, files: MoverThread, memory: Memory, fd: int
    ) -> None:
        with pytest.raises(TransferError):
            files.read_file(fd, memory.blocks([0]), spans(0, [0]), deadline_s=LIMIT_S).result(
                LIMIT_S
            )


def test_a_file_that_never_answers_times_out_and_drains(memory: Memory) -> None:
    """A pipe without a writer stands for a hung disk. The late byte arrives after the deadline."""
    if probe_posix() != "use_uring":
        pytest.skip("Linux AIO blocks on a pipe at submission")
    read_end, write_end = os.pipe()
    with MoverThread("hung", backends=("POSIX",)) as files:
        files.register_memory(memory.address, SIZE).result(LIMIT_S)
        files.register_file(read_end, SIZE).result(LIMIT_S)
        with pytest.raises(TransferTimeout) as late:
            files.read_file(
                read_end, memory.blocks([0], 4096), Spans.of([0], 4096), deadline_s=0.1
            ).result(LIMIT_S)
        assert not late.value.settled
        os.write(write_end, b"x" * 4096)
        assert late.value.settling is not None
        late.value.settling.result(LIMIT_S)
        assert memory.array[0] == ord("x")
    os.close(read_end)
    os.close(write_end)


def test_writes_in_flight_leave_reads_their_room(memory: Memory, tmp_path: Path) -> None:
    """A full pipe stands for a disk that takes its time: the write in flight is all that may."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK))
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)
    with path.open("rb") as file, on_files("use_uring") as files:
        files.register_memory(memory.address, SIZE).result(LIMIT_S)
        for fd in (write_end, file.fileno()):
            files.register_file(fd, BLOCK).result(LIMIT_S)
        files.limit_files(read_bytes=BLOCK, written_bytes=4096).result(LIMIT_S)
        one, page = Spans.of([0], BLOCK), Spans.of([0], 4096)
        writing = files.write_file(write_end, memory.blocks([1], 4096), page, deadline_s=LIMIT_S)
        reading = files.read_file(file.fileno(), memory.blocks([0]), one, deadline_s=LIMIT_S)
        reading.result(LIMIT_S)
        assert not writing.done()
        os.read(read_end, 4096)
        writing.result(LIMIT_S)
    os.close(read_end)
    os.close(write_end)


def test_a_poll_of_peers_that_fails_does_not_end_the_mover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is tried again, and calls are answered between them."""
    failed: list[float] = []
    make = library.api.nixl_agent

    class Agent:
        def __init__(self, *arguments: Any) -> None:
            self._real = make(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def get_new_notifs(self, _backends: list[str]) -> None:
            failed.append(time.monotonic())
            raise library.bindings.nixlBackendError("once more")

    monkeypatch.setattr(library.api, "nixl_agent", Agent)
    with MoverThread("test") as mover:
        wait_for(lambda: len(failed) > 2)
        assert mover.metadata().result(LIMIT_S)


def test_where_an_error_proves_nothing_the_memory_is_not_settled(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GDS reports one batch while another may still move. POSIX stands for it: a short read."""
    monkeypatch.setattr("kvbm_common.nixl.pump.UNPROVEN_FILE_ERRORS", {"POSIX"})
    path = tmp_path / "short"
    path.write_bytes(b"x")
    with path.open("rb") as file, MoverThread("gds", backends=("POSIX",)) as files:
        files.register_memory(memory.address, SIZE).result(LIMIT_S)
        files.register_file(file.fileno(), SIZE).result(LIMIT_S)
        reading = files.read_file(
            file.fileno(), memory.blocks([0], 4096), Spans.of([0], 4096), deadline_s=LIMIT_S
        )
        with pytest.raises(TransferFailed) as short:
            reading.result(LIMIT_S)
        assert not short.value.settled
    assert short.value.settled, "the agent has ended"


@pytest.mark.parametrize(("queue", "pause_s"), [("use_uring", RING_PAUSE_S), ("use_aio", PAUSE_S)])
def test_a_disk_does_not_cost_a_core(
    memory: Memory, tmp_path: Path, queue: str, pause_s: float
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    pauses: set[float | None] = set()
    with path.open("rb") as file, on_files(queue) as files:
        files.register_memory(memory.address, SIZE).result(LIMIT_S)
        files.register_file(file.fileno(), SIZE).result(LIMIT_S)
        ends_s = time.monotonic() + LIMIT_S
        while pause_s not in pauses and time.monotonic() < ends_s:
            every = range(SIZE // BLOCK)
            reading = files.read_file(
                file.fileno(), memory.blocks(every), spans(0, every), deadline_s=LIMIT_S
            )
            while not reading.done():
                pauses.add(files._call(lambda pump: pump.pause_s).result(LIMIT_S))
            reading.result(LIMIT_S)
    assert pause_s in pauses
    assert 0.0 not in pauses


def test_the_kernel_wakes_who_waits_for_a_file(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody polls within the test's time. A pipe answers when it is written to."""
    monkeypatch.setattr(pump, "RING_PAUSE_S", 100 * LIMIT_S)
    read_end, write_end = os.pipe()
    with on_files("use_uring") as files:
        files.register_memory(memory.address, SIZE).result(LIMIT_S)
        files.register_file(read_end, SIZE).result(LIMIT_S)
        reading = files.read_file(
            read_end, memory.blocks([0], 4096), Spans.of([0], 4096), deadline_s=99 * LIMIT_S
        )
        while not files.statistics().in_flight:
            time.sleep(0)
        os.write(write_end, b"x" * 4096)
        reading.result(LIMIT_S)
        assert memory.array[0] == ord("x")
    os.close(read_end)
    os.close(write_end)


def test_a_quiet_mover_looks_rarely_and_still_answers(tcp_only: None, memory: Memory) -> None:
    """Its owner computes on the same core, and expects nobody; over TCP it must take part.

    1. It polls as seldom as it says, and where a peer is expected as often as a connection needs.
    2. A peer that comes nevertheless gets its bytes.
    """
    memory.array[:BLOCK] = 7
    with MoverThread("quiet") as quiet, MoverThread("peer") as peer:
        quiet.look_out(0.03)
        quiet.register_memory(memory.address, SIZE).result(LIMIT_S)
        assert quiet._call(lambda pump: pump.pause_s).result(LIMIT_S) == IDLE_POLL_S
        quiet.attend(0)
        assert quiet._call(lambda pump: pump.pause_s).result(LIMIT_S) == 0.03
        target = Memory.of(BLOCK)
        peer.register_memory(target.address, BLOCK).result(LIMIT_S)
        name = peer.add_peer(quiet.metadata().result(LIMIT_S)).result(LIMIT_S)
        peer.read(name, target.blocks([0]), memory.blocks([0]), deadline_s=LIMIT_S).result(LIMIT_S)
        assert (target.array == 7).all()
        quiet.expect_peer()
        assert quiet._call(lambda pump: pump.pause_s).result(LIMIT_S) == IDLE_POLL_S
        quiet.attend(0)
        assert quiet._call(lambda pump: pump.pause_s).result(LIMIT_S) == IDLE_POLL_S


def test_a_mover_that_looks_for_no_one_polls_where_a_peer_is_expected(
    tcp_only: None, memory: Memory
) -> None:
    memory.array[:BLOCK] = 7
    with MoverThread("quiet") as quiet, MoverThread("peer") as peer:
        quiet.register_memory(memory.address, SIZE).result(LIMIT_S)
        quiet.attend(0)
        quiet.look_out(None)
        assert quiet._call(lambda pump: pump.pause_s).result(LIMIT_S) is None
        target = Memory.of(BLOCK)
        peer.register_memory(target.address, BLOCK).result(LIMIT_S)
        name = peer.add_peer(quiet.metadata().result(LIMIT_S)).result(LIMIT_S)
        quiet.attend(LIMIT_S)
        peer.read(name, target.blocks([0]), memory.blocks([0]), deadline_s=LIMIT_S).result(LIMIT_S)
        assert (target.array == 7).all()


def test_a_mover_that_no_peer_has_added_attends_to_none(
    tcp_only: None, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that map an arena never add its owner, whose polls would cost it some % of a core."""
    memory.array[:BLOCK] = 7
    with MoverThread("owner") as owner, MoverThread("peer") as peer:
        owner.register_memory(memory.address, SIZE).result(LIMIT_S)
        target = Memory.of(BLOCK)
        peer.register_memory(target.address, BLOCK).result(LIMIT_S)
        owner.attend(LIMIT_S, if_added=True)
        assert owner._call(lambda pump: pump.pause_s).result(LIMIT_S) == QUIET_POLL_S
        name = peer.add_peer(owner.metadata().result(LIMIT_S)).result(LIMIT_S)
        peer.read(name, target.blocks([0]), memory.blocks([0]), deadline_s=LIMIT_S).result(LIMIT_S)
        assert (target.array == 7).all()
        monkeypatch.setattr(pump, "CONNECT_S", 0.0)  # As if it had been added long ago.
        owner.expect_peer()
        assert owner._call(lambda pump: pump.pause_s).result(LIMIT_S) == IDLE_POLL_S


def test_a_missing_back_end_is_unavailable() -> None:
    with pytest.raises(MoverUnavailable):
        MoverThread("odd", backends=("NO_SUCH",))
