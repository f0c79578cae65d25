"""The scrubber: idle blocks are read in turn; what differs is discarded, what has left is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from kvbm_common.wire.admin import RemoveRequest
from kvbm_common.wire.events import Removed
from kvbm_host_tier.core.messages import AdminAsked, AskFill, Effect, StartPull
from kvbm_host_tier.core.scrub import BATCH_BLOCKS_MAX, EMPTY_MS, FAILED_MS, STEP_US
from kvbm_host_tier.core.scrub_messages import ScrubDone, ScrubFailed, ScrubFound, ScrubSlots

from tests.services.host_tier.helpers import Host, name, numbers, of

CPU_US = 1_000
PAUSE_MS = -(-99 * (CPU_US + STEP_US) // 1000)
"""What follows a batch of this cost at 1 % of a core."""


def host_of(**limits: float) -> Host:
    """A host tier that scrubs, at 1 % unless told otherwise."""
    return Host(**({"scrub_cpu_percent": 1.0} | limits))  # type: ignore[arg-type]


def reading(effects: Sequence[Effect]) -> list[int]:
    """The blocks of the one batch that is to be read; empty: there is none."""
    return [int.from_bytes(b.hash, "big") for s in of(effects, ScrubSlots) for b in s.blocks]


def done(host: Host, *wrong: int, cpu_us: int = CPU_US) -> list[Effect]:
    """The batch was read; those at these indices differ."""
    return host.step(ScrubDone(wrong, cpu_us))


def count(host: Host, key: str) -> int:
    """One counter."""
    return host.core.view.counts[key]


def is_quiet(host: Host) -> bool:
    """Whether ticks may come seldom."""
    return host.core.view.is_quiet


def test_idle_blocks_are_read_in_turn() -> None:
    """1. All idle blocks in one batch. 2. After a pause, which follows its cost, round again."""
    host = host_of()
    host.store(1, 2, 3)
    [scrub] = of(host.wait(1), ScrubSlots)
    assert scrub.path == "/arena"
    assert [host.slot_of(n) for n in (1, 2, 3)] == list(scrub.slots)
    assert reading(host.wait(10_000)) == []  # One batch at a time.
    done(host)
    assert count(host, "scrubbed_blocks") == 3
    assert reading(host.wait(PAUSE_MS - 1)) == []
    assert reading(host.wait(1)) == [1, 2, 3]
    assert count(host, "scrub_corrupt_blocks") == 0


def test_a_round_that_ends_early_is_followed_by_a_rest() -> None:
    """1. All slots are read once. 2. Nothing is read until the next round is due, and no tick is
    asked for. 3. What was stored meanwhile is read then, each round once."""
    host = host_of(scrub_round_ms=60_000)
    host.store(1, 2)
    assert reading(host.wait(1)) == [1, 2]
    done(host)
    assert not is_quiet(host)
    assert reading(host.wait(PAUSE_MS)) == []
    assert is_quiet(host)
    host.store(3)
    assert reading(host.wait(60_000 - PAUSE_MS - 1)) == []
    assert reading(host.wait(1)) == [1, 2, 3]
    done(host)
    assert reading(host.wait(59_999)) == []
    assert reading(host.wait(1)) == [1, 2, 3]
    assert count(host, "scrub_rounds") == 3


@pytest.mark.parametrize(("percent", "pause_ms"), [(1.0, 149), (2.0, 74), (100.0, 1)])
def test_the_pause_follows_the_cost(percent: float, pause_ms: int) -> None:
    """1 ms of reading and 0.5 ms of steps: so much of one core, and no more."""
    host = host_of(scrub_cpu_percent=percent)
    host.store(1)
    host.wait(1)
    done(host)
    assert reading(host.wait(pause_ms - 1)) == []
    assert reading(host.wait(1)) == [1]


def test_a_batch_is_bounded() -> None:
    """More idle blocks than a batch has: the next batch goes on where it ended."""
    host = host_of(slots=BATCH_BLOCKS_MAX + 2)
    host.store(*range(1, BATCH_BLOCKS_MAX + 3))
    assert reading(host.wait(1)) == list(range(1, BATCH_BLOCKS_MAX + 1))
    done(host)
    assert reading(host.wait(PAUSE_MS))[:3] == [BATCH_BLOCKS_MAX + 1, BATCH_BLOCKS_MAX + 2, 1]
    assert count(host, "scrub_rounds") == 1


def test_it_is_off_at_zero_percent() -> None:
    """Nothing is read."""
    host = host_of(scrub_cpu_percent=0.0)
    host.store(1)
    assert reading(host.wait(10_000)) == []


def test_an_empty_arena_is_looked_at_after_a_pause() -> None:
    """Nothing is idle: the scan is not repeated with each tick."""
    host = host_of()
    assert reading(host.wait(1)) == []
    host.store(1)
    assert reading(host.wait(EMPTY_MS - 1)) == []
    assert reading(host.wait(1)) == [1]


# --- what differs -----------------------------------------------------------------------------


def test_corrupt_blocks_are_counted_from_zero() -> None:
    """Goal: the alert sees the first one; a series that is born at 1 shows no increase."""
    assert host_of().core.view.counts["evictions.corrupt"] == 0


def test_a_block_that_differs_is_discarded() -> None:
    """It is announced as removed, counted, said, and found no more; the others stay."""
    host = host_of()
    host.store(1, 2, 3)
    host.wait(1)
    effects = done(host, 1)
    assert of(effects, ScrubFound) == [ScrubFound((name(2),))]
    last = host.events[-1]
    assert isinstance(last, Removed)
    assert (numbers(last.hashes), last.reason) == ([2], "corrupt")
    assert host.announced == {1, 3}
    assert host.found(host.look_up(1, 2)).slots == [host.slot_of(1)]
    assert count(host, "scrub_corrupt_blocks") == count(host, "evictions.corrupt") == 1
    assert "the scrubber found other bytes" in "\n".join(host.core.story(name(2)))


def test_a_block_that_was_pinned_meanwhile_is_discarded() -> None:
    """Its reader ends undisturbed, and verifies what it has read; no other one finds the block."""
    host = host_of()
    host.store(1)
    host.wait(1)
    found = host.found(host.look_up(1))
    done(host, 0)
    assert host.slot_of(1) is None
    assert host.slots["active"] == 1
    host.release(found.lease)
    assert host.slots["active"] == 0


def test_what_has_left_meanwhile_is_no_mismatch() -> None:
    """1. Block 1 is evicted, and its slot holds block 9. 2. Block 2 is evicted: an empty slot."""
    host = host_of(slots=2)
    host.store(1, 2)
    assert reading(host.wait(1)) == [1, 2]
    remove = RemoveRequest(hashes=[name(2).hex(), name(1).hex()])
    host.step(AdminAsked(1, "evict", remove))
    host.store(9)
    effects = done(host, 0, 1)
    assert of(effects, ScrubFound) == []
    assert host.announced == {9}
    assert count(host, "scrub_corrupt_blocks") == 0


def test_a_block_that_came_again_into_its_slot_is_another_one() -> None:
    """Goal: the generation is compared, not the name and the slot alone."""
    host = host_of(slots=1)
    host.store(1)
    slot = host.slot_of(1)
    host.wait(1)
    host.step(AdminAsked(1, "evict", RemoveRequest(hashes=[name(1).hex()])))
    host.store(1)
    assert host.slot_of(1) == slot
    done(host, 0)
    assert host.announced == {1}


# --- beside transfers -------------------------------------------------------------------------


def test_it_pauses_while_transfers_are_in_flight() -> None:
    """1. A pull. 2. A lease of an engine. 3. A fill. When all have ended it goes on."""
    host = host_of()
    host.store(1)
    [pull] = of(host.offer(2, offer=70), StartPull)
    assert reading(host.wait(1)) == []
    host.pulled(pull)
    found = host.found(host.look_up(1))
    assert reading(host.wait(1)) == []
    host.release(found.lease)
    host.disk_stored(3)
    [fill] = of(host.look_up(3, lease_ms=10), AskFill)
    assert reading(host.wait(1)) == []
    host.filled(fill, 3)
    assert reading(host.wait(1)) == [1]


def test_an_arena_that_cannot_be_read_is_tried_again_later() -> None:
    """It is counted, and nothing is taken for wrong."""
    host = host_of()
    host.store(1)
    host.wait(1)
    host.step(ScrubFailed("arena_unavailable"))
    assert count(host, "dropped.scrub_arena_unavailable") == 1
    host.beat()
    host.now_ms += FAILED_MS - 1
    host.beat()
    assert reading(host.wait(0)) == []
    assert reading(host.wait(1)) == [1]


# --- any order --------------------------------------------------------------------------------


class Scrubbing(RuleBasedStateMachine):
    """Blocks come and go while they are read. What is discarded had been there, and wrong, all the
    time; `Host.step` checks every invariant and what is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.host = host_of(slots=3)
        self.lives: dict[int, int] = {}
        """Block → how often it was stored."""
        self.read: list[tuple[int, int]] | None = None
        """The blocks of the batch that is being read, in which of their lives."""

    @rule(number=st.integers(1, 5))
    def store(self, number: int) -> None:
        if self.host.slot_of(number) is None:
            self.host.store(number)
            self.lives[number] = self.lives.get(number, 0) + 1

    @rule(number=st.integers(1, 5))
    def evict(self, number: int) -> None:
        self.host.step(AdminAsked(1, "evict", RemoveRequest(hashes=[name(number).hex()])))

    @rule(ms=st.sampled_from([1, 100, 300]))
    def wait(self, ms: int) -> None:
        self.host.beat()
        effects = self.host.wait(ms)
        assert self.read is None or not of(effects, ScrubSlots)
        if of(effects, ScrubSlots):
            self.read = [(number, self.lives[number]) for number in reading(effects)]

    @precondition(lambda self: self.read is not None)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assert self.read is not None
        wrong = data.draw(st.sets(st.integers(0, len(self.read) - 1)))
        bad = [self.read[index] for index in sorted(wrong)]
        before = set(self.host.announced)
        expected = {n for n, life in bad if n in before and self.lives[n] == life}
        self.read = None
        effects = done(self.host, *sorted(wrong))
        assert before - self.host.announced == expected
        told = [int.from_bytes(one, "big") for s in of(effects, ScrubFound) for one in s.names]
        assert set(told) == expected


Scrubbing.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestScrubbing = Scrubbing.TestCase
