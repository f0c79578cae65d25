"""What happens to the stack of a soak, drawn from its seed, one thing after the other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

import msgspec
from kvbm_cli.stack import NATS, Stack
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.admin import (
    PolicyRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.verbs import StatsReply, verb_subject

from tests.small_tmpfs import fill
from tests.soak.surroundings import Surroundings
from tests.soak.traffic import Traffic
from tests.waiting import ask_until

KILLS_END = 0.5
"""Services are killed in the first part of the faults: the lives that follow are judged."""
SPACING_S = 6.0
FREEZE_S = 7.0
"""Longer than the registry's time to live, and than an engine may be silent."""
SLEEP_S = 120.0
"""As long as a machine that slept: every lease and every time to live is over."""
SLEEP_FROM_S = 400.0
"""In shorter faults no machine sleeps: it would be most of them."""
FULL_S = 4.0
STALLED_S = 8.0
"""Of a bucket that answers nothing: longer than a request to it may take."""
CLOCK_S = 3_600
OFTEN = ("nats", "policy", "clock", "resize", "reset", "nats", "freeze", "full disk", "bucket")
"""What happens beside the kills, in an order of its own each round."""
TIERS = ("host-tier", "disk-tier")
Reply = TypeVar("Reply", RemoveReply, ResizeReply, StatsReply)


def plan(seed: int, services: tuple[str, ...], *, seconds: float) -> list[tuple[float, str]]:
    """Return what happens when, in seconds from the beginning of the faults.

    When the kills have ended, the machine sleeps; the faults of that time are left out. In a short
    run every other fault is then the end of NATS: what a reconnection leaks is to be seen.
    """
    rng = random.Random(seed)
    kills, others = _rounds(rng, services), _rounds(rng, OFTEN)
    found: list[tuple[float, str]] = []
    for number in range(int(seconds / SPACING_S)):
        at_s = (number + rng.random() * 0.5) * SPACING_S
        if at_s < KILLS_END * seconds:
            what = f"kill {next(kills)}" if number % 3 != 2 else next(others)
        elif seconds < SLEEP_FROM_S and number % 2:
            what = "nats"
        else:
            what = next(others)
        found.append((at_s, what))
    if seconds >= SLEEP_FROM_S:
        found.append((KILLS_END * seconds, "sleep"))
    return sorted(found)


