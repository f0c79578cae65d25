"""The miss filter: what is in it is never denied, and what is not, seldom affirmed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.memory import miss_filter
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.miss_filter import (
    COUNTERS_PER_NAME,
    FEW,
    HEADER_BYTES,
    STUCK,
    FilterState,
    MissFilter,
    MissFilterReader,
    size_of,
)

OWNER, EPOCH = 7, 3


def names_of(numbers: list[int]) -> list[SequenceHash]:
    """Return names that are spread as hashes are."""
    return [SequenceHash(np.random.default_rng(one).bytes(16)) for one in numbers]


def pair(capacity: int = 64) -> tuple[MissFilter, MissFilterReader, bytearray]:
    """Return an open filter, its reader and their memory."""
    memory = bytearray(size_of(capacity))
    writer = MissFilter(memoryview(memory), owner=OWNER, epoch=EPOCH)
    writer.switch(FilterState.COMPLETE)
    return writer, MissFilterReader(memory, owner=OWNER, epoch=EPOCH), memory


numbers = st.lists(st.integers(0, 40), max_size=2 * FEW)


@pytest.mark.slow
@given(steps=st.lists(st.tuples(numbers, numbers), max_size=12), capacity=st.integers(1, 8))
def test_a_name_that_is_there_is_never_denied(
    steps: list[tuple[list[int], list[int]]], capacity: int
) -> None:
    """Goal: no wrong "no", one by one or many together, with counters that are stuck or not.
    Method: a multiset is the model; names come and leave in turns, in a filter far too small."""
    writer, reader, memory = pair(capacity)
    model: Counter[SequenceHash] = Counter()
    for came, asked_to_leave in steps:
        new = names_of(came) * 3
        model.update(new)
        left = [name for name in names_of(asked_to_leave) if model[name] > 0]
        left = list(dict.fromkeys(left))
        writer.change(new, left)
        model.subtract(left)
        assert not any(reader.denies_any([name]) for name in +model)
    writer.change([], list((+model).elements()))
    if STUCK not in memory[HEADER_BYTES:]:
        assert not any(memory[HEADER_BYTES:])


def test_names_are_added_before_others_leave() -> None:
    """Goal: a name that leaves and comes in one turn is there all the time. Method: the counters
    at the moment when the names that leave are looked at."""
    writer, reader, memory = pair()
    [name] = names_of([1])
    writer.change([name], [])
    seen: list[int] = []

    class Leaving(list[SequenceHash]):
        """Names that note what the filter says when they are read."""

        def __iter__(self) -> Iterator[SequenceHash]:
            seen.append(max(memory[HEADER_BYTES:]))
            return super().__iter__()

    writer.change([name], Leaving([name]))
    assert seen == [2]
    assert not reader.denies_any([name])


@pytest.mark.slow
def test_at_its_capacity_one_name_of_a_hundred_is_affirmed_wrongly_at_most() -> None:
    writer, reader, memory = pair(20_000)
    names = names_of([*range(20_000)])
    writer.change(names, [])
    others = names_of([*range(20_000, 40_000)])
    wrong = sum(not reader.denies_any([name]) for name in others)
    assert 0 < wrong < 0.01 * len(others)
    assert len(memory) == HEADER_BYTES + 20_000 * COUNTERS_PER_NAME
    writer.change([], names)
    assert not any(memory[HEADER_BYTES:])


def test_one_missing_name_of_several_is_enough() -> None:
    writer, reader, _ = pair()
    here, gone = names_of([1, 2])
    writer.change([here], [])
    assert reader.denies_any([here, gone])
    assert not reader.denies_any([here])
    assert not reader.denies_any([])


@pytest.mark.parametrize("state", [FilterState.PARTIAL, FilterState.ENDED])
def test_a_filter_that_is_not_open_denies_nothing(state: FilterState) -> None:
    writer, reader, _ = pair()
    assert reader.denies_any(names_of([1]))
    writer.switch(state)
    assert not reader.denies_any(names_of([1]))


def test_a_filter_that_has_ended_names_the_next_one() -> None:
    writer, reader, _ = pair()
    assert not reader.next_generation
    writer.end(2)
    assert (reader.state, reader.next_generation) == (FilterState.ENDED, 2)


def test_another_life_or_owner_is_not_believed() -> None:
    _, _, memory = pair()
    for owner, epoch in ((OWNER, EPOCH + 1), (OWNER + 1, EPOCH)):
        with pytest.raises(ArenaUnavailable):
            MissFilterReader(memory, owner=owner, epoch=epoch)
    with pytest.raises(ArenaUnavailable):
        MissFilterReader(bytearray(HEADER_BYTES), owner=OWNER, epoch=EPOCH)


def test_files_lie_beside_the_arena(tmp_path: Path) -> None:
    arena = str(tmp_path / "arena")
    file = miss_filter.make_file(arena, 2, 8)
    assert [one.name for one in tmp_path.iterdir()] == ["arena-names-2"]
    Path(arena).touch()
    writer = MissFilter(file.view(0, file.bytes), owner=OWNER, epoch=EPOCH)
    writer.switch(FilterState.COMPLETE)
    reader = MissFilterReader(miss_filter.map_file(arena, 2), owner=OWNER, epoch=EPOCH)
    assert reader.denies_any(names_of([1]))
    with pytest.raises(ArenaUnavailable):
        miss_filter.map_file(arena, 1)
    file.close()
    assert [one.name for one in tmp_path.iterdir()] == ["arena"]


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "writable by others", "another's"])
def test_what_another_user_may_have_put_there_is_not_mapped(tmp_path: Path, kind: str) -> None:
    """Goal: who takes the name of a filter makes no engine miss, hang or die."""
    arena = tmp_path / "arena"
    arena.touch()
    file = miss_filter.make_file(str(tmp_path / "made"), 1, 8)
    found, path = tmp_path / "made-names-1", tmp_path / "arena-names-1"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(found)
        case "directory":
            path.mkdir()
        case "writable by others":
            found.rename(path)
            path.chmod(0o620)
        case _:
            if os.geteuid():
                pytest.skip("only root can give a file away")
            found.rename(path)
            os.chown(path, 65534, 65534)
    with pytest.raises(ArenaUnavailable):
        miss_filter.map_file(str(arena), 1)
    file.close()


def test_a_state_that_there_is_not_is_the_end() -> None:
    _, reader, memory = pair()
    memory[24] = 7
    assert reader.state is FilterState.ENDED
    assert not reader.denies_any(names_of([1]))
