"""LMBenchmark's shape of questions, in small, against real servers: vLLM with KVBM and alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.multi_round_client import Answered, ask_all
from benchmarks.multi_round_shape import Shape
from tests.vllm.harness import live_stack
from tests.vllm.server import TRANSFER, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]

SHAPE = Shape(
    users=3, rounds=3, per_s=1.5, requests=15, system_tokens=96, history_tokens=320,
    question_tokens=20, answer_tokens=8,
)  # fmt: skip
DEVICE_BLOCKS = 20
"""640 tokens: one of the three users' histories."""
ARGUMENTS = ["--max-model-len", "576"]


def test_users_get_the_answers_of_vllm_alone_and_more_of_them_from_a_cache(
    model: str, log_dir: Path
) -> None:
    """Goal: what the benchmark measures is the same work, and KVBM does less of it.

    1. vLLM alone answers users who share a system prompt and come back to their histories.
    2. vLLM with KVBM gives the same users the same answers, token for token.
    3. More tokens of their prompts came from a cache: the device alone cannot hold the histories.
    """
    with live_stack({"cpu_cache_gb": 0.1}) as stack:

        def answers(name: str) -> list[Answered]:
            server = ServerProcess(
                model, stack.settings, log=log_dir / f"{name}.log", blocks=DEVICE_BLOCKS,
                arguments=ARGUMENTS,
                transfer=TRANSFER if name == "kvbm" else None,
            )  # fmt: skip
            try:
                server.wait_started()
                if name == "kvbm":
                    server.wait_attached()
                return asyncio.run(ask_all(f"http://127.0.0.1:{server.port}", "model", SHAPE, 0))
            finally:
                server.stop()

        alone, cached = answers("alone"), answers("kvbm")
    assert [answer.question for answer in cached] == [answer.question for answer in alone]
    assert [answer.tokens for answer in cached] == [answer.tokens for answer in alone]
    assert {len(answer.tokens) for answer in cached} == {SHAPE.answer_tokens}
    assert [answer.prompt_tokens for answer in cached] == [one.prompt_tokens for one in alone]
    returned = [answer for answer in cached if answer.question.number]
    assert sum(answer.cached_tokens for answer in returned) > sum(
        answer.cached_tokens for answer in alone if answer.question.number
    )
    assert all(0 < answer.first_s < answer.all_s for answer in cached)
