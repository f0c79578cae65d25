"""The calls that go to CUDA's driver itself, past cupy: what they are given, what becomes of it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.cuda.runtime import CAPTURE_RELAXED, CudaError, CupyRuntime

ILLEGAL_ADDRESS = 700


class Driver:
    """libcuda, which answers as it is told."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.modes: list[int] = []

    def cuEventQuery(self, event: Any) -> int:
        assert event.value == 7
        return self.status

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        pointed = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.modes.append(pointed.contents.value)
        return self.status


def runtime_of(driver: Driver, **cuda: Any) -> CupyRuntime:
    """cupy's runtime has nothing but these functions."""
    runtime = CupyRuntime.__new__(CupyRuntime)
    runtime.device, runtime._cuda = 3, SimpleNamespace(**cuda)
    runtime._driver = driver  # type: ignore[assignment]
    return runtime


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_an_event_is_asked_for_behind_the_runtimes_back(status: int, done: bool) -> None:
    """cudaEventQuery would leave "not ready" as the last error of a thread that may be the
    engine's, whose next kernel would then seem to have failed."""
    assert runtime_of(Driver(status)).is_done(7) is done


def test_a_broken_context_is_an_error() -> None:
    with pytest.raises(CudaError, match="cuEventQuery: error 700"):
        runtime_of(Driver(ILLEGAL_ADDRESS)).is_done(7)


def test_a_thread_of_ours_says_so() -> None:
    """The device is made its own, and the captures of others are none of its business."""
    driver = Driver()
    devices: list[int] = []
    runtime_of(driver, setDevice=devices.append).enter()
    assert (devices, driver.modes) == ([3], [CAPTURE_RELAXED])