def _rounds(rng: random.Random, of: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from rng.sample(of, len(of))


class NotHere(KvbmError):
    """This soak has nothing that the fault could hit."""

    code = "not_here"


class Faults:
    """Carries a plan out on a stack."""

    def __init__(
        self, stack: Stack, bus: Bus, traffic: Traffic, *, seed: int, around: Surroundings
    ) -> None:
        self.done: Counter[str] = Counter()
        self.log: list[tuple[float, str]] = []
        self.returns = 0
        """Times that NATS came back."""
        self._stack, self._bus, self._traffic = stack, bus, traffic
        self._rng = random.Random(seed)
        self._around = around
        self._capacity: dict[str, int] = {}
        self._ways: Mapping[str, Callable[[], Awaitable[None]]] = {
            "policy": self._change_policy,
            "resize": self._resize,
            "reset": self._reset,
            "freeze": self._freeze,
            "sleep": functools.partial(self._freeze, SLEEP_S),
            "full disk": self._fill_disk,
            "nats": self._kill_nats,
            "clock": self._set_clock,
            "bucket": self._stall_bucket,
        }

    @property
    def has_bucket(self) -> bool:
        """Return whether the object tier has a bucket's server, and no directory."""
        return self._around.s3 is not None

    async def run(self, planned: list[tuple[float, str]]) -> None:
        """Let everything happen at its time; what is too late is left out."""
        began_s = time.monotonic()
        for at_s, what in planned:
            ahead_s = began_s + at_s - time.monotonic()
            if ahead_s < -SPACING_S:
                continue
            await asyncio.sleep(max(0.0, ahead_s))
            self.log.append((time.monotonic(), what))
            try:
                if what.startswith("kill "):
                    await self._kill(what.removeprefix("kill "))
                else:
                    await self._ways[what]()
                self.done[what] += 1
            except KvbmError as error:
                self.done[f"{what}: {error.code}"] += 1

    async def undo(self) -> None:
        """Have clock, policy and size as they were at the beginning."""
        self._around.clock.step(-self._around.clock.offset_s)
        refused: list[str] = []

        async def undone() -> bool:
            refused.clear()
            for tier in TIERS:
                try:
                    await self._ask(tier, "policy", PolicyRequest(policy="lru", actor="soak"))
                    if tier in self._capacity:
                        await self._resize_to(tier, self._capacity[tier])
                except KvbmError as error:
                    refused.append(f"{tier}: {error}")
            return not refused

        try:
            await ask_until(undone, deadline_s=60.0, poll_s=1.0)
        except TimeoutError:
            raise AssertionError(f"policy and size stay: {refused}") from None

    async def _kill(self, name: str) -> None:
        """End a service, half of the times in order, and start it again."""
        if self._rng.random() < 0.5:
            await self._stack.kill(name)
        else:
            await self._stack.services[name].end(signal.SIGTERM, deadline_s=5.0)
        await self._stack.start(name)
        await self._stack.wait_ready(name, deadline_s=60.0)

    async def _kill_nats(self) -> None:
        await self._stack.kill(NATS)
        await self._stack.start(NATS)
        async with asyncio.timeout(30.0):
            await self._bus.wait_connected()
        self.returns += 1

    async def _change_policy(self) -> None:
        policy = self._rng.choice(("lru", "lfu", "prefix", "adaptive"))
        await self._ask(self._rng.choice(TIERS), "policy", PolicyRequest(policy=policy))

    async def _resize(self) -> None:
        """Make a tier smaller, then as large as it was."""
        tier = self._rng.choice(TIERS)
        slots = (await self._ask(tier, "stats", None, StatsReply)).slots
        total = slots["total"] + slots.get("retired", 0)
        self._capacity[tier] = total
        await self._resize_to(tier, max(1, int(total * self._rng.uniform(0.3, 0.8))))
        await self._resize_to(tier, total)

    async def _resize_to(self, tier: str, slots: int) -> None:
        for _ in range(100):
            request = ResizeRequest(slots=slots, actor="soak")
            if not (await self._ask(tier, "resize", request, ResizeReply)).more:
                return

    async def _reset(self) -> None:
        tier = self._rng.choice(TIERS)
        for _ in range(100):
            request = RemoveRequest(everything=True, actor="soak")
            if not (await self._ask(tier, "reset", request, RemoveReply)).more:
                return

    async def _freeze(self, seconds: float = FREEZE_S) -> None:
        """Stop every process of the stack and every resident engine for a while."""
        pids = list(self._stack.pids.values())
        pids += [engine.pid for engine in self._traffic.residents if engine.pid]
        await _stop(pids, seconds)

    async def _fill_disk(self) -> None:
        """Fill the disk's file system, and have the disk tier start on it meanwhile."""
        if self._around.small_disk is None:
            raise NotHere("mounting is not permitted")
        filler = fill(self._around.small_disk)
        try:
            await self._kill("disk-tier")
            await asyncio.sleep(FULL_S)
        finally:
            filler.unlink()

    async def _set_clock(self) -> None:
        """Set the wall clock by an hour, or set it right again."""
        clock = self._around.clock
        clock.step(-clock.offset_s or self._rng.choice((-CLOCK_S, CLOCK_S)))

    async def _stall_bucket(self) -> None:
        """Have the bucket's server answer nothing for a while."""
        if self._around.s3 is None:
            raise NotHere("hosts share a directory")
        await _stop([self._around.s3.pid], STALLED_S)

    async def _ask(
        self, kind: str, verb: str, request: msgspec.Struct | None, reply: type[Reply] | None = None
    ) -> Reply:
        settings = self._stack.settings
        subject = verb_subject(kind, verb, host=settings.host, instance=settings.instance)
        payload = msgspec.json.encode(request) if request is not None else b"{}"
        answer = await self._bus.request(subject, payload, deadline_s=5.0)
        return msgspec.json.decode(answer, type=reply or dict)  # type: ignore[return-value]


async def _stop(pids: list[int], seconds: float) -> None:
    """Stop processes for a while."""
    _signal(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
