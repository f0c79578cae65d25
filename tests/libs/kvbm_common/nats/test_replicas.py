"""Questions to any replica: one that hangs or is busy does not answer for the others."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kvbm_common.errors import (
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    NotPermitted,
    RequestFailed,
)
from kvbm_common.nats.replicas import ask_any

GROUP = "any"
HANGS = DeadlineExceeded("no answer")
"""A replica that says nothing until the deadline."""


class Replicas:
    """What is said on each subject, and what was asked."""

    def __init__(self, **said: bytes | KvbmError) -> None:
        self._said = said
        self.asked: list[str] = []

    async def request(self, subject: str, _payload: bytes, *, deadline_s: float) -> bytes:
        """Answer as a bus does."""
        self.asked.append(subject)
        answer = self._said[subject]
        if answer is HANGS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), deadline_s)
        if isinstance(answer, KvbmError):
            raise answer
        return answer

    async def ask(self, *by_name: str, deadline_s: float = 5.0) -> bytes:
        """Ask any replica."""

        async def named() -> list[str]:
            return list(by_name)

        return await ask_any(
            self, GROUP, b"", by_name=named, patience_s=0.01, deadline_s=deadline_s
        )


def refusal(code: str) -> RequestFailed:
    """A replica that refuses."""
    return RequestFailed(code, "not now")


async def test_a_replica_that_answers_is_the_only_one_asked() -> None:
    """As always: nothing is asked by name."""
    replicas = Replicas(any=b"yes")
    assert await replicas.ask("a", "b") == b"yes"
    assert replicas.asked == [GROUP]


@pytest.mark.parametrize("first", [HANGS, refusal("busy"), refusal("not_ready")])
async def test_another_replica_answers_for_one_that_cannot(first: KvbmError) -> None:
    """The same replica is asked by name too, and is as silent; one may not be asked, or is gone."""
    gone, denied = NoResponder("gone"), NotPermitted("no")
    replicas = Replicas(any=first, a=first, b=gone, c=denied, d=b"yes")
    async with asyncio.timeout(4.0):
        assert await replicas.ask("a", "b", "c", "d") == b"yes"


async def test_the_only_name_is_another_one_where_the_first_is_silent() -> None:
    """A replica that hangs expires in the registry, and NATS still gives it questions."""
    assert await Replicas(any=HANGS, b=b"yes").ask("b") == b"yes"


@pytest.mark.parametrize("code", ["busy", "bad_request"])
async def test_a_lone_replica_that_refuses_is_asked_once(code: str) -> None:
    """It would refuse again."""
    replicas = Replicas(any=refusal(code), a=b"")
    with pytest.raises(RequestFailed) as raised:
        await replicas.ask("a")
    assert (raised.value.code, replicas.asked) == (code, [GROUP])


async def test_a_refusal_of_the_question_is_the_answer() -> None:
    """Each would refuse it: by the first, or by one that was asked for a silent one."""
    bad = refusal("bad_request")
    for replicas in (Replicas(any=bad), Replicas(any=HANGS, a=bad, b=HANGS)):
        with pytest.raises(RequestFailed) as raised:
            await replicas.ask("a", "b")
        assert raised.value.code == "bad_request"


@pytest.mark.parametrize(
    ("first", "named", "expected"),
    [(HANGS, HANGS, DeadlineExceeded), (HANGS, refusal("busy"), RequestFailed),
     (NoResponder("none"), b"", NoResponder)],
)  # fmt: skip
async def test_without_an_answer_it_is_said_why(
    first: KvbmError, named: bytes | KvbmError, expected: type[KvbmError]
) -> None:
    """Within the deadline. A refusal says more than silence."""
    with pytest.raises(expected):
        await Replicas(any=first, a=named, b=named).ask("a", "b", deadline_s=0.05)
