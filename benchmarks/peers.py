"""KVBM beside its peers on a real vLLM, in one table: `make bench-peers`, `ARGS="--quick"`.

One arm runs at a time, with all its processes: a server that idles beside the one that is measured
takes a core from it. A round visits every arm, in changing order; a ratio is the median of the
rounds' ratios. Each visit is kept: a run that was cut short goes on where it stood.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.descendants import adopt_orphans, cpu_seconds, cpu_since, memory_bytes
from benchmarks.peers_arms import ARMS, Arm, ArmFailed, running, versions
from benchmarks.peers_table import Kept, Measure, Sizes, markdown, missed, row
from benchmarks.report import DOCUMENT, RESULTS, machine, with_table
from benchmarks.vllm import (
    ANSWER_TOKENS,
    BATCH,
    BATCH_ANSWER,
    BATCH_TOKENS,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    TURNS,
    USERS,
)
from benchmarks.vllm_arms import BLOCK_BYTES, BLOCK_TOKENS, make_model
from tests.vllm.conversation import Ask, Command
from tests.vllm.harness import EngineProcess, prompt, wait_for

FULL = Sizes(rounds=3, samples=4, batches=3, turns=TURNS, rest_s=10.0, idle_s=10.0)
QUICK = Sizes(rounds=1, samples=2, batches=1, turns=2, rest_s=3.0, idle_s=3.0)
SHORT, LONG = 520, 2_000
"""Tokens of a prompt; both end a few tokens after a block."""
MOVED_GB = LONG // BLOCK_TOKENS * BLOCK_BYTES / 1e9
SETTLE_S = 15.0
MEASURES = (
    Measure(f"evicted {SHORT}", f"TTFT after eviction, {SHORT} tokens", "ms"),
    Measure(f"local {SHORT}", f"TTFT of a hit on the device, {SHORT} tokens", "ms"),
    Measure(f"evicted {LONG}", f"TTFT after eviction, {LONG:,} tokens", "ms"),
    Measure(f"local {LONG}", f"TTFT of a hit on the device, {LONG:,} tokens", "ms"),
    Measure(f"cold {SHORT}", f"TTFT cold, storing, {SHORT} tokens", "ms"),
    Measure(f"cold {LONG}", f"TTFT cold, storing, {LONG:,} tokens", "ms"),
    Measure("chat", "chat", "requests/s", more_is_better=True),
    Measure("useless", f"{BATCH} prompts at once that never return", "s"),
    Measure("useless cpu", "the same, time of all processors", "CPU s"),
    Measure("load rate", "loading: bytes over TTFT after eviction less that of a hit", "GB/s",
            more_is_better=True),
    Measure("load cpu", "loading: time of all processors", "CPU s/GB"),
    Measure("idle", "idle: time of all processors", "% of a core"),
    Measure("memory", "memory of all processes", "GB"),
)  # fmt: skip


class Load:
    """The work of one visit, the same for every arm of a round."""

    def __init__(self, arm: Arm, engine: EngineProcess, sizes: Sizes, number: int) -> None:
        self._arm, self._engine, self._sizes = arm, engine, sizes
        self._seeds = itertools.count(number * 10_000 + 1)
        self._names = (f"ask {one}" for one in itertools.count())
        self.samples: dict[str, list[float]] = defaultdict(list)

    def run(self) -> dict[str, float]:
        """Return the figures of a visit, each the median of its samples."""
        for _ in range(2):
            self._first_tokens(LONG)
        self.samples.clear()  # The first time on every path.
        for length in (SHORT, LONG) * self._sizes.samples:
            self._first_tokens(length)
        for _ in range(self._sizes.batches):
            self._useless()
        self._chat()
        self.samples["memory"].append(memory_bytes() / 1e9)
        self._idle()
        figures = {name: statistics.median(samples) for name, samples in self.samples.items()}
        load_ms = figures[f"evicted {LONG}"] - figures[f"local {LONG}"]
        if self._arm.caches and load_ms > 0:
            figures["load rate"] = MOVED_GB / load_ms * 1000
        return figures

    def _first_tokens(self, length: int) -> None:
        """Cold, hit on the device, and after the device was emptied."""
        tokens = self._prompt(length)
        self._ttft(f"cold {length}", tokens, cached=False)
        self._settle()
        local_cpu_s = self._ttft(f"local {length}", tokens)
        self._empty_device()
        evicted_cpu_s = self._ttft(f"evicted {length}", tokens, cached=self._arm.caches)
        if self._arm.caches and length == LONG:
            self.samples["load cpu"].append((evicted_cpu_s - local_cpu_s) / MOVED_GB)

    def _ttft(self, name: str, tokens: Sequence[int], *, cached: bool = True) -> float:
        """Note the time to the first token; returns the processor time until all is quiet."""
        before = cpu_seconds()
        (answer,) = self._engine.run(self._ask(tokens, 1))
        cpu_s = cpu_since(before)
        hit = answer.cached >= len(tokens) - 2 * BLOCK_TOKENS
        assert hit == cached, f"{name}: {answer.cached} tokens of {len(tokens)} were cached"
        self.samples[name].append(answer.seconds * 1000)
        return cpu_s

    def _useless(self) -> None:
        """Requests that share nothing and never come again."""
        self._engine.run(self._ask(self._prompt(BLOCK_TOKENS), 1))
        asks = [self._ask(self._prompt(BATCH_TOKENS), BATCH_ANSWER) for _ in range(BATCH)]
        before, started_s = cpu_seconds(), time.perf_counter()
        self._engine.run(*asks, settle=False)
        self.samples["useless"].append(time.perf_counter() - started_s)
        self._settle()
        self.samples["useless cpu"].append(cpu_since(before))

    def _chat(self) -> None:
        """Users with one system prompt and growing histories, all waiting in each turn."""
        system = self._prompt(SYSTEM_TOKENS)
        histories = [list(system) for _ in range(USERS)]
        started_s = time.perf_counter()
        for _ in range(self._sizes.turns):
            for history in histories:
                history += self._prompt(QUESTION_TOKENS)
            asks = [self._ask(history, ANSWER_TOKENS) for history in histories]
            answers = self._engine.run(*asks, settle=False)
            for history, answer in zip(histories, answers, strict=True):
                history += answer.tokens
        seconds = time.perf_counter() - started_s
        self.samples["chat"].append(USERS * self._sizes.turns / seconds)
        self._settle()

    def _idle(self) -> None:
        time.sleep(self._sizes.rest_s)
        before, started_s = cpu_seconds(), time.perf_counter()
        time.sleep(self._sizes.idle_s)
        seconds = time.perf_counter() - started_s
        self.samples["idle"].append(100 * cpu_since(before) / seconds)

    def _settle(self) -> None:
        """Let the stores end: some arms go on only while the engine steps, and say nothing."""
        self._engine.run(self._ask(self._prompt(8), 4))

    def _empty_device(self) -> None:
        """Empty the device's cache: refused as long as a store holds blocks."""

        def emptied() -> bool:
            done = self._engine.say(Command(what="reset")).ok
            if not done:
                self._settle()
            return done

        wait_for(emptied, "the device's cache was not emptied", deadline_s=SETTLE_S)

    def _ask(self, tokens: Sequence[int], new_tokens: int) -> Ask:
        return Ask(name=next(self._names), tokens=list(tokens), new_tokens=new_tokens)

    def _prompt(self, length: int) -> list[int]:
        return prompt(next(self._seeds), length)


