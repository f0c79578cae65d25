"""Pinning: slice by slice, usable meanwhile, and honest about a limit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.cuda.pinning import Pinning, cpu_list, cpus_near, explain

from tests.gpu.fake_runtime import FakeRuntime

DEADLINE_S = 10.0
BASE = 1 << 40
SLICE = 1000
SIZE = 10 * SLICE + 300


def covered(pinning: Pinning) -> list[bool]:
    """Of each slice."""
    starts = np.uint64(BASE) + np.arange(11, dtype=np.uint64) * np.uint64(SLICE)
    return [bool(flag) for flag in pinning.covers(starts)]


@pytest.mark.parametrize("threads", [1, 4])
def test_every_slice_is_pinned_once(threads: int) -> None:
    """The last one is shorter. All are given back at the end."""
    runtime = FakeRuntime()
    pinning = Pinning(runtime, BASE, SIZE, read_only=True, slice_bytes=SLICE, thread_count=threads)
    assert not any(covered(pinning))
    pinning.start().result(DEADLINE_S)
    expected = {BASE + i * SLICE: SLICE for i in range(10)} | {BASE + 10 * SLICE: 300}
    assert runtime.registered == expected
    assert all(call[3] for call in runtime.calls if call[0] == "register_host")
    assert pinning.pinned_bytes == SIZE
    assert all(covered(pinning))
    assert pinning.reason == ""
    pinning.close()
    assert runtime.registered == {}
    assert not any(covered(pinning))


def test_a_limit_leaves_what_is_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """Three slices fit: they are used, the others are not, and the log says so once."""
    runtime = FakeRuntime(pinnable_bytes=3 * SLICE)
    pinning = Pinning(runtime, BASE, SIZE, slice_bytes=SLICE, thread_count=4)
    pinning.start().result(DEADLINE_S)
    assert sum(covered(pinning)) == 3
    assert pinning.pinned_bytes == 3 * SLICE
    assert "3000 of 10300 bytes of the arena are pinned" in pinning.reason
    assert caplog.messages == [pinning.reason]
    pinning.close()
    assert runtime.registered == {}


def test_what_is_pinned_is_used_while_the_rest_is_not() -> None:
    """The second slice hangs in the kernel: the first one is there already."""
    reached, go_on = threading.Event(), threading.Event()

    class Slow(FakeRuntime):
        def register_host(self, address: int, length: int, *, read_only: bool) -> None:
            if address == BASE + SLICE:
                reached.set()
                assert go_on.wait(DEADLINE_S)
            super().register_host(address, length, read_only=read_only)

    pinning = Pinning(Slow(), BASE, SIZE, slice_bytes=SLICE, thread_count=1)
    done = pinning.start()
    assert reached.wait(DEADLINE_S)
    assert covered(pinning) == [True] + [False] * 10
    go_on.set()
    done.result(DEADLINE_S)
    assert all(covered(pinning))


def test_close_ends_what_is_under_way() -> None:
    """No slice is begun after the end was asked for."""
    runtime = FakeRuntime()
    pinning = Pinning(runtime, BASE, SIZE, slice_bytes=SLICE, thread_count=1)
    pinning.close()
    pinning.start().result(DEADLINE_S)
    assert runtime.registered == {}


def test_the_message_names_the_limit() -> None:
    text = explain(1 << 30, 0, "out of memory", 65_536)
    assert "65536 bytes" in text
    assert "ulimit -l unlimited" in text
    assert "ulimit" not in explain(1 << 30, 0, "not supported", None)


def test_processors_near_a_device(tmp_path: Path) -> None:
    """As sysfs writes them; a device that sysfs does not know has none."""
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cpus_near("0000:17:00.0", tmp_path) == {0, 1, 2, 8, 10, 11}
    assert cpus_near("0000:18:00.0", tmp_path) == set()
    assert cpu_list("") == set()
