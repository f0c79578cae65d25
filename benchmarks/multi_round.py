"""LMBenchmark's multi-round question and answer in small, over HTTP: vLLM with KVBM and without.

`make bench-vllm` runs it, too. Two servers of the same model on one core; each has its turn in
every run, with the same questions. A ratio is the median of the runs' ratios. The rate is a share
of what vLLM alone can compute, measured first: a fixed one would leave a faster machine idle, and
on a slower one the queue would grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.harness import Row, info_row, percentile
from benchmarks.multi_round_client import Answered, ask_all
from benchmarks.multi_round_shape import Shape
from benchmarks.vllm_arms import ENGINE, make_model
from tests.vllm.harness import live_stack
from tests.vllm.server import TRANSFER, ServerProcess

RUNS = 3
SHARE_OF_RATE = 0.7
"""Of the rate at which vLLM alone answers first questions, one after the other."""
SHAPE = Shape(
    users=5, rounds=4, per_s=1.0, requests=20, system_tokens=256, history_tokens=960,
    question_tokens=24, answer_tokens=16,
)  # fmt: skip
"""A twentieth of LMBenchmark's long histories; users together have twice the device."""
FIRST_QUESTIONS = 4
LATE_S = 0.05
"""Less is the client's own delay."""
NAMES = ("plain", "kvbm")
Runs = dict[str, list[list[Answered]]]


@dataclass(frozen=True, slots=True)
class Arms:
    """Two servers of one model."""

    plain: ServerProcess
    kvbm: ServerProcess

    def ask(self, name: str, shape: Shape, run: int) -> list[Answered]:
        """Let all users ask one of the servers."""
        server: ServerProcess = getattr(self, name)
        return asyncio.run(ask_all(f"http://127.0.0.1:{server.port}", "model", shape, run))


def run() -> list[Row]:
    """Measure; about six minutes on an idle machine."""
    with arms() as servers:
        rate = SHARE_OF_RATE / first_question_s(servers)
        return rows(measured(servers, replace(SHAPE, per_s=rate), RUNS), rate)


@contextlib.contextmanager
def arms() -> Iterator[Arms]:
    """Start the model's servers, and a stack with room for all histories of all runs."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-")))
        model = make_model(directory)
        tiers = stack.enter_context(live_stack({"cpu_cache_gb": 2.0}))
        arguments = [
            word
            for name, value in ENGINE.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        servers = {}
        for name in NAMES:
            servers[name] = ServerProcess(
                model, tiers.settings, log=directory / f"{name}.log", arguments=arguments,
                transfer=TRANSFER if name == "kvbm" else None, shipped=True,
            )  # fmt: skip
            stack.callback(servers[name].stop)
            servers[name].wait_started()
        servers["kvbm"].wait_attached()
        yield Arms(**servers)


def first_question_s(servers: Arms) -> float:
    """Return how long vLLM alone takes for a user's first question; both servers have warmed."""
    lone = replace(SHAPE, users=1, rounds=1, requests=1)
    numbers = range(-FIRST_QUESTIONS, 0)  # Runs begin with 0.
    answers = {name: [servers.ask(name, lone, number)[0] for number in numbers] for name in NAMES}
    return statistics.median(answer.all_s for answer in answers["plain"][1:])


def measured(servers: Arms, shape: Shape, runs: int) -> Runs:
    """Return the answers of all runs, by server; which one begins changes from run to run."""
    found: Runs = {name: [] for name in NAMES}
    for number in range(runs):
        for name in NAMES if number % 2 else NAMES[::-1]:
            found[name].append(servers.ask(name, shape, number))
    return found


def rows(found: Runs, rate: float) -> list[Row]:
    """Return what LMBenchmark's summary has, KVBM's figures beside those of vLLM alone."""

    def beside(name: str, unit: str, of: Callable[[Sequence[Answered]], float]) -> Row:
        values, references = ([of(answers) for answers in found[arm]] for arm in ("kvbm", "plain"))
        ratio = statistics.median(a / b for a, b in zip(values, references, strict=True))
        return Row(
            name=f"{name} (reference: vLLM alone)", unit=unit,
            value=round(statistics.median(values), 3),
            reference=round(statistics.median(references), 3), ratio=round(ratio, 3),
        )  # fmt: skip

    ttft = beside("time to first token, mean", "ms", mean_first_ms)
    assert ttft.ratio is not None
    return [
        msgspec.structs.replace(ttft, target=1.0, met=ttft.ratio <= 1.0),
        beside("time to first token, p90", "ms", p90_first_ms),
        beside("each further token, mean", "ms", mean_next_ms),
        beside("questions answered", "1/s", answered_per_s),
        *(
            info_row(f"{name}, {words}", statistics.median(map(of, found[arm])), unit="%")
            for name, of in (
                ("prompt tokens that came from a cache", cached_percent),
                ("questions that waited", late_percent),
            )
            for arm, words in (("kvbm", "KVBM"), ("plain", "vLLM alone"))
        ),
        info_row("questions asked", rate, unit="1/s"),
    ]  # fmt: skip


def mean_first_ms(answers: Sequence[Answered]) -> float:
    """Return the mean time to the first token."""
    return statistics.fmean(answer.first_s for answer in answers) * 1000


def p90_first_ms(answers: Sequence[Answered]) -> float:
    """Return the time to the first token that nine in ten do not exceed."""
    return percentile([answer.first_s for answer in answers], 0.9) * 1000


def mean_next_ms(answers: Sequence[Answered]) -> float:
    """Return the mean time of each token after the first."""
    return statistics.fmean(answer.next_s for answer in answers) * 1000


def answered_per_s(answers: Sequence[Answered]) -> float:
    """Return how many questions were answered in a second, from the first to the last answer."""
    ends = [one.question.due_s + one.late_s + one.all_s for one in answers]
    return len(answers) / max(ends)


def cached_percent(answers: Sequence[Answered]) -> float:
    """Return the share of the prompts' tokens that came from the device or from a tier."""
    cached = sum(answer.cached_tokens for answer in answers)
    return 100 * cached / sum(answer.prompt_tokens for answer in answers)


def late_percent(answers: Sequence[Answered]) -> float:
    """Return the share of the questions that were due before the answer to the one before."""
    return 100 * sum(answer.late_s > LATE_S for answer in answers) / len(answers)
