"""The bounce pool: who gets a buffer, who waits, and what becomes of a buffer that is lost."""

from __future__ import annotations

import errno
import time
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from kvbm_common.nixl.mover_thread import MoverThread, TransferFailed, TransferTimeout
from kvbm_common.nixl.spans import Registration
from kvbm_common.nixl.transfers import MoverBusy
from kvbm_connectors.client import bounce_pool
from kvbm_connectors.client.bounce_pool import BounceExhausted, BouncePool

SOON_S = 60.0


class Registry:
    """In the place of a mover: registers at once, or does not."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.registered: list[tuple[int, int]] = []

    def register_memory(self, address: int, length: int) -> Future[Registration]:
        done: Future[Registration] = Future()
        if self.failures:
            done.set_exception(self.failures.pop(0))
        else:
            self.registered.append((address, length))
            done.set_result(Registration("DRAM", address, length, 0))
        return done


def pool_of(buffers: int, registry: Registry | None = None) -> BouncePool:
    mover: MoverThread = registry or Registry()  # type: ignore[assignment]
    return BouncePool(mover, block_bytes=64, buffers=buffers)


def by(seconds: float) -> float:
    return time.monotonic() + seconds


def test_memory_is_taken_with_the_first_read() -> None:
    registry = Registry()
    pool = pool_of(2, registry)
    assert registry.registered == []
    first, second = pool.borrow(by(SOON_S)).result(0), pool.borrow(by(SOON_S)).result(0)
    [(address, length)] = registry.registered
    assert {first, second} == {address, address + pool.buffer_bytes}
    assert length == 2 * pool.buffer_bytes


def test_the_next_one_gets_what_is_given_back() -> None:
    pool = pool_of(1)
    buffer = pool.borrow(by(SOON_S)).result(0)
    waiting = [pool.borrow(by(SOON_S)) for _ in range(2)]
    pool.give_back(buffer)
    assert (waiting[0].result(0), waiting[1].done()) == (buffer, False)


def test_a_buffer_that_late_bytes_may_reach_is_not_lent() -> None:
    """1. Its read has failed and not settled: the pool has one buffer less. 2. It settles."""
    pool, settling = pool_of(2), Future[None]()
    lost, other = pool.borrow(by(SOON_S)).result(0), pool.borrow(by(SOON_S)).result(0)
    pool.give_back(lost, settling)
    waiting = pool.borrow(by(SOON_S))
    assert (pool.lost, waiting.done()) == (1, False)
    pool.give_back(other)
    assert waiting.result(0) == other
    settling.set_result(None)
    assert pool.lost == 0
    assert pool.borrow(by(SOON_S)).result(0) == lost


def test_when_all_buffers_are_lost_nobody_waits() -> None:
    """Neither who waits already, nor who comes; then one settles."""
    pool, settling = pool_of(1), Future[None]()
    buffer = pool.borrow(by(SOON_S)).result(0)
    waiting = pool.borrow(by(SOON_S))
    pool.give_back(buffer, settling)
    for refused in (waiting, pool.borrow(by(SOON_S))):
        with pytest.raises(BounceExhausted):
            refused.result(0)
    settling.set_result(None)
    assert pool.borrow(by(SOON_S)).result(0) == buffer


def test_who_waits_too_long_fails_at_the_deadline() -> None:
    """The deadline of what waits, not that of what it waits for."""
    pool = pool_of(1)
    pool.borrow(by(SOON_S)).result(0)
    late = pool.borrow(time.monotonic())
    pool.serve()
    with pytest.raises(TransferTimeout):
        late.result(0)


def test_memory_that_is_refused_is_asked_for_again() -> None:
    pool = pool_of(1, Registry(TransferFailed("no locked pages")))
    with pytest.raises(TransferFailed):
        pool.borrow(by(SOON_S)).result(0)
    assert pool.borrow(by(SOON_S)).result(0)


def test_memory_that_cannot_be_mapped_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's address space is full: who waits hears of it, and nothing is raised."""
    pool = pool_of(1)
    with monkeypatch.context() as patch:
        patch.setattr(bounce_pool, "map_shared", full)
        refused = pool.borrow(by(SOON_S))
        with pytest.raises(TransferFailed, match="no memory for 1 buffers"):
            refused.result(0)
    assert pool.borrow(by(SOON_S)).result(0)


def full(_file: int, _bytes: int) -> None:
    """In the place of map_shared."""
    raise OSError(errno.ENOMEM, "cannot allocate memory")


def test_so_many_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce_pool, "WAITING_MAX", 1)
    pool = pool_of(1)
    pool.borrow(by(SOON_S)).result(0)
    pool.borrow(by(SOON_S))
    with pytest.raises(MoverBusy):
        pool.borrow(by(SOON_S)).result(0)


def test_many_who_wait_are_served_one_after_the_other_without_recursion() -> None:
    """Each gives its buffer back at once, in the callback that brought it."""
    pool = pool_of(1)
    buffer = pool.borrow(by(SOON_S)).result(0)
    waiting = [pool.borrow(by(SOON_S)) for _ in range(bounce_pool.WAITING_MAX)]
    for one in waiting:
        one.add_done_callback(lambda done: pool.give_back(done.result()))
    pool.give_back(buffer)
    assert all(one.done() for one in waiting)
    assert pool.borrow(by(SOON_S)).result(0) == buffer


class PoolMachine(RuleBasedStateMachine):
    """Any order of borrowing, giving back and settling: no buffer has two holders."""

    lent = Bundle("lent")
    settling = Bundle("settling")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(3)
        self.held: set[int] = set()
        self.lost: dict[int, Future[None]] = {}

    @rule(target=lent)
    def borrow(self) -> Future[int]:
        wanted = self.pool.borrow(by(SOON_S))
        wanted.add_done_callback(self._take)
        return wanted

    def _take(self, wanted: Future[int]) -> None:
        if wanted.exception() is None:
            assert wanted.result() not in self.held, "lent twice"
            assert wanted.result() not in self.lost, "lent while late bytes may come"
            self.held.add(wanted.result())

    @rule(target=settling, wanted=consumes(lent), settled=st.booleans())
    def give_back(self, wanted: Future[int], settled: bool) -> tuple[int, Future[None]] | None:
        if not wanted.done() or wanted.exception() is not None:
            return None
        buffer = wanted.result()
        self.held.remove(buffer)
        if settled:
            self.pool.give_back(buffer)
            return None
        self.lost[buffer] = late = Future[None]()
        self.pool.give_back(buffer, late)
        return buffer, late

    @rule(late=consumes(settling))
    def settle(self, late: tuple[int, Future[None]] | None) -> None:
        if late is not None:
            del self.lost[late[0]]
            late[1].set_result(None)

    @invariant()
    def what_is_lost_is_counted(self) -> None:
        assert self.pool.lost == len(self.lost)

    def teardown(self) -> None:
        """Everything comes back, and all buffers can be borrowed."""
        while self.held or self.lost:
            while self.lost:
                self.lost.popitem()[1].set_result(None)
            if self.held:
                self.pool.give_back(self.held.pop())
        for _ in range(3):
            wanted = self.pool.borrow(by(SOON_S))
            wanted.add_done_callback(self._take)
            assert wanted.done()
        assert len(self.held) == 3


PoolMachine.TestCase.settings = settings(max_examples=100, deadline=None)
TestPoolMachine = PoolMachine.TestCase
