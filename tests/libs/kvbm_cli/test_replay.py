"""Replays and their bound, and the command `kvbm simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_cli.main import make_app
from kvbm_cli.replay import Chain, bound_of, hits_of, requests_of
from kvbm_cli.simulate import capacities_of
from kvbm_common.errors import ConfigError
from kvbm_common.eviction import Lru
from kvbm_common.identity import SequenceHash
from typer.testing import CliRunner

REQUESTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=6)


def prefix_hits(chain: Chain, here: frozenset[SequenceHash]) -> int:
    """The leading blocks that are there."""
    return next((n for n, block in enumerate(chain) if block not in here), len(chain))


def best_of_all(chains: tuple[Chain, ...], slot_count: int) -> int:
    """Try every content after every request: what was there, or was in the request."""
    best = {frozenset[SequenceHash](): 0}
    for chain in chains:
        after: dict[frozenset[SequenceHash], int] = {}
        for here, hits in best.items():
            total = hits + prefix_hits(chain, here)
            could = sorted(here | set(chain))
            for size in range(min(slot_count, len(could)) + 1):
                for kept in map(frozenset, combinations(could, size)):
                    after[kept] = max(after.get(kept, 0), total)
        best = after
    return max(best.values())


@given(REQUESTS, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_the_best_that_can_be(requests: list[list[int]], slot_count: int) -> None:
    """Against all that a tier could do, tried out: not less, and not more."""
    load = requests_of(requests)
    assert bound_of(load, slot_count) == best_of_all(load.chains, slot_count)


def test_a_block_hits_only_after_its_prefix() -> None:
    """[1 2 3], then [9 2 3]: equal ids, but other blocks. Then [1 2 4] hits two."""
    load = requests_of([[1, 2, 3], [9, 2, 3], [1, 2, 4]])
    assert (load.block_count, load.references) == (7, 9)
    assert hits_of(load, Lru(), 100) == bound_of(load, 100) == 2


def test_lru_loses_what_the_bound_keeps() -> None:
    """Three requests of two blocks round and round, in four slots."""
    load = requests_of([[10 * n, 10 * n + 1] for n in (1, 2, 3)] * 10)
    assert hits_of(load, Lru(), 4) == 0
    assert bound_of(load, 4) == 36


@pytest.mark.parametrize("text", ["", "x", "1%%", "-3", "5,,6", "1.5", "%"])
def test_a_capacity_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--capacity"):
        capacities_of(text, 100)


def test_capacities_in_blocks_and_percent() -> None:
    """Rounded down, and never nothing."""
    assert capacities_of("7,2%,0.5%, 0.1%", 1000) == [7, 20, 5, 1]


def simulate(*arguments: str) -> tuple[int, str]:
    """The command as a user runs it: exit code and output, on a wide terminal."""
    wide = CliRunner(env={"COLUMNS": "1000", "TERMINAL_WIDTH": "1000"})
    result = wide.invoke(make_app(["simulate"]), ["simulate", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests round and round, and one that is longer than what there is room for."""
    rounds = [[10 * n, 10 * n + 1] for n in (1, 2, 3)] * 10
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": 0, "hash_ids": ids}) for ids in [*rounds, [1, 2, 3, 4, 5]]]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_simulate_prints_and_writes(trace: Path, tmp_path: Path) -> None:
    """Every policy at every capacity, with the bound and the distance to it."""
    code, output = simulate("--trace", str(trace), "--capacity", "4,100%", "--policy", "lru,prefix",
                            "--json", str(tmp_path / "out.json"))  # fmt: skip
    assert code == 0, output
    assert "31 requests, 65 blocks asked for, 11 distinct" in output
    result = json.loads((tmp_path / "out.json").read_bytes())
    assert result["bound_unlimited"] == pytest.approx(54 / 65, abs=1e-6)
    rows = {(row["capacity_blocks"], row["policy"]): row for row in result["rows"]}
    assert set(rows) == {(n, policy) for n in (4, 11) for policy in ("lru", "prefix")}
    assert rows[4, "lru"]["hits"] == 0
    assert rows[11, "prefix"]["hits"] == 54
    for row in rows.values():
        assert row["distance"] == pytest.approx(row["bound"] - row["hit_rate"], abs=2e-6)
        assert f"{row['hit_rate']:.2%}" in output


def test_simulate_reads_a_pipe(tmp_path: Path) -> None:
    """As of `--trace <(zcat trace.gz)`, which is read once."""
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_text, args=('{"hash_ids": [1, 2]}\n',))
    writer.start()
    code, output = simulate("--trace", str(pipe), "--capacity", "1", "--policy", "lru")
    writer.join(60)
    assert (code, "2 blocks asked for" in output) == (0, True)


@pytest.mark.slow
def test_a_pipe_for_figures_is_not_used_up_before_the_run(trace: Path, tmp_path: Path) -> None:
    """Goal: the reader of a named pipe is there at the end, and reads all of it."""
    os.mkfifo(pipe := tmp_path / "pipe")
    command = [sys.executable, "-m", "kvbm_cli.main", "simulate", "--trace", str(trace)]
    command += ["--capacity", "1", "--policy", "lru", "--json", str(pipe)]
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        read, _ = reader.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(read)


def test_simulate_refuses(trace: Path, tmp_path: Path) -> None:
    """An unknown policy, no capacity, a file that is no trace, one that is not there.

    Nor does it print zeros of a trace that asks for nothing.
    """
    blank, idle = tmp_path / "blank.jsonl", tmp_path / "idle.jsonl"
    blank.write_text("\n \n\n")
    idle.write_text('{"hash_ids": []}\n')
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hash_ids": [1]}\n{"hash_ids": 5}\n')
    for arguments, code, said in (
        (("--trace", str(trace), "--policy", "best"), 2, "--policy is 'best'"),
        (("--trace", str(trace), "--capacity", "some"), 2, "a number of blocks"),
        (("--trace", str(bad)), 1, "bad.jsonl, line 2"),
        (("--trace", str(blank)), 1, "blank.jsonl has no request for a block"),
        (("--trace", str(idle)), 1, "idle.jsonl has no request for a block"),
        (("--trace", str(tmp_path / "nowhere")), 2, "does not exist"),
        (("--trace", str(trace), "--json", "/no/such/file"), 2, "cannot be written: No such"),
        (("--trace", str(trace), "--json", "/proc/version"), 2, "cannot be written"),
    ):
        assert simulate(*arguments)[0] == code
        assert said in simulate(*arguments)[1]
