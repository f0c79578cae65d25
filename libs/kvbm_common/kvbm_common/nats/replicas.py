"""Questions to any replica of a service: NATS gives each to one of them, which may hang or be busy.

The replica that was chosen is not given up: the others are asked beside it, and the first answer
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvbm_common.errors import KvbmError, RequestFailed

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
    that was busy is not asked twice. Raises as `Bus.request`, and what `by_name` raises. A refusal
    of a replica because of itself is raised when no other has answered.
    """
    assert 0 < patience_s <= deadline_s, f"{patience_s} s of {deadline_s} s"
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadline_s
    asked = [asyncio.create_task(bus.request(subject, payload, deadline_s=deadline_s))]
    try:
        await asyncio.wait(asked, timeout=patience_s)
        if asked[0].done() and not _is_busy(asked[0].exception()):
            return asked[0].result()
        named = await by_name()
        left_s = until_s - loop.time()
        # One that hangs has expired in the registry: a lone name is that of another one.
        if left_s > 0 and not (asked[0].done() and len(named) == 1):
            questions = (bus.request(one, payload, deadline_s=left_s) for one in named)
            asked += [asyncio.create_task(question) for question in questions]
        return await _first(asked)
    finally:
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
