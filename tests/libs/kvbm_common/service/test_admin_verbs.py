"""Questions to a core: each gets its own answer, an error, or a deadline."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import DeadlineExceeded, RequestFailed
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.admin_verbs import CoreAnswers
from kvbm_common.wire.verbs import ErrorBody, ReleaseReply

from tests.waiting import wait_until

DEADLINE_S = 10.0


def made() -> tuple[CoreAnswers, Metrics]:
    """Return the answers, and the metrics that count what comes too late."""
    metrics = Metrics()
    return CoreAnswers(metrics.counter("kvbm_x_total", "X.", labels=("reason",))), metrics


async def test_answers_in_another_order_find_their_questions() -> None:
    """Two ask; the second is answered first, by a core that takes its input at once or later."""
    answers, _ = made()
    asked: list[int] = []

    async def later(number: int) -> None:
        asked.append(number)

    first = asyncio.create_task(answers.ask(asked.append, deadline_s=DEADLINE_S))
    second = asyncio.create_task(answers.ask(later, deadline_s=DEADLINE_S))
    await wait_until(lambda: len(asked) == 2)
    answers.give(asked[1], ReleaseReply(valid=False))
    answers.give(asked[0], ReleaseReply(valid=True))
    assert b'"valid":true' in await first
    assert b'"valid":false' in await second


async def test_an_error_is_raised_and_a_late_answer_counted() -> None:
    """1. An ErrorBody is raised as it is. 2. Nothing comes: the deadline. 3. Then it comes."""
    answers, metrics = made()
    asked: list[int] = []

    def refuse(number: int) -> None:
        answers.give(number, ErrorBody(code="stale_epoch", message="another one", field="epoch"))

    with pytest.raises(RequestFailed, match="stale_epoch") as refused:
        await answers.ask(refuse, deadline_s=DEADLINE_S)
    assert refused.value.field == "epoch"
    with pytest.raises(DeadlineExceeded):
        await answers.ask(asked.append, deadline_s=0.01)
    answers.give(asked[0], ReleaseReply(valid=True))
    assert metrics.value("kvbm_x_total", reason="answer_too_late") == 1
