"""Trace context: W3C's form, and nothing else."""

from __future__ import annotations

import pytest
from kvbm_common.runtime.trace_context import new_trace, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_context_travels_as_text() -> None:
    """The example of the specification, there and back; a child is another span of its trace."""
    context = parse(f"00-{TRACE}-{SPAN}-01")
    assert context == (TRACE, SPAN)
    assert str(context) == f"00-{TRACE}-{SPAN}-01"
    child = context.child()
    assert child.trace_id == TRACE
    assert child.span_id != SPAN
    assert parse(str(child)) == child


def test_new_traces_differ() -> None:
    assert len({new_trace() for _ in range(100)}) == 100
    assert all(parse(str(new_trace())) for _ in range(100))


@pytest.mark.parametrize(
    "text",
    [
        "", "00", f"01-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-x",
    ],
)  # fmt: skip
def test_what_is_malformed_or_not_sampled_is_none(text: str) -> None:
    assert parse(text) is None