def visit(kept: Kept, arm: Arm, model: str, number: int) -> None:
    """Start an arm, measure it, end it, and note what came out."""
    began = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    try:
        with running(arm, model) as (engine, commands):
            figures = Load(arm, engine, kept.sizes, number).run()
    except ArmFailed as failed:
        kept.failed, kept.commands = f"{failed}", failed.commands or kept.commands
        return
    kept.commands = commands
    kept.visits.append(figures)
    kept.times.append(began)


def kept_of(arm: Arm, sizes: Sizes, folder: Path) -> Kept:
    """Return what earlier runs of the same sizes, on the same machine, have left of an arm."""
    empty = Kept(arm.name, arm.title, arm.caches, sizes, machine())
    path = folder / f"{arm.name}.json"
    if not path.exists():
        return empty
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except msgspec.MsgspecError as error:
        print(f"{path}: {error}; the arm is measured again", file=sys.stderr)
        return empty
    return kept if (kept.sizes, kept.machine) == (sizes, empty.machine) else empty


def keep(kept: Kept, folder: Path) -> None:
    """Write what is known of an arm, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n"
    new = folder / f"{kept.name}.new"
    new.write_bytes(text)
    new.replace(folder / f"{kept.name}.json")


def in_turn(number: int) -> Sequence[Arm]:
    """The arms; which one begins changes from round to round."""
    first = number % len(ARMS)
    return ARMS[first:] + ARMS[:first]


def measure(sizes: Sizes, folder: Path, again: Sequence[str], only: Sequence[str]) -> list[Kept]:
    """Make the visits that are missing; an arm that fails ends no other."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in again:
        (folder / f"{name}.json").unlink(missing_ok=True)
    kept = {arm.name: kept_of(arm, sizes, folder) for arm in ARMS}
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="kvbm-peers-model-") as name:
        model = ""
        for number, arm in wanted(sizes, kept, only):
            mine = kept[arm.name]
            model = model or make_model(Path(name))
            mine.versions = mine.versions or versions(arm)
            started_s = time.perf_counter()
            visit(mine, arm, model, number)
            text = mine.failed or "measured"
            print(f"round {number + 1} of {sizes.rounds}, {arm.title}: {text}, "
                  f"{time.perf_counter() - started_s:.0f} s", flush=True)  # fmt: skip
            keep(mine, folder)
    return [kept[arm.name] for arm in ARMS]


