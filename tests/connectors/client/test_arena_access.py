"""What a load of some life may expect, when lives of different host tiers follow each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.nixl.transfers import MoverClosed, TransferError
from kvbm_connectors.client.arena_access import Access, ArenaAccess

from tests.connectors.endpoints import welcome
from tests.waiting import wait_for


class Nobody:
    """A mover that knows no peer: no arena is ever reached, which is not the question here."""

    def add_peer(self, _agent: bytes) -> Future[str]:
        answer: Future[str] = Future()
        answer.set_exception(TransferError("nobody"))
        return answer


class Silent:
    """A mover that says nothing until it is closed."""

    def __init__(self) -> None:
        self.asked: list[Future[str]] = []

    def add_peer(self, _agent: bytes) -> Future[str]:
        self.asked.append(Future())
        return self.asked[-1]

    def close(self) -> None:
        for one in self.asked:
            one.set_exception(MoverClosed("the mover is closed"))


def access_by(mover: object, tried: list[None]) -> ArenaAccess:
    """An access to an arena; what has been tried is noted."""
    return ArenaAccess(
        cast("MoverThread", mover), wanted="nixl", name="test", block_bytes=64, counts=Counter(),
        on_change=lambda: tried.append(None),
    )  # fmt: skip


@pytest.fixture
def access() -> Iterator[ArenaAccess]:
    tried: list[None] = []
    one = access_by(Nobody(), tried)
    yield one
    wait_for(lambda: tried)
    one.close()
    one.wait_closed()


def there(instance: int, epoch: int) -> Any:
    return welcome(epoch, instance=f"host-tier-{instance}")


def test_lives_of_one_host_tier_follow_each_other(access: ArenaAccess) -> None:
    access.welcomed(there(0, 7))
    assert access.access(6) is Access.GONE
    assert access.access(8) is Access.COMING


def test_a_host_tier_that_one_moves_to_may_be_older(access: ArenaAccess) -> None:
    """1. Served by an instance of epoch 20, told to go: whatever is named is on its way.

    2. Welcomed by one of epoch 10: loads of the other's life are over. 3. And back again.
    """
    access.welcomed(there(1, 20))
    assert access.access(10) is Access.GONE
    access.leaving()
    assert access.access(10) is Access.COMING
    access.welcomed(there(0, 10))
    assert access.access(20) is Access.GONE
    assert access.access(10) is not Access.GONE
    access.leaving()
    access.welcomed(there(1, 20))
    assert access.access(10) is Access.GONE
    assert access.access(20) is not Access.GONE


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_engine_that_ends_at_once_warns_of_nothing(
    is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a mover that closes under an engine that goes on is a warning, as before."""
    mover, tried = Silent(), list[None]()
    access = access_by(mover, tried)
    access.welcomed(there(0, 7))
    wait_for(lambda: mover.asked)
    if is_closed:
        access.close()
    mover.close()
    wait_for(lambda: tried)
    assert ("cannot be reached" in caplog.text) is not is_closed
    if not is_closed:
        access.close()
    access.wait_closed()
