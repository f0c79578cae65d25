"""Weights that are pushed into a running SGLang, whose cache is flushed: by its own controller."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.conftest import StartRank
from tests.sglang.conversation import Pool
from tests.sglang.harness import RankProcess, extra_of, pages
from tests.sglang.test_arguments import MODEL
from tests.vllm.harness import LiveStack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COUNT, SIZE = 6, 16
ALL = COUNT * SIZE
OLD, NEW = [list(range(first, first + COUNT)) for first in (0, 50)]
"""What the old weights and the new ones compute: seeds of pages."""
SERVED = {"hicache_storage_backend": "dynamic"}
WAYS = ["tensor", "distributed", "remote", "join"]
PUSHED = SERVED | {"enable_memory_saver": True}


class Engine:
    """A rank whose storage SGLang's controller has attached."""

    def __init__(self, process: RankProcess, stack: LiveStack, **fields: Any) -> None:
        self.process = process
        extra = extra_of(stack.settings) | fields.pop("extra", {})
        fields = {"pools": {"kv": Pool()}, "arguments": PUSHED} | fields
        assert process.ask("control", extra=extra, **fields).flags == [True]

    def computes(self, tokens: list[int], seeds: list[int], *, wait: bool = True) -> None:
        """Fill pages of the host pool and write them back."""
        self.process.ask("fill", pages=pages(0, COUNT), seeds=seeds)
        stored = self.process.ask(
            "back_up", tokens=tokens, pages=pages(0, COUNT), rounds=int(wait)
        ).number
        assert not wait or stored == ALL

    def loads(self, tokens: list[int]) -> list[int]:
        """Return the seeds of what was loaded: nothing, or all of the old or the new ones."""
        there = pages(10, COUNT)
        came = self.process.ask("prefetch", tokens=tokens, pages=there).number
        for seeds in (OLD, NEW):
            if all(self.process.ask("holds", pages=there, seeds=seeds).flags):
                assert came == ALL
                self.process.ask("fill", pages=there, seeds=[99] * COUNT)
                return seeds
        assert came == 0
        return []

    def ask(self, what: str, **fields: Any) -> dict[str, int]:
        """Have the process do something, and return what it has counted since it attached."""
        self.process.ask(what, **fields)
        return self.process.ask("counts").counts


def sequence(number: int) -> list[int]:
    """Tokens of a sequence of pages."""
    return [1_000 * number + token for token in range(ALL)]


def test_a_flush_hides_what_older_weights_made(
    stack: LiveStack, rank: RankProcess, start: StartRank
) -> None:
    """Goal: in an engine that weights are pushed into, no page of older weights is loaded.

    1. Pages are stored and loaded. Other weights come, and SGLang flushes.
    2. Nothing is loaded. The new weights' pages are stored under the same keys, and loaded.
    3. An engine that has its first weights loads the old ones.
    4. Pages whose write-back is on its way at a flush are not found after it.
    """
    tokens = sequence(1)
    engine, other = Engine(rank, stack), Engine(start(), stack)
    engine.computes(tokens, OLD)
    assert engine.loads(tokens) == OLD
    assert engine.ask("flush").get("flushes_forgotten", 0) == 0
    assert engine.loads(tokens) == []
    engine.computes(tokens, NEW)
    assert engine.loads(tokens) == NEW
    assert other.loads(tokens) == OLD
    hasty = sequence(2)
    engine.computes(hasty, OLD, wait=False)
    engine.ask("flush")
    assert engine.loads(hasty) == []
    assert engine.loads(tokens) == []
    engine.computes(hasty, NEW)
    assert engine.loads(hasty) == NEW
    assert engine.ask("counts")["flushes_forgotten"] == 2
    engine.process.ask("release")
    other.process.ask("release")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"arguments": SERVED}, OLD),
        ({"extra": {"plain_reset": "keep"}}, OLD),
        ({"arguments": SERVED, "extra": {"plain_reset": "forget"}}, []),
    ],
    ids=["auto", "keep", "forget"],
)
def test_other_engines_keep_what_was_stored(
    stack: LiveStack, rank: RankProcess, fields: dict[str, Any], found: list[int]
) -> None:
    """A flush for a benchmark is one without other weights. An operator may choose."""
    tokens = sequence(3 if found else 4)
    engine = Engine(rank, stack, **fields)
    engine.computes(tokens, OLD)
    engine.ask("flush")
    assert engine.loads(tokens) == found
    counts = engine.ask("counts")
    assert [counts.get(f"flushes_{what}", 0) for what in ("kept", "forgotten")] == (
        [1, 0] if found else [0, 1]
    )
    engine.process.ask("release")