def wanted(sizes: Sizes, kept: dict[str, Kept], only: Sequence[str]) -> Iterator[tuple[int, Arm]]:
    """Yield the visits that are missing, round by round."""
    for number in range(sizes.rounds):
        for arm in in_turn(number):
            if arm.name in (only or kept) and kept[arm.name].wants(number):
                yield number, arm


def title_of(arms: Sequence[Kept]) -> str:
    """What stands above the table."""
    day = max((time for arm in arms for time in arm.times), default="never").split(" ")[0]
    return f"`make bench-peers`, {day}, {arms[0].machine}"


def measured(console: Console) -> bool:
    """Measure at full size, renew the document; returns whether every row was met."""
    return _measured(console, FULL, again=(), only=())


def _measured(console: Console, sizes: Sizes, *, again: Sequence[str], only: Sequence[str]) -> bool:
    folder = RESULTS / ("peers" if sizes == FULL else "peers_quick")
    arms = measure(sizes, folder, again, only)
    if sizes == FULL:
        table = markdown(title_of(arms), MEASURES, arms)
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), "peers", table))
    _show(console, arms)
    return not list(missed(MEASURES, arms))


def _show(console: Console, arms: Sequence[Kept]) -> None:
    table = Table(title=title_of(arms), title_justify="left")
    for column in ("what", *(arm.name for arm in arms), "/ alone", "/ best peer", "met"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for one in MEASURES:
        table.add_row(*row(one, arms))
    console.print(table)
    for arm in arms:
        console.print(f"{arm.title}: {arm.versions}", *arm.commands, sep="\n    ", soft_wrap=True)
        if arm.failed:
            console.print(f"    ended: {arm.failed}", soft_wrap=True)


def unwind_on_signals() -> None:
    """Leave in order when told to end: processes, shared memory and directories go, too."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, leave)


def main(words: Sequence[str] | None = None) -> int:
    """Measure as the command line says; 1 when a peer is better in a row."""
    for name in [name for name in os.environ if name.startswith("KVBM_")]:
        del os.environ[name]  # What ships is measured.
    unwind_on_signals()
    names = [arm.name for arm in ARMS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, kept out of docs")
    parser.add_argument(
        "--again",
        nargs="*",
        choices=names,
        metavar="ARM",
        help=f"forget what is kept, of all arms or of these: {', '.join(names)}",
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="ARM", default=[],
                        help="visit no others")  # fmt: skip
    said = parser.parse_args(words)
    again = names if said.again == [] else said.again or []
    sizes = QUICK if said.quick else FULL
    return 0 if _measured(Console(width=160), sizes, again=again, only=said.only) else 1


if __name__ == "__main__":
    sys.exit(main())
