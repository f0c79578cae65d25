"""Users of a multi-round load: each asks a server over HTTP, and reads the answer as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.multi_round_shape import Question, Shape, beginning, question_of, questions

REQUEST_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A question and what came of it."""

    question: Question
    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]
    late_s: float
    """The answer before took so much longer than the rate allows."""
    first_s: float
    """To the first token."""
    all_s: float
    """To the last token."""

    @property
    def next_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.all_s - self.first_s) / max(1, len(self.tokens) - 1)


async def ask_all(url: str, model: str, shape: Shape, run: int) -> list[Answered]:
    """Let all users ask; return the answers in the order in which the questions were due.

    `run` is part of every prompt: runs share none with each other.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_DEADLINE_S, limits=limits) as client:
        user = _User(client, model, shape, run, time.perf_counter())
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(user.converse(mine)) for mine in questions(shape).values()]
    answers = [answer for task in asked for answer in task.result()]
    return sorted(answers, key=lambda answer: answer.question.due_s)


@dataclass(frozen=True, slots=True)
class _User:
    """How users ask."""

    client: httpx.AsyncClient
    model: str
    shape: Shape
    run: int
    begun_s: float

    async def converse(self, mine: Sequence[Question]) -> list[Answered]:
        """Ask one user's questions, each when it is due and the one before has its answer."""
        history = beginning(self.shape, self.run, mine[0].user)
        answers: list[Answered] = []
        for question in mine:
            history += question_of(self.shape, self.run, question)
            early_s = self.begun_s + question.due_s - time.perf_counter()
            await asyncio.sleep(max(0.0, early_s))
            answer = await self._ask(question, history, late_s=max(0.0, -early_s))
            history += answer.tokens
            answers.append(answer)
        return answers

    async def _ask(self, question: Question, prompt: list[int], *, late_s: float) -> Answered:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": self.shape.answer_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        asked_s = time.perf_counter()
        first_s: float | None = None
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                raise RuntimeError(f"{reply.status_code} {(await reply.aread())!r}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue  # Between events, and `[DONE]`.
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or []
                if tokens and first_s is None:
                    first_s = time.perf_counter() - asked_s
        if first_s is None or not usage:
            raise RuntimeError(f"{question} has no answer")
        details = usage.get("prompt_tokens_details") or {}
        return Answered(
            question=question, prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0, tokens=tokens, late_s=late_s,
            first_s=first_s, all_s=time.perf_counter() - asked_s,
        )  # fmt: skip
