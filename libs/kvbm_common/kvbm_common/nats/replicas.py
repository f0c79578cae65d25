"""Questions to any replica of a service: NATS gives each to one of them, which may hang or be busy.

The replica that was chosen is not given up: the others are asked beside it, and the first answer
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvbm_common.errors import DeadlineExceeded, KvbmError, RequestFailed

OF_ONE_REPLICA = frozenset({"busy", "not_ready"})
"""Refusals that say nothing of the question: another replica may answer it."""


class Asks(Protocol):
    """The part of the bus that is needed here."""

    async def request(self, subject: str, payload: bytes, *, deadline_s: float) -> bytes:
        """Ask and wait for the answer; see `Bus.request`."""


async def ask_any(
    bus: Asks,
    subject: str,
    payload: bytes,
    *,
    by_name: Callable[[], Awaitable[Sequence[str]]],
    patience_s: float,
    deadline_s: float,
) -> bytes:
    """Ask one replica; after `patience_s`, or if it is busy, ask the others too.

    `subject` is of any replica. `by_name` gives the subjects of the replicas themselves: one alone
    that was busy is not asked twice. The first replica may answer while the names are looked up.
    Raises as `Bus.request`, and what `by_name` raises where no replica refuses. A refusal of a
    replica because of itself is raised when no other has answered.
    """
    assert 0 < patience_s <= deadline_s, f"{patience_s} s of {deadline_s} s"
    until_s = asyncio.get_running_loop().time() + deadline_s
    first = asyncio.create_task(bus.request(subject, payload, deadline_s=deadline_s))
    asked = [first]
    try:
        await asyncio.wait(asked, timeout=patience_s)
        if first.done() and not _is_busy(first.exception()):
            return first.result()
        others = _ask_named(bus, payload, first, by_name=by_name, until_s=until_s)
        asked.append(asyncio.create_task(others))
        return await _first(asked)
    finally:
        await _end(asked)


async def _ask_named(
    bus: Asks,
    payload: bytes,
    first: asyncio.Task[bytes],
    *,
    by_name: Callable[[], Awaitable[Sequence[str]]],
    until_s: float,
) -> bytes:
    """Ask the replicas by their names, at once; where that is no use, the first one decides."""
    try:
        async with asyncio.timeout_at(until_s):
            named = await by_name()
    except TimeoutError as error:
        raise DeadlineExceeded("the names of the replicas did not come") from error
    left_s = until_s - asyncio.get_running_loop().time()
    # One that hangs has expired in the registry: a lone name is that of another one.
    if not named or left_s <= 0 or (first.done() and len(named) == 1):
        return await first
    questions = (bus.request(one, payload, deadline_s=left_s) for one in named)
    asked = [asyncio.create_task(question) for question in questions]
    try:
        return await _first(asked)
    finally:
        await _end(asked)


async def _end(asked: Sequence[asyncio.Task[bytes]]) -> None:
    """Give up the questions that are not answered."""
    for question in asked:
        question.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def _first(asked: Sequence[asyncio.Task[bytes]]) -> bytes:
    """Return the first answer, or raise a refusal of the question, or why there was none."""
    failure: KvbmError | None = None
    for answer in asyncio.as_completed(asked):
        try:
            return await answer
        except KvbmError as error:
            is_refusal = isinstance(error, RequestFailed)
            if is_refusal and not _is_busy(error):
                raise
            if failure is None or is_refusal:
                failure = error
    assert failure is not None, "no replica was asked"
    raise failure


def _is_busy(error: BaseException | None) -> bool:
    """Tell whether a replica has refused because of itself: another one may answer."""
    return isinstance(error, RequestFailed) and error.code in OF_ONE_REPLICA
