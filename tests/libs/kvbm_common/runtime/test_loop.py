"""The loop between core and shell, with a core that records what it sees."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from kvbm_common.errors import DeadlineExceeded
from kvbm_common.runtime.fair_queue import FRESH_MAX
from kvbm_common.runtime.loop import (
    BURST_MAX,
    BURST_MS,
    LANE_TURN_NS,
    QUIET_TICK_MS,
    CoreLoop,
)
from kvbm_common.wire.bounds import Usage

from tests.waiting import wait_until

DEADLINE_S = 5.0


class Recorder:
    """Inputs are words; a word that ends in `!` has itself as effect."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.times: list[int] = []

    def step(self, event: str, now_ms: int, /) -> Sequence[str]:
        self.seen.append(event)
        self.times.append(now_ms)
        return [event] if event.endswith("!") else []


@asynccontextmanager
async def running(loop: CoreLoop[str, str]) -> AsyncIterator[None]:
    task = asyncio.create_task(loop.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def make(
    carry_out: Callable[[str], str | Awaitable[str | None] | None] = lambda effect: None,
    inbox_size: int = 4,
) -> tuple[Recorder, CoreLoop[str, str]]:
    core, turns = Recorder(), itertools.count(0, LANE_TURN_NS)
    loop = CoreLoop(
        core, carry_out, inbox_size=inbox_size, now_ms=lambda: 42, spent_ns=lambda: next(turns)
    )
    return core, loop


class Costly(Recorder):
    """A core whose inputs name the turns that they take: `loud 3` takes three."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_ns = 0

    def step(self, event: str, now_ms: int, /) -> Sequence[str]:
        self.spent_ns += round(float(event.split()[1].rstrip("!")) * LANE_TURN_NS)
        return super().step(event, now_ms)


def make_costly(
    carry_out: Callable[[str], str | Awaitable[str | None] | None] = lambda effect: None,
) -> tuple[Costly, CoreLoop[str, str]]:
    core = Costly()
    loop = CoreLoop(
        core, carry_out, inbox_size=100, now_ms=lambda: core.spent_ns // LANE_TURN_NS,
        spent_ns=lambda: core.spent_ns,
    )  # fmt: skip
    return core, loop


async def test_plain_effect_answers_at_once() -> None:
    """Goal: the result of a plain effect is the next input."""
    core, loop = make(lambda effect: "done")
    async with running(loop):
        await loop.offer("go!", deadline_s=DEADLINE_S)
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen == ["go!", "done"]
    assert core.times == [42, 42]


async def test_async_effect_completes_later() -> None:
    """Goal: other inputs are served while an effect is in flight, and its result comes back."""
    release = asyncio.Event()

    async def wait(effect: str) -> str:
        await release.wait()
        return "landed"

    core, loop = make(wait)
    async with running(loop):
        await loop.offer("slow!", deadline_s=DEADLINE_S)
        await loop.offer("other", deadline_s=DEADLINE_S)
        await wait_until(lambda: core.seen == ["slow!", "other"])
        assert loop.in_flight == 1
        with pytest.raises(DeadlineExceeded):
            await loop.wait_idle(deadline_s=0.01)
        release.set()
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen == ["slow!", "other", "landed"]


async def test_async_effect_without_result_ends_idle() -> None:
    """Goal: None is no input, and the loop still notices that it is idle."""

    async def quiet(effect: str) -> None: ...

    core, loop = make(quiet)
    async with running(loop):
        await loop.offer("go!", deadline_s=DEADLINE_S)
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen == ["go!"]


async def test_outsiders_wait_for_room_and_completions_do_not() -> None:
    """Goal: a full inbox refuses and holds back offers, never completions."""
    core, loop = make(inbox_size=2)
    assert loop.offer_nowait("1")
    assert loop.offer_nowait("2")
    assert not loop.offer_nowait("3")
    with pytest.raises(DeadlineExceeded):
        await loop.offer("3", deadline_s=0.01)
    loop.complete("completion")
    waiting = asyncio.create_task(loop.offer("3", deadline_s=DEADLINE_S))
    await asyncio.sleep(0)
    async with running(loop):
        await waiting
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen == ["completion", "1", "2", "3"]


async def test_ticks_arrive() -> None:
    core = Recorder()
    loop = CoreLoop[str, str](
        core, lambda effect: None, inbox_size=1, tick=lambda: "tick", tick_ms=5
    )
    async with running(loop):
        await wait_until(lambda: core.seen == ["tick", "tick", "tick"])


@pytest.mark.slow
async def test_a_quiet_core_has_few_ticks_until_something_waits() -> None:
    """Goal: a core that waits for nothing costs nothing, and one that does is not late."""
    quiet = True
    core = Recorder()
    loop = CoreLoop(
        core, lambda effect: None, inbox_size=4, tick=lambda: "tick", tick_ms=1,
        is_quiet=lambda: quiet,
    )  # fmt: skip
    async with running(loop):
        await wait_until(lambda: core.seen == ["tick"])
        started_s = asyncio.get_running_loop().time()
        await wait_until(lambda: core.seen == ["tick", "tick"])
        assert asyncio.get_running_loop().time() - started_s >= 0.9 * QUIET_TICK_MS / 1000
        quiet = False
        await loop.offer("work", deadline_s=DEADLINE_S)
        woken_s = asyncio.get_running_loop().time()
        await wait_until(lambda: core.seen.count("tick") > 4)
        assert asyncio.get_running_loop().time() - woken_s < QUIET_TICK_MS / 1000


async def test_unexpected_failure_ends_the_loop() -> None:
    """Goal: our mistakes are not swallowed."""

    async def broken(effect: str) -> None:
        raise ZeroDivisionError

    _, loop = make(broken)
    loop.offer_nowait("go!")
    with pytest.raises(ExceptionGroup) as caught:
        await loop.run()
    assert caught.value.subgroup(ZeroDivisionError)


async def test_long_bursts_leave_turns_to_others() -> None:
    """Goal: the event loop lives while a core feeds itself. Method: an effect without end."""
    core, loop = make(lambda effect: "again!")
    async with running(loop):
        await loop.offer("again!", deadline_s=DEADLINE_S)
        for _ in range(3):
            await asyncio.sleep(0)
        assert core.seen


async def test_slow_steps_leave_turns_to_others_after_a_few_milliseconds() -> None:
    """Goal: a core whose inputs are large batches does not keep an event loop for all that wait.

    Method: each look at the clock is a millisecond later; 50 inputs wait when the loop starts.
    """
    clock = iter(range(1_000_000))
    core = Recorder()
    loop: CoreLoop[str, str] = CoreLoop(
        core, lambda _: None, inbox_size=100, now_ms=lambda: next(clock)
    )
    for number in range(50):
        assert loop.offer_nowait(str(number))
    turns: list[int] = []

    async def other() -> None:
        while len(core.seen) < 50:
            turns.append(len(core.seen))
            await asyncio.sleep(0)

    async with running(loop):
        await other()
    longest = max(after - before for before, after in itertools.pairwise(turns))
    assert longest <= BURST_MS


async def test_a_step_that_takes_long_is_followed_by_a_turn_of_others() -> None:
    """Goal: two steps of 10 ms, one after the other, are no pause of 20 ms."""
    core, passed_ms = Recorder(), [0]

    class Slow:
        def step(self, event: str, now_ms: int, /) -> Sequence[str]:
            passed_ms[0] += 10
            return core.step(event, now_ms)

    loop: CoreLoop[str, str] = CoreLoop(
        Slow(), lambda _: None, inbox_size=100, now_ms=lambda: passed_ms[0]
    )
    for number in range(20):
        assert loop.offer_nowait(str(number))
    seen: list[int] = []
    async with running(loop):
        while len(core.seen) < 20:
            seen.append(len(core.seen))
            await asyncio.sleep(0)
    assert seen == list(range(20))


async def test_what_a_step_asks_for_leaves_before_the_next_step() -> None:
    """Goal: a request to another service does not wait for other inputs.

    Method: an effect that hands on to another task, as the NATS client does to the one that sends.
    """
    outbox: asyncio.Queue[str] = asyncio.Queue(1)
    sent: list[list[str]] = []

    async def ask(effect: str) -> None:
        await outbox.put(effect)

    async def send() -> None:
        while True:
            await outbox.get()
            sent.append(list(core.seen))

    core, loop = make(ask)
    sender = asyncio.create_task(send())
    for word in ("ask!", "1", "2", "3"):
        assert loop.offer_nowait(word)
    async with running(loop):
        await loop.wait_idle(deadline_s=DEADLINE_S)
    sender.cancel()
    assert sent == [["ask!"]]
    assert core.seen == ["ask!", "1", "2", "3"]


# --- turns and settling -------------------------------------------------------------------------


async def test_a_turn_takes_what_waits_at_once() -> None:
    """Goal: an input has its step in the turn of the event loop in which it came."""
    core, loop = make()
    async with running(loop):
        await asyncio.sleep(0)
        assert loop.hand_in("a")
        assert loop.hand_in("b")
        loop.turn_nowait()
        assert core.seen == ["a", "b"]
        await loop.wait_idle(deadline_s=DEADLINE_S)


async def test_no_turn_is_taken_before_run_or_after_it() -> None:
    """Goal: only a running loop owns its core; what was handed in waits."""
    core, loop = make()
    assert loop.hand_in("a")
    loop.turn_nowait()
    assert core.seen == []
    async with running(loop):
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert loop.hand_in("b")
    loop.turn_nowait()
    assert core.seen == ["a"]


async def test_inputs_beyond_the_inbox_are_refused_and_counted() -> None:
    """Goal: handing in is bounded like an offer."""
    _, loop = make(inbox_size=1)
    assert loop.hand_in("a")
    assert not loop.hand_in("b")
    assert loop.usage().dropped == 1


async def test_effects_in_flight_have_their_turns_before_the_next_step() -> None:
    """Goal: a turn that starts an async effect is followed by no other until that was begun."""
    begun: list[str] = []

    async def carry_out(effect: str) -> None:
        begun.append(effect)

    core, loop = make(carry_out)
    async with running(loop):
        await asyncio.sleep(0)
        loop.hand_in("go!")
        loop.turn_nowait()
        loop.hand_in("next")
        loop.turn_nowait()
        assert (core.seen, begun) == (["go!"], [])
        await loop.wait_idle(deadline_s=DEADLINE_S)
        assert (core.seen, begun) == (["go!", "next"], ["go!"])


async def test_a_core_settles_when_no_input_waits() -> None:
    """Goal: what no answer waits for is done after the last of the inputs, and carried out."""
    core, carried = Recorder(), list[str]()

    def settle() -> Sequence[str]:
        is_new = bool(core.seen) and core.seen[-1] != "settled"
        core.seen += ["settled"] * is_new
        return ["late!"] * is_new

    loop: CoreLoop[str, str] = CoreLoop(core, carried.append, inbox_size=4, settle=settle)
    async with running(loop):
        await loop.offer("a", deadline_s=DEADLINE_S)
        await loop.offer("b", deadline_s=DEADLINE_S)
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert (core.seen, carried) == (["a", "b", "settled"], ["late!"])


@pytest.mark.parametrize("words", [1, BURST_MAX])
async def test_a_core_settles_after_a_burst_that_was_as_long_as_it_may(words: int) -> None:
    """Goal: a burst beside `run` that ends by time or number, with no input left, is followed."""
    core, passed_ms, settled = Recorder(), [0], list[int]()

    class Slow:
        def step(self, event: str, now_ms: int, /) -> Sequence[str]:
            passed_ms[0] += 10 if words == 1 else 0
            return core.step(event, now_ms)

    def settle() -> Sequence[str]:
        settled.append(len(core.seen))
        return ()

    loop: CoreLoop[str, str] = CoreLoop(
        Slow(), lambda _: None, inbox_size=words, now_ms=lambda: passed_ms[0], settle=settle
    )
    async with running(loop):
        await asyncio.sleep(0)
        assert all(loop.hand_in(str(number)) for number in range(words))
        loop.turn_nowait()
        assert len(core.seen) == words
        await wait_until(lambda: settled[-1:] == [words], deadline_s=DEADLINE_S)


async def test_a_core_that_has_not_settled_is_not_idle() -> None:
    """Goal: who waits for a quiet core finds all done, also after a step that took long."""
    passed_ms = itertools.count(0, 10)
    core, settled = Recorder(), list[str]()

    def settle() -> Sequence[str]:
        settled.append("settled")
        return ()

    loop: CoreLoop[str, str] = CoreLoop(
        core, lambda effect: None, inbox_size=4, settle=settle, now_ms=lambda: next(passed_ms)
    )
    async with running(loop):
        await loop.offer("a", deadline_s=DEADLINE_S)
        await loop.wait_idle(deadline_s=DEADLINE_S)
        assert (core.seen, settled) == (["a"], ["settled"])


async def test_what_settling_completes_is_the_next_input() -> None:
    """Goal: an effect of `settle` that answers at once wakes the loop like any other."""
    core, late = Recorder(), ["late!"]

    def settle() -> Sequence[str]:
        return [late.pop()] if late and core.seen else []

    loop: CoreLoop[str, str] = CoreLoop(core, lambda effect: "done", inbox_size=4, settle=settle)
    async with running(loop):
        await loop.offer("a", deadline_s=DEADLINE_S)
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen == ["a", "done"]


async def test_a_flooded_lane_does_not_delay_another() -> None:
    """Goal: what comes last, in a lane of its own, waits for one step of the flood."""
    core, loop = make(inbox_size=20)
    for number in range(9):
        assert loop.offer_nowait(f"flood {number}", lane="loud")
    assert loop.hand_in("lookup", lane="quiet")
    async with running(loop):
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert core.seen.index("lookup") == 1
    flood = [one for one in core.seen if one != "lookup"]
    assert flood == [f"flood {number}" for number in range(9)]


async def test_a_lane_is_charged_for_the_time_of_its_steps() -> None:
    """Goal: small inputs of a quiet lane go together, and a large one costs its lane its turns.

    1. A release and a lookup are one turn. 2. An offer of three turns is followed by as much of
    the other lanes.
    """
    core, loop = make_costly()
    for number in range(3):
        loop.offer_nowait(f"offer 3 of {number}", lane="loud")
    for event in ("release 0.2", "lookup 0.5"):
        loop.offer_nowait(event, lane="quiet")
    for number in range(6):
        loop.offer_nowait(f"lease 1 of {number}", lane="peer")
    async with running(loop):
        await loop.wait_idle(deadline_s=DEADLINE_S)
    assert [event.split()[0] for event in core.seen] == [
        "offer", "release", "lookup", "lease", "lease", "lease",
        "offer", "lease", "lease", "lease", "offer",
    ]  # fmt: skip


async def test_lanes_that_come_without_end_delay_neither_completions_nor_others() -> None:
    """Goal: every kind of work has its turn beside a flood of questions of ever new engines.

    1. A lease and a completion wait. 2. With each turn of the event loop questions come, all of
    new lanes. 3. Both are served after few of them.
    """
    core, loop = make_costly()
    names = itertools.count()
    async with running(loop):
        await asyncio.sleep(0)
        loop.offer_nowait("lease 1 of 0", lane="peer")
        loop.offer_nowait("lease 1 of 1", lane="peer")
        loop.complete("pulled 1")
        while len(core.seen) < 20 * FRESH_MAX:
            for _ in range(2 * FRESH_MAX):
                loop.hand_in("lookup 1", lane=next(names))
            loop.turn_nowait()
            await asyncio.sleep(0)
    for event, bound in (("pulled 1", 2), ("lease 1 of 0", 3), ("lease 1 of 1", 4)):
        assert core.seen.index(event) <= bound * FRESH_MAX, core.seen.index(event)


async def test_a_lane_takes_half_of_the_queue_at_most() -> None:
    """Goal: others still find room, and the refusals are counted."""
    _, loop = make(inbox_size=4)
    taken = [loop.offer_nowait("flood", lane="loud") for _ in range(5)]
    assert taken == [True, True, False, False, False]
    assert loop.usage() == Usage(2, 4, 3)
    assert loop.hand_in("lookup", lane="quiet")
    assert loop.offer_nowait("nameless")
    assert not loop.offer_nowait("one more")
