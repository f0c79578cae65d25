"""`kvbm explain` on a whole stack: what an operator asks after a miss, also on NATS."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.explain import ExplainRequest, explain_reply
from kvbm_common.wire.verbs import verb_subject
from kvbm_connectors.sim.control import Submit

from tests.integration.running import Running, running
from tests.integration.test_operators import Operator

TIERS = {"cpu_cache_gb": 0.02, "disk_cache_gb": 0.5}
BLOCK_TOKENS = 16
LEFT = {"evicted", "filtered", "not_written"}
"""Why a block is missed that host memory had. An engine that computes it anew offers it at once,
and the disk tier, who then sees it for the second time, may be writing it when asked: which of
these three it is depends on who is faster. `test_explain` of the host tier has them one by one."""


@pytest.fixture
async def stack() -> AsyncIterator[Running]:
    """A stack with a small host tier."""
    async with running(TIERS, engines=1) as run:
        yield run


def prompt(number: int, blocks: int) -> bytes:
    """Token ids that nobody else has."""
    tokens = range(number * 100_000, number * 100_000 + blocks * BLOCK_TOKENS + 1)
    return b"".join(token.to_bytes(4, "little") for token in tokens)


async def ask(run: Running, request: str, number: int, blocks: int, **submit: Any) -> None:
    """A request, on an empty device."""
    engine = run.engines[0]
    while not await engine.reset():
        pass
    finished = await engine.request(
        Submit(request=request, prompt=prompt(number, blocks), **submit)
    )
    assert not finished.error


def reasons(told: Any) -> list[tuple[int, str, str]]:
    """(blocks, hit or the reason, tier) of the newest lookup."""
    segments = told["lookups"][0]["segments"]
    return [(one["blocks"], one["reason"] or "hit", one["tier"]) for one in segments]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_operator_asks_why(stack: Running) -> None:
    """1. New. 2. A hit. 3. Another salt. 4. Left host memory, and not on disk.

    5. Lists by reason. 6. A request that nobody knows. 7. The same over NATS.
    """
    operator = Operator(stack)
    await ask(stack, "new", 1, 4)
    told = await operator.reads("explain", "new")
    assert reasons(told) == [(4, "never_stored", "")]
    assert "since we remember" in told["lookups"][0]["segments"][0]["meaning"]

    await ask(stack, "again", 1, 4)
    assert reasons(await operator.reads("explain", "again")) == [(4, "hit", "host")]
    await ask(stack, "salted", 1, 4, salt="tenant-b")
    told = await operator.reads("explain", "salted")
    assert reasons(told) == [(1, "salt_differs", "host"), (3, "never_stored", "")]

    for number in range(2, 28):
        await ask(stack, f"filler-{number}", number, 16)
    request = "evicted"
    await ask(stack, request, 2, 16)
    told = await operator.reads("explain", request)
    assert {reason for _, reason, _ in reasons(told)} <= LEFT
    assert sum(blocks for blocks, _, _ in reasons(told)) == 16
    text = await operator.says("explain", request)
    assert "host memory" in text or "to make room" in text
    assert time.strftime("%H:") in text

    listed = (await operator.reads("explain", "--missed", "--last", "100"))["requests"]
    assert listed[0]["request_id"] == request
    assert {"new", "salted", "filler-27"} < {one["request_id"] for one in listed}
    assert "again" not in {one["request_id"] for one in listed}
    assert listed[0]["by_tier"] == {"host": 0, "disk": 0, "object": 0, "remote": 0}
    salted = (await operator.reads("explain", "--reason", "salt_differs"))["requests"]
    assert [one["request_id"] for one in salted] == ["salted"]
    assert (await operator.reads("explain", "--engine", "nobody"))["requests"] == []
    assert "unknown_request" in await operator.says("explain", "never-heard-of", code=1)

    bus = await Bus.connect(stack.stack.admin, "test")
    try:
        subject = verb_subject("host-tier", "explain", host=stack.stack.settings.host, instance="0")
        payload = await bus.request(
            subject, msgspec.json.encode(ExplainRequest(request=request)), deadline_s=5.0
        )
    finally:
        await bus.close()
    [one] = explain_reply.decode(payload).requests
    assert one.reason in LEFT
    assert abs(one.ts_ms - time.time() * 1000) < 60_000
