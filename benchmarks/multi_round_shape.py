"""The shape of LMBenchmark's multi-round question and answer: who asks when, and with what prompt.

All users share a system prompt, each has a history, and every round adds a question and the answer
to the one before. Users ask at one rate together. In the beginning they are in different rounds,
and one who has asked all questions makes room for another: as many are there at any time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, fields

VOCABULARY = range(3, 1024)
"""Tokens of the tests' models, without those of a special meaning."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What LMBenchmark's options say; lengths are in tokens."""

    users: int
    """Users at a time (`--num-users`)."""
    rounds: int
    """Questions of a user (`--num-rounds`)."""
    per_s: float
    """Questions a second of all users together (`--qps`)."""
    requests: int
    """Questions in all: LMBenchmark has a time instead (`--time`)."""
    system_tokens: int
    """Shared by all users (`--shared-system-prompt`)."""
    history_tokens: int
    """Of a user alone (`--user-history-prompt`)."""
    question_tokens: int
    """LMBenchmark's question is one sentence, of about 20 tokens."""
    answer_tokens: int
    """Of an answer (`--answer-len`)."""

    def __post_init__(self) -> None:
        """Raise ValueError, which names the field, unless every number is above its least."""
        for field in fields(self):
            value = getattr(self, field.name)
            zero_is_fine = field.name in ("system_tokens", "history_tokens")
            if value < 0 or (value == 0 and not zero_is_fine):
                least = "0 or more" if zero_is_fine else "above 0"
                raise ValueError(f"{field.name} is {value}; it must be {least}")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        turn = self.question_tokens + self.answer_tokens
        return self.system_tokens + self.history_tokens + self.rounds * turn


@dataclass(frozen=True, slots=True)
class Question:
    """One question: when it is due, from whom, and which of the user's."""

    due_s: float
    user: int
    number: int
    """0 is the user's first, with system prompt and history before it."""


def questions(shape: Shape) -> dict[int, list[Question]]:
    """Return the questions of each user, in order."""
    found: defaultdict[int, list[Question]] = defaultdict(list)
    for count in range(shape.requests):
        turn, place = divmod(count, shape.users)
        # Places begin in rounds that are evenly apart, so users leave one after the other.
        life, _ = divmod(place * shape.rounds // shape.users + turn, shape.rounds)
        user = life * shape.users + place
        found[user].append(Question(count / shape.per_s, user, len(found[user])))
    return dict(found)


def beginning(shape: Shape, run: int, user: int) -> list[int]:
    """Return what stands before a user's first question: the system prompt and the history."""
    return [
        *_tokens(f"{run} system", shape.system_tokens),
        *_tokens(f"{run} history {user}", shape.history_tokens),
    ]


def question_of(shape: Shape, run: int, question: Question) -> list[int]:
    """Return the tokens of one question."""
    return _tokens(f"{run} question {question.user} {question.number}", shape.question_tokens)


def _tokens(name: str, length: int) -> list[int]:
    """Return the tokens of that name: the same in every process, other ones for another name."""
    return random.Random(name).choices(VOCABULARY, k=length)