@pytest.mark.parametrize(
    "noted",
    [{"weight_version": "2"}, {"model_path": "elsewhere", "load_format": "auto"}],
    ids=["version", "disk"],
)
def test_an_update_that_sglang_notes_shows(
    stack: LiveStack, start: StartRank, tmp_path: Path, noted: dict[str, str]
) -> None:
    """Goal: an engine without marks forgets, too, when SGLang itself says of other weights.

    1. Other weights are noted: nothing is found, and a flush begins a generation from then on.
    2. The same weights are noted again, from the same path: a flush shows it.
    """
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    process = start()
    process.ask("serve", arguments={"model_path": str(tmp_path), "device": "cpu"})
    tokens = sequence(5 + len(noted))
    engine = Engine(process, stack, arguments=SERVED)
    engine.computes(tokens, OLD)
    assert engine.loads(tokens) == OLD
    engine.ask("note_weights", arguments=noted)
    assert engine.loads(tokens) == []
    engine.computes(tokens, NEW)
    engine.ask("flush")
    assert engine.loads(tokens) == []
    process.ask("release")
    engine = Engine(process, stack, arguments=SERVED, extra={"revision": "a"})
    engine.computes(tokens, OLD)
    engine.ask("note_weights", arguments=noted)
    engine.ask("flush")
    assert engine.loads(tokens) == []
    process.ask("release")


@pytest.mark.parametrize("way", WAYS)
def test_a_push_that_nothing_else_tells_of_shows(
    stack: LiveStack, rank: RankProcess, way: str
) -> None:
    """Goal: an engine without marks forgets when its model runner takes new weights.

    1. Weights are pushed without a version, or a trainer joins. SGLang flushes: nothing is found.
    2. Nor is it after a push without a flush.
    """
    tokens = sequence(WAYS.index(way) + 11)
    engine = Engine(rank, stack, arguments=SERVED)
    engine.computes(tokens, OLD)
    assert engine.loads(tokens) == OLD
    engine.ask("push", keys=[way])
    engine.ask("flush")
    assert engine.loads(tokens) == []
    engine.computes(tokens, NEW)
    assert engine.loads(tokens) == NEW
    engine.ask("push", keys=[way])
    assert engine.loads(tokens) == []
    engine.process.ask("release")


def test_a_flush_ends_where_an_operator_lets_a_question_wait_for_long(
    stack: LiveStack, rank: RankProcess
) -> None:
    """Goal: SGLang's scheduler, which waits 10 s for its storage threads at a flush, does not end.

    1. Pages are on disk alone, and the disk tier stands still. 2. SGLang asks for them and for
    others, and flushes: those that wait are answered at once. 3. The disk tier goes on: what is
    stored then is loaded.
    """
    engine = Engine(rank, stack, arguments=SERVED, extra={"onboard_deadline_ms": 60_000})
    written = stack.figures("disk-tier").get("offload_blocks_h2d", 0)
    engine.computes(sequence(21), OLD)
    wait_for(
        lambda: stack.figures("disk-tier").get("offload_blocks_h2d", 0) >= written + COUNT,
        "the pages do not come to the disk",
    )
    stack.forget("host-tier")
    os.kill(pid := stack.stack.pids["disk-tier"], signal.SIGSTOP)
    try:
        asked = engine.ask("counts")["kv.lookups"]
        rank.ask("prefetch", tokens=sequence(21), pages=pages(10, COUNT), rounds=0)
        wait_for(lambda: engine.ask("counts")["kv.lookups"] > asked, "no question")
        for number in (22, 23):
            rank.ask("prefetch", tokens=sequence(number), pages=pages(10, COUNT), rounds=0)
        rank.ask("flush")
        assert engine.ask("counts")["stopped.exists"] == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.computes(sequence(22), NEW)
    assert engine.loads(sequence(22)) == NEW
    rank.ask("release")


def test_ranks_that_share_pages_forget_together(stack: LiveStack, start: StartRank) -> None:
    """Goal: with latent attention, what rank 0 has stored since a flush rank 1 loads.

    1. Rank 1 loads what rank 0 has stored. 2. Both flush: rank 1 loads nothing.
    3. Rank 0 stores: rank 1 loads it, also after a flush in which rank 0 was asked nothing.
    """
    pool = {"kv": Pool(kind="mla", layers=3)}
    first, second = (
        Engine(
            start(SGLANG_RUN_ID="one"), stack, pools=pool, config={"tp_rank": number, "tp_size": 2}
        )
        for number in range(2)
    )
    tokens = sequence(9)
    first.computes(tokens, OLD)
    assert second.loads(tokens) == first.loads(tokens) == OLD
    for engine in (first, second):
        engine.ask("flush")
    assert first.loads(tokens) == second.loads(tokens) == []
    first.computes(tokens, NEW)
    assert second.loads(tokens) == first.loads(tokens) == NEW
    for engine in (first, second):
        engine.ask("flush")
    second.loads(sequence(10))
    for engine in (first, second):
        engine.ask("flush")
    first.computes(tokens, OLD)
    assert second.loads(tokens) == OLD
    for engine in (first, second):
        engine.process.ask("release")
