"""Fills that come before their arena is known: they ask for it, wait for the answer, and no longer.

The arena of the new life has the epoch after that of the known one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from kvbm_disk_tier.core.effects import Answer, AskArena, Effect, ReadSlots
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import ArenaFailed, ArenaKnown, HostJoined, Input

from tests.services.disk_tier.helpers import HOST_EPOCH, Disk, arena, of, one, refusal

NEW_EPOCH = HOST_EPOCH + 1
CUT = ArenaKnown(arena(epoch=NEW_EPOCH))
UNCUT = ArenaKnown(arena(epoch=NEW_EPOCH, slot_bytes=0))
FAILED = ArenaFailed("0")


def restarted(answer: Input | None, *, limits: DiskTierLimits | None = None) -> Disk:
    """Return a disk with block 1 below a host tier in a new life, after the first answer."""
    disk = Disk(limits=limits)
    disk.store(1)
    assert of(disk.step(HostJoined("0", NEW_EPOCH)), AskArena)
    if answer is not None:
        disk.step(answer)
    return disk


def fill(disk: Disk) -> list[Effect]:
    """Ask for block 1 in the new arena."""
    return disk.fill(1, epoch=NEW_EPOCH)


@pytest.mark.parametrize("answer", [UNCUT, FAILED])
def test_a_fill_asks_for_its_arena_and_is_read_when_that_is_known(answer: Input) -> None:
    disk = restarted(answer)
    assert fill(disk) == [AskArena("0")]
    assert not disk.core.view.idle()
    assert disk.core.view.statistics().figures["reads"] == 1
    assert one(disk.step(CUT), ReadSlots).epoch == NEW_EPOCH


def test_an_answer_from_before_the_cut_is_followed_by_another_question() -> None:
    disk = restarted(None)
    assert fill(disk) == [], "the arena is being asked for"
    assert disk.step(UNCUT) == [AskArena("0")]
    assert one(disk.step(CUT), ReadSlots).epoch == NEW_EPOCH


@pytest.mark.parametrize("answers", [[FAILED], [UNCUT], [ArenaKnown(arena(epoch=NEW_EPOCH + 1))]])
def test_an_answer_without_the_arena_ends_the_wait(answers: Sequence[Input]) -> None:
    """A fill may name what will never be: the questions for it end."""
    disk = restarted(UNCUT)
    assert fill(disk) == [AskArena("0")]
    effects = [effect for answer in answers for effect in disk.step(answer)]
    assert refusal(effects) == "stale_arena"
    assert not of(effects, AskArena)
    assert disk.counts["dropped.fill_stale_arena"] == 1
    assert disk.core.view.idle()


def test_a_fill_whose_arena_comes_after_its_deadline_is_refused() -> None:
    disk = restarted(UNCUT)
    disk.fill(1, epoch=NEW_EPOCH, until_ms=disk.now_ms + 5)
    disk.now_ms += 5
    assert refusal(disk.step(CUT)) == "too_late"


@pytest.mark.parametrize("answer", [None, UNCUT])
def test_a_fill_whose_arena_does_not_come_waits_until_its_deadline(answer: Input | None) -> None:
    """The question is open, and stays so."""
    disk = restarted(answer)
    disk.fill(1, epoch=NEW_EPOCH, until_ms=disk.now_ms + 5)
    assert disk.wait(4) == []
    assert refusal(disk.wait(1)) == "stale_arena"
    assert disk.core.view.statistics().figures["reads"] == 0


def test_early_fills_have_the_limit_of_all_that_wait() -> None:
    disk = restarted(UNCUT, limits=DiskTierLimits(reads_waiting_max=1))
    fill(disk)
    assert refusal(fill(disk)) == "busy"


def test_early_fills_are_refused_by_a_tier_that_stops() -> None:
    disk = restarted(UNCUT)
    fill(disk)
    disk.took(disk.core.stop())
    assert refusal(disk.wait(1_000)) == "stopping"
    assert refusal(fill(disk)) == "stopping"


def test_a_known_arena_of_an_older_life_is_asked_for_again() -> None:
    """The registry has said that it is old, and the first question found no one."""
    disk = restarted(FAILED)
    assert of(disk.wait(1_000), AskArena) == [AskArena("0")]


def test_the_answer_of_another_host_tier_ends_no_wait() -> None:
    disk = restarted(UNCUT)
    assert of(disk.step(HostJoined("1", 99)), AskArena) == [AskArena("1")]
    fill(disk)
    other = msgspec.structs.replace(arena(epoch=99), instance="1", path="/other")
    assert not of(disk.step(ArenaKnown(other)), Answer)
    assert one(disk.step(CUT), ReadSlots).epoch == NEW_EPOCH
