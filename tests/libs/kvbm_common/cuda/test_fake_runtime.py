"""The fake keeps the contract that cupy keeps on a GPU, whatever order it draws."""

from __future__ import annotations

import pytest

from tests.gpu.contract import RuntimeContract
from tests.gpu.fake_runtime import FakeRuntime


@pytest.fixture(params=range(3))
def runtime(request: pytest.FixtureRequest) -> FakeRuntime:
    return FakeRuntime(seed=request.param)


class TestFakeRuntime(RuntimeContract):
    """All of it."""


def test_without_an_event_two_streams_race() -> None:
    """Goal: the fake can show a missing wait. Some order must read too early."""
    results = set()
    for seed in range(20):
        runtime = FakeRuntime(seed=seed, moves=False)
        a, b, c = (runtime.allocate(8) for _ in range(3))
        first, second = runtime.stream(urgent=True), runtime.stream(urgent=True)
        runtime.memory[a][:] = 7
        runtime.copy(b, a, 8, first)
        runtime.copy(c, b, 8, second)
        runtime.advance()
        results.add(int(runtime.memory[c][0]))
    assert results == {0, 7}
