"""Questions to a core: each gets its own answer, an error, or a deadline."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from kvbm_common.errors import DeadlineExceeded, RequestFailed
from kvbm_common.nats.bus import VerbHandler
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.admin_verbs import CoreAnswers, tier_verbs
from kvbm_common.service.audit import Audit
from kvbm_common.wire.admin import (
    STEP_BLOCKS_MAX,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
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


class Written(Audit):
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.verbs: list[str] = []

    def audited(self, verb: str, handler: VerbHandler) -> VerbHandler:
        async def handle(payload: bytes) -> bytes:
            reply = await handler(payload)
            self.verbs.append(verb)
            return reply

        return handle


@pytest.mark.parametrize(
    ("steps", "removed", "more", "asked"),
    [
        ([(0, True), (0, True), (3, True), (2, False)], 5, False, 4),
        ([(STEP_BLOCKS_MAX - 1, True), (1, True), (1, True)], STEP_BLOCKS_MAX, True, 2),
    ],
    ids=["all", "enough for one request"],
)
async def test_the_steps_of_a_removal_are_one_change(
    steps: list[tuple[int, bool]], removed: int, more: bool, asked: int
) -> None:
    """A core answers step by step; the operator has one answer, and the audit one entry."""
    said: list[str] = []

    async def ask(verb: str, request: RemoveRequest) -> bytes:
        assert request.everything
        step, goes_on = steps[len(said)]
        said.append(verb)
        return msgspec.json.encode(RemoveReply(removed=step, kept=len(said), more=goes_on))

    audit = Written()
    evict = tier_verbs("host-tier", ask, audit)["evict"]
    reply = await evict(msgspec.json.encode(RemoveRequest(everything=True)))
    expected = RemoveReply(removed=removed, kept=asked, more=more)
    assert msgspec.json.decode(reply, type=RemoveReply) == expected
    assert (said, audit.verbs) == (["evict"] * asked, ["evict"])


@pytest.mark.parametrize(
    ("steps", "evicted", "more", "asked"),
    [
        ([(256, True), (256, True), (8, False)], 520, False, 3),
        ([(STEP_BLOCKS_MAX - 1, True), (1, True), (1, True)], STEP_BLOCKS_MAX, True, 2),
        ([(0, False)], 0, False, 1),
    ],
    ids=["all", "enough for one request", "nothing to evict"],
)
async def test_the_steps_of_a_resize_are_one_change(
    steps: list[tuple[int, bool]], evicted: int, more: bool, asked: int
) -> None:
    """Goal: a resize of a large tier does not crowd all other changes out of `kvbm audit`."""
    said: list[str] = []

    async def ask(verb: str, request: ResizeRequest) -> bytes:
        assert request.goes_on == bool(said), "only the first step is a new resize"
        step, goes_on = steps[len(said)]
        said.append(verb)
        used = 9_000 - sum(count for count, _ in steps[: len(said)])
        reply = ResizeReply(slots=used, was=used + step, capacity=9_000, evicted=step, more=goes_on)
        return msgspec.json.encode(reply)

    audit = Written()
    resize = tier_verbs("host-tier", ask, audit)["resize"]
    reply = await resize(msgspec.json.encode(ResizeRequest(slots=10)))
    expected = ResizeReply(
        slots=9_000 - evicted, was=9_000, capacity=9_000, evicted=evicted, more=more
    )
    assert msgspec.json.decode(reply, type=ResizeReply) == expected
    assert (said, audit.verbs) == (["resize"] * asked, ["resize"])
