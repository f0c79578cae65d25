"""Pulls into a GPU whose engine's stream stands still: when a load has ended."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest
from kvbm_common.copying.rank_pieces import BlockCopy
from kvbm_common.cuda import stream_end
from kvbm_common.cuda.reading import Gpu
from kvbm_common.nixl.transfers import TransferError, TransferFailed, TransferTimeout
from kvbm_common.tier.parts import share_of_rank
from kvbm_common.wire.local import Region
from kvbm_connectors.client.arena_access import Attached
from kvbm_connectors.client.arena_reader import Brought
from kvbm_connectors.client.pulls import Pulls
from kvbm_connectors.core.messages import LoadResult

from tests.connectors.endpoints import welcome
from tests.connectors.helpers import EPOCH
from tests.connectors.ranks import BLOCK_BYTES, DEVICE_BLOCKS, SLOT_COUNT, THEIRS, load
from tests.gpu.fake_runtime import FakeRuntime
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("small_measurements")
LOOKS = 5
"""So often a wait that has ended is looked at while nothing happens."""


class Refusing:
    """A reader that copies nothing."""

    name = "refusing"
    chunk_bytes = 1 << 20

    def __init__(self, error: TransferError) -> None:
        self._error = error

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        """Fail at once."""
        failed: Future[Brought] = Future()
        failed.set_exception(self._error)
        return failed

    def close(self) -> None: ...


class Pulling:
    """Pulls into the memory of a GPU. `ended`: each result, and whether any byte of block 0 was not
    zero when it came."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime(seed=1)
        address = self.runtime.allocate(DEVICE_BLOCKS * BLOCK_BYTES)
        self.memory = self.runtime.memory[address].reshape(DEVICE_BLOCKS, BLOCK_BYTES)
        self.memory[:] = 7
        self.ended: list[tuple[LoadResult, bool]] = []
        region = Region(
            address=address, stride=BLOCK_BYTES, piece_bytes=BLOCK_BYTES, blocks=DEVICE_BLOCKS
        )
        self.pulls = Pulls(
            [region], name="ada", share=share_of_rank(0, 1), verify_every=1, counts=Counter(),
            on_end=self._end, gpu=Gpu(self.runtime),
        )  # fmt: skip

    def _end(self, result: LoadResult) -> None:
        self.ended.append((result, bool(self.memory[0].any())))

    def begin(self, error: TransferError | None = None) -> None:
        """Begin a load of block 0, which fails."""
        reader = Refusing(error or TransferFailed("refused"))
        greeting = welcome(
            EPOCH, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT, arena_address=THEIRS
        )
        self.pulls.begin(load([5]), Attached(greeting, reader), 60.0)


@pytest.fixture
def pulling(monkeypatch: pytest.MonkeyPatch) -> Pulling:
    pulling = Pulling()
    monkeypatch.setattr(stream_end, "WAIT_DEADLINE_S", 0.0)
    return pulling


def test_a_copy_that_lands_after_the_end_ends_its_load(pulling: Pulling) -> None:
    """Goal: the engine waits for no load without end. Its memory is not touched any more."""
    settling: Future[None] = Future()
    pulling.begin(TransferTimeout("late", settling))
    pulling.pulls.close()
    assert not pulling.ended
    settling.set_result(None)
    [(result, _)] = pulling.ended
    assert (result.intact, result.reason) == ((False,), "closed")
    assert pulling.memory.all()


def test_a_load_ends_behind_its_late_zeros(pulling: Pulling) -> None:
    """The engine's stream holds them up for longer than they are waited for: a block that the
    engine hears of, it computes."""
    pulling.runtime.still_looks = LOOKS
    pulling.begin()
    wait_for(lambda: pulling.ended)
    [(result, is_dirty)] = pulling.ended
    assert (result.intact, result.reason) == ((False,), "transfer_failed")
    assert not is_dirty
    assert pulling.memory[1:].all()
    pulling.pulls.close()
