"""The memory of a process and its bound, as they are logged and shown."""

from __future__ import annotations

import logging

import pytest
from kvbm_common.service.footprint import INTERPRETER_BYTES, MIB, Footprint, status_bytes
from kvbm_common.wire.metrics import MEMORY, MEMORY_BOUND


def test_without_parts_there_is_no_bound(caplog: pytest.LogCaptureFixture) -> None:
    footprint = Footprint()
    with caplog.at_level(logging.INFO):
        footprint.log()
    assert footprint.bound_bytes == 0
    assert footprint.figures()[MEMORY_BOUND] == 0
    assert caplog.text == ""


def test_a_bound_is_the_sum_of_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    footprint = Footprint()
    footprint.declare(lambda: {"slots": 3 * MIB, "what_left": MIB})
    assert footprint.bound_bytes == INTERPRETER_BYTES + 4 * MIB
    with caplog.at_level(logging.INFO):
        footprint.log()
        footprint.log()
    [line] = caplog.messages
    assert line.endswith("slots 3.0, what left 1.0")


def test_a_part_keeps_its_highest_value() -> None:
    """Python keeps what it has once taken."""
    parts = {"blocks": 5 * MIB}
    footprint = Footprint()
    footprint.declare(lambda: parts)
    before = footprint.bound_bytes
    parts["blocks"] = MIB
    assert footprint.bound_bytes == before
    parts["blocks"] = 6 * MIB
    assert footprint.bound_bytes == before + MIB


def test_the_gauges_say_what_the_process_takes() -> None:
    footprint = Footprint()
    footprint.declare(lambda: {"slots": MIB})
    values = {metric.name: metric.samples[0].value for metric in footprint.collect()}
    assert values.keys() == {
        "kvbm_memory_bytes", "kvbm_memory_bound_bytes", "kvbm_python_blocks", "kvbm_open_files",
    }  # fmt: skip
    assert MIB < values["kvbm_memory_bytes"] == pytest.approx(footprint.figures()[MEMORY], rel=0.2)
    assert values["kvbm_python_blocks"] > 10_000
    assert values["kvbm_open_files"] > 2


def test_a_status_without_the_line_is_refused() -> None:
    assert status_bytes("Name:\tpython\nRssAnon:\t   24 kB\n", "RssAnon") == 24 * 1024
    with pytest.raises(ValueError, match="RssAnon"):
        status_bytes("Name:\tpython\n", "RssAnon")
