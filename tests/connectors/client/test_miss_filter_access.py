"""Access to a miss filter: what is mapped answers, what cannot be mapped is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.memory.arena import Arena
from kvbm_common.memory.miss_filter import FilterState, MissFilter, make_file, owner_of
from kvbm_common.wire.local import Welcome
from kvbm_connectors.client.miss_filter_access import MissFilterAccess

from tests.connectors.endpoints import welcome
from tests.connectors.helpers import EPOCH, name

HERE, GONE = [name(1)], [name(2)]


class Filters:
    """The filters of one host tier."""

    def __init__(self, directory: Path) -> None:
        self.arena = str(directory / "arena")
        Path(self.arena).touch()
        self._files: list[Arena] = []

    def make(self, generation: int = 1, *, epoch: int = EPOCH) -> MissFilter:
        """Make an open filter that has block 1."""
        file = make_file(self.arena, generation, 64)
        self._files.append(file)
        owner = owner_of("h", "host-tier-0")
        made = MissFilter(file.view(0, file.bytes), owner=owner, epoch=epoch)
        made.change(HERE, ())
        made.switch(FilterState.COMPLETE)
        return made

    def welcome(self, generation: int = 1, **changes: str) -> Welcome:
        """Return a welcome that names a filter."""
        return welcome(EPOCH, arena_path=self.arena, filter=generation, **changes)

    def close(self) -> None:
        """Unlink all files."""
        for file in self._files:
            file.close()


@pytest.fixture
def filters(tmp_path: Path) -> Iterator[Filters]:
    made = Filters(tmp_path)
    yield made
    made.close()


def test_the_filter_of_the_welcome_answers(filters: Filters) -> None:
    filters.make()
    access = MissFilterAccess()
    assert access.denies_any(GONE) is None
    access.welcomed(filters.welcome())
    assert (access.denies_any(HERE), access.denies_any(GONE)) == (False, True)
    assert access.denies_any([]) is None
    access.lost()
    assert access.denies_any(GONE) is None


@pytest.mark.parametrize("changes", [{"host": "other"}, {"instance": "host-tier-1"}])
def test_the_filter_of_another_host_tier_is_not_taken(
    filters: Filters, changes: dict[str, str]
) -> None:
    """An engine that came by TCP may have a file of the same name before it."""
    filters.make()
    access = MissFilterAccess()
    access.welcomed(filters.welcome(1, **changes))
    assert access.denies_any(GONE) is None


def test_without_a_filter_or_with_one_of_another_life_it_asks(filters: Filters) -> None:
    access = MissFilterAccess()
    for generation in (0, 1):
        access.welcomed(filters.welcome(generation))
        assert access.denies_any(GONE) is None
    filters.make(epoch=EPOCH - 1)
    access.welcomed(filters.welcome())
    assert access.denies_any(GONE) is None


def test_a_filter_that_says_nothing_is_asked_again_later(filters: Filters) -> None:
    made = filters.make()
    access = MissFilterAccess()
    access.welcomed(filters.welcome())
    made.switch(FilterState.PARTIAL)
    assert (access.denies_any(HERE), access.denies_any(GONE)) == (None, None)
    made.switch(FilterState.COMPLETE)
    assert access.denies_any(GONE) is True


def test_a_filter_that_has_ended_is_followed_by_the_next(filters: Filters) -> None:
    """Also where that one is gone: then it asks."""
    first = filters.make()
    access = MissFilterAccess()
    access.welcomed(filters.welcome())
    second = filters.make(2)
    first.end(2)
    assert access.denies_any(GONE) is None  # It looks for the next one now.
    assert access.denies_any(GONE) is True
    second.end(3)
    assert [access.denies_any(GONE) for _ in range(3)] == [None, None, None]


def test_an_engine_that_has_missed_several_filters_finds_the_last(filters: Filters) -> None:
    """The second one has ended and is unlinked by the time that the engine looks."""
    first = filters.make()
    access = MissFilterAccess()
    access.welcomed(filters.welcome())
    first.end(2)
    filters.make(3)
    assert access.denies_any(GONE) is None
    assert (access.denies_any(HERE), access.denies_any(GONE)) == (False, True)


def test_a_next_generation_that_cannot_be_ends_the_questions(filters: Filters) -> None:
    first = filters.make()
    access = MissFilterAccess()
    access.welcomed(filters.welcome())
    first.end(2**63)
    assert [access.denies_any(GONE) for _ in range(2)] == [None, None]
