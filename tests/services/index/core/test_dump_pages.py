"""Pages of a dump, compared with all names sorted: any sizes, any names, any limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_index.core.chains import Chains
from kvbm_index.core.dump_pages import Cursor, HeldBy, page_of
from kvbm_index.core.messages import Holder
from kvbm_index.core.requests import BadRequest

Names = dict[int, list[bytes]]
"""By rank."""


def held(names: Names) -> list[HeldBy]:
    """Ranks of one engine that hold these blocks, each a chain of its own."""
    holders = []
    for rank, blocks in sorted(names.items()):
        chains = Chains()
        for block in blocks:
            chains.add(b"p" * 16, block, rooted=False)
        holders.append(HeldBy(Holder("h", "sim-0", "device", rank, 0), 1, 7, chains))
    return holders


def told(holders: list[HeldBy], limit: int) -> tuple[dict[int, list[str]], list[int]]:
    """All pages: the names by rank, and how many blocks each page has."""
    names: dict[int, list[str]] = {}
    sizes, after = [], ""
    while True:
        page, after = page_of(holders, after, limit)
        for one in page:
            assert (one.epoch, one.seq) == (1, 7)
            names.setdefault(one.rank, []).extend(one.hashes)
        sizes.append(sum(len(one.hashes) for one in page))
        if not after:
            return names, sizes


def sorted_names(names: Names) -> dict[int, list[str]]:
    """What all pages together tell."""
    return {rank: sorted(block.hex() for block in blocks) for rank, blocks in names.items()}


@given(
    st.dictionaries(
        st.integers(0, 3), st.lists(st.binary(min_size=16, max_size=16), min_size=1, unique=True)
    ),
    st.integers(1, 20),
)
def test_pages_are_all_blocks_in_order(names: Names, limit: int) -> None:
    """Names as Hypothesis draws them: crowded at both ends of the numbers."""
    # Names that agree in 8 bytes are no hashes: they stay together, see below.
    unlike = {
        rank: list({name[:8]: name for name in some}.values()) for rank, some in names.items()
    }
    all_told, sizes = told(held(unlike), limit)
    assert all_told == sorted_names(unlike)
    assert all(size <= limit for size in sizes)


@pytest.mark.parametrize("limit", [1_000, 5_000, 100_000])
def test_pages_of_hashes_are_nearly_full(limit: int) -> None:
    numbers = random.Random(1)
    names = {rank: [numbers.randbytes(16) for _ in range(20_000)] for rank in range(2)}
    all_told, sizes = told(held(names), limit)
    assert all_told == sorted_names(names)
    assert len(sizes) <= 1.25 * 40_000 / limit + 2


def test_a_page_with_room_for_all_is_the_only_one() -> None:
    numbers = random.Random(2)
    names = {rank: [numbers.randbytes(16) for _ in range(7)] for rank in range(2)}
    assert told(held(names), 14) == (sorted_names(names), [14])


def test_names_that_begin_alike_end_a_page_together() -> None:
    """Three names agree in 8 bytes, and a page has room for two: the third is left out."""
    alike = [bytes(8) + bytes(7) + bytes([number]) for number in range(3)]
    all_told, _ = told(held({0: [*alike, b"\xff" * 16]}), 2)
    assert all_told == {0: [alike[0].hex(), alike[1].hex(), "ff" * 16]}


def test_what_left_between_two_pages_is_seen_by_the_position() -> None:
    """The rest of a holder has left: the second page names it, without blocks."""
    names = [bytes([number]) * 16 for number in range(8)]
    _, after = page_of(held({0: names}), "", 4)
    [rest], _ = page_of(held({0: names[:1]}), after, 4)
    assert (rest.rank, rest.hashes) == (0, [])


def test_a_holder_that_ended_between_two_pages_is_passed_over() -> None:
    names = {rank: [bytes([rank, number]) * 8 for number in range(4)] for rank in range(3)}
    holders = held(names)
    page, after = page_of(holders, "", 2)
    assert [one.rank for one in page] == [0]
    rest, after = page_of(holders[1:], after, 100)
    assert [one.rank for one in rest] == [1, 2]
    assert after == ""


@pytest.mark.parametrize("after", ["h", "h/s/device/0/0", "h/s/device/x/0/00", "h/s/device/0/0/zz"])
def test_a_cursor_of_another_kind_is_refused(after: str) -> None:
    with pytest.raises(BadRequest) as refused:
        page_of(held({0: [bytes(16)]}), after, 1)
    assert refused.value.field == "after"


def test_a_cursor_survives_its_text() -> None:
    cursor = Cursor(("h", "sim-0", "device", 3, 1), (1 << 64) - 1)
    assert Cursor.parse(str(cursor)) == cursor
