"""Snapshots in pages: what a reader has in the end, whenever the pages were made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash, hash_from_hex
from kvbm_common.nats.snapshots import joined
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core.block_books import Pairs
from kvbm_connectors.consolidator.core.snapshot_pages import Piece, ViewKey, pages_of

HEAD = SnapshotReply(host="h", source="sim-0", tier="device", epoch=1, seq=7, parts=[])
Table = dict[SequenceHash, SequenceHash]


def block(number: int) -> SequenceHash:
    return SequenceHash(number.to_bytes(16, "big"))


def held_of(table: Table, names: Sequence[SequenceHash]) -> Pairs:
    return [(name, table[name]) for name in names if name in table]


def pieces(table: Table, size: int = 1, *, rank: int = 0) -> list[Piece]:
    """All blocks of a table in pieces of this size."""
    names = list(table)
    cuts = [names[at : at + size] for at in range(0, len(names), size)]
    view = ViewKey("ab", rank, 0)
    return [Piece(view, len(cut), partial(held_of, table, cut)) for cut in cuts]


def pairs_in(snapshot: SnapshotReply, rank: int = 0) -> Table:
    """Each block with its parent, as a reader of the runs has them."""
    found: Table = {}
    for one in snapshot.parts:
        for run in one.runs if one.rank == rank else ():
            names = [hash_from_hex(text) for text in (run.parent, *run.hashes)]
            found |= dict(zip(names[1:], names, strict=False))
    return found


def test_pages_are_full_and_parts_share_them() -> None:
    first = {block(number): block(number - 1) for number in range(1, 7)}
    second = {block(number): block(number - 1) for number in range(21, 24)}
    pages = [page() for page in pages_of(HEAD, pieces(first) + pieces(second, rank=1), 4)]
    assert [(page.page, page.pages) for page in pages] == [(0, 3), (1, 3), (2, 3)]
    assert [len(pairs_in(page)) + len(pairs_in(page, 1)) for page in pages] == [4, 4, 1]
    assert {(page.epoch, page.seq) for page in pages} == {(1, 7)}
    whole = joined(pages)
    assert (pairs_in(whole), pairs_in(whole, 1)) == (first, second)


def test_who_has_nothing_says_so_in_one_page() -> None:
    [page] = pages_of(HEAD, [], 4)
    assert page() == HEAD


@given(
    before=st.lists(st.integers(1, 9), max_size=9),
    after=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=12),
    times=st.lists(st.integers(0, 12), min_size=9, max_size=9),
)
def test_later_events_on_top_of_later_pages_give_the_truth(
    before: list[int], after: list[tuple[bool, int]], times: list[int]
) -> None:
    """1. Some blocks are held at the moment. 2. Others come and leave, and each page is made at a
    time of its own meanwhile. 3. The reader applies all that came after the moment."""
    table = {block(number): block(0) for number in before}
    makers = pages_of(HEAD, pieces(table), 2)
    made: list[SnapshotReply] = []
    for step in range(13):
        made += [make() for make, at in zip(makers, times, strict=False) if at == step]
        for is_stored, number in after[step : step + 1]:
            change(table, number, is_stored=is_stored)
    reader = pairs_in(joined(sorted(made, key=lambda page: page.page)))
    for is_stored, number in after:
        change(reader, number, is_stored=is_stored)
    assert len(made) == len(makers)
    assert reader == table


def change(table: Table, number: int, *, is_stored: bool) -> None:
    if is_stored:
        table[block(number)] = block(0)
    else:
        table.pop(block(number), None)
