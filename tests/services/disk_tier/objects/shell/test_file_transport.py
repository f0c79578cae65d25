"""The threads that read and write objects which are files."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.nixl.spans import Spans
from kvbm_disk_tier.objects.shell.file_transport import FileTransport

from tests.waiting import wait_until

DEADLINE_S = 3_600.0


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[FileTransport]:
    (tmp_path / "kv").mkdir()
    transport = FileTransport(tmp_path, threads=1)
    yield transport
    transport.close()


async def test_a_move_that_has_ended_is_not_kept_until_its_deadline(
    transport: FileTransport,
) -> None:
    """Goal: a busy bucket keeps the moves that run, not those of the last half minute."""
    memory = np.arange(64, dtype=np.uint8)
    span = Spans.of(memory.ctypes.data, memory.nbytes)

    async def write(name: str) -> weakref.ref[object]:
        outcome = transport.write_object(name, span, deadline_s=DEADLINE_S)
        assert (await asyncio.wrap_future(outcome)).bytes == memory.nbytes
        return weakref.ref(outcome)

    gc.disable()  # The references alone are to free it.
    try:
        first = await write("kv/first")
        await write("kv/second")  # The thread holds the last one.
        await wait_until(lambda: first() is None)
    finally:
        gc.enable()
