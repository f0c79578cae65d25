"""Questions to any replica: one that hangs or is busy does not answer for the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import pytest
from kvbm_common.errors import (
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    NotPermitted,
    RegistryUnavailable,
    RequestFailed,
)
from kvbm_common.nats.replicas import ask_any

GROUP = "any"
HANGS = DeadlineExceeded("no answer")
"""A replica that says nothing until the deadline."""
SLOW = b"at last"
"""The answer of a replica that gives it only when the names are being looked up."""


class Replicas:
    """What is said on each subject, and what was asked."""

    def __init__(self, **said: bytes | KvbmError) -> None:
        self._said = said
        self.asked: list[str] = []
        self.looked_up = asyncio.Event()

    async def request(self, subject: str, _payload: bytes, *, deadline_s: float) -> bytes:
        """Answer as a bus does."""
        self.asked.append(subject)
        answer = self._said[subject]
        if answer is HANGS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), deadline_s)
        if answer is SLOW:
            await asyncio.wait_for(self.looked_up.wait(), deadline_s)
        if isinstance(answer, KvbmError):
            raise answer
        return answer

    async def ask(self, *by_name: str, deadline_s: float = 5.0) -> bytes:
        """Ask any replica."""

        async def named() -> list[str]:
            return list(by_name)

        return await self.ask_as(named, deadline_s=deadline_s)

    async def ask_as(
        self, by_name: Callable[[], Awaitable[Sequence[str]]], *, deadline_s: float = 5.0
    ) -> bytes:
        """Ask any replica, with names that are looked up so."""
        return await ask_any(
            self, GROUP, b"", by_name=by_name, patience_s=0.01, deadline_s=deadline_s
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


@pytest.mark.parametrize("is_down", [False, True], ids=["the registry hangs", "it is down"])
async def test_the_first_replica_may_answer_while_names_are_looked_up(is_down: bool) -> None:
    """Goal: a lookup is as fast as its replica, and fails no more often, whatever the registry."""
    replicas = Replicas(any=SLOW)
    ended: list[str] = []

    async def look_up() -> list[str]:
        replicas.looked_up.set()
        if is_down:
            raise RegistryUnavailable("no answer")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("look-up")
        raise AssertionError("it waits until it is cancelled")

    async with asyncio.timeout(4.0):
        assert await replicas.ask_as(look_up) == SLOW
    assert ended == ([] if is_down else ["look-up"])


@pytest.mark.parametrize(
    ("first", "expected"), [(refusal("busy"), "busy"), (HANGS, "registry_unavailable")]
)
async def test_a_refusal_says_more_than_a_registry_that_is_down(
    first: KvbmError, expected: str
) -> None:
    """Nothing else is known of the replicas then."""

    async def look_up() -> list[str]:
        raise RegistryUnavailable("no answer")

    with pytest.raises(KvbmError) as raised:
        await Replicas(any=first).ask_as(look_up, deadline_s=0.05)
    assert raised.value.code == expected


async def test_names_that_do_not_come_end_with_the_deadline() -> None:
    """Also where the first replica has said that it is busy."""

    async def look_up() -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError("it waits until it is cancelled")

    async with asyncio.timeout(4.0):
        with pytest.raises(RequestFailed, match="busy"):
            await Replicas(any=refusal("busy")).ask_as(look_up, deadline_s=0.05)


async def test_without_names_the_first_replica_decides() -> None:
    """Goal: a registry that lists none takes nothing from the one that works on the answer."""
    replicas = Replicas(any=SLOW)

    async def look_up() -> list[str]:
        replicas.looked_up.set()
        return []

    assert await replicas.ask_as(look_up) == SLOW
    with pytest.raises(RequestFailed, match="busy"):
        await Replicas(any=refusal("busy")).ask()
