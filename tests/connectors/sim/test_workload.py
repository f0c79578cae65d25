"""Workloads: the same seed gives the same requests, prefixes are shared, bad traces are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvbm_connectors.sim.workload import (
    TRACE_BLOCK_TOKENS,
    VOCABULARY,
    BadTrace,
    Turn,
    conversations,
    trace,
)

GOOD: dict[str, Any] = {
    "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2],
}  # fmt: skip


def same(left: Turn, right: Turn) -> bool:
    """Equal in every token."""
    return (
        left.conversation == right.conversation
        and np.array_equal(left.prompt, right.prompt)
        and np.array_equal(left.outputs, right.outputs)
    )


def test_a_seed_names_a_workload() -> None:
    """Twice the same, and another with another seed."""
    first, again = (list(conversations(requests=50, seed=3)) for _ in range(2))
    assert len(first) == 50
    assert all(map(same, first, again))
    other = conversations(requests=50, seed=4)
    assert not all(map(same, first, other))
    assert all(turn.prompt.dtype == np.uint32 for turn in first)
    assert max(int(turn.prompt.max()) for turn in first) < VOCABULARY


def test_turns_of_a_conversation_grow_and_conversations_share_prefixes() -> None:
    """A turn begins with all that was said before; few system prompts begin many conversations."""
    last: dict[int, Turn] = {}
    grown = 0
    turns = list(conversations(requests=300, seed=0))
    for turn in turns:
        before = last.get(turn.conversation)
        if before is not None:
            said = np.concatenate([before.prompt, before.outputs])
            grown += np.array_equal(turn.prompt[: len(said)], said)
        last[turn.conversation] = turn
    assert grown > 0.7 * (len(turns) - len(last))
    beginnings = {turn.prompt[:64].tobytes() for turn in turns}
    assert len(beginnings) <= 4 < len(last)


def written(path: Path, *lines: object) -> Path:
    """A trace file."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def test_a_trace_is_read_in_its_order(tmp_path: Path) -> None:
    """Equal hash ids are equal tokens; the last one is cut to the input's length."""
    path = written(
        tmp_path / "trace.jsonl",
        GOOD,
        GOOD | {"input_length": 1536, "hash_ids": [1, 2, 3]},
        GOOD | {"hash_ids": [9, 2]},
    )
    first, second, third = trace(path, requests=10)
    assert [len(turn.prompt) for turn in (first, second, third)] == [600, 1536, 600]
    assert np.array_equal(first.prompt, second.prompt[:600])
    assert not np.array_equal(first.prompt[:512], third.prompt[:512])
    assert np.array_equal(first.prompt[512:], third.prompt[512:])
    assert len({turn.conversation for turn in (first, second, third)}) == 3
    assert same(first, next(trace(path, requests=1)))
    assert len(list(trace(path, requests=2))) == 2
    assert TRACE_BLOCK_TOKENS == 512


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"no json", "malformed"),
        (b"", "is empty"),
        (b"[1, 2]", "object"),
        ({key: GOOD[key] for key in GOOD if key != "hash_ids"}, "hash_ids"),
        (GOOD | {"input_length": "long"}, "input_length"),
        (GOOD | {"input_length": 1.5}, "input_length"),
        (GOOD | {"input_length": -1}, "input_length"),
        (GOOD | {"output_length": -1}, "output_length"),
        (GOOD | {"hash_ids": ["a"]}, "hash_ids"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids"),
        (GOOD | {"hash_ids": []}, "hash_ids"),
        (GOOD | {"input_length": 1025}, "input_length"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: object, named: str) -> None:
    """The second of three lines: the error says which file, which line, which field."""
    path = written(tmp_path / "trace.jsonl", GOOD, line, GOOD)
    with pytest.raises(BadTrace) as caught:
        trace(path, requests=10)
    assert "trace.jsonl, line 2" in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.code == "bad_trace"
    assert len(list(trace(path, requests=1))) == 1


def test_empty_lines_at_its_end_are_no_part_of_a_trace(tmp_path: Path) -> None:
    """An editor or `cat` leaves them."""
    path = written(tmp_path / "trace.jsonl", GOOD, GOOD, b"", b" \r")
    assert len(list(trace(path, requests=10))) == 2


def test_a_trace_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read"):
        trace(tmp_path / "nowhere", requests=1)
