"""Snapshots in pages: each lists some blocks as they are at the time that it is asked for.

A million blocks listed at once would hold up the beats and events of every engine. A page may show
what later events say, too: they apply on top of it, as all later ones do, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import PAGE_BLOCKS, Pages, runs_of
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply
from msgspec.structs import replace

from kvbm_connectors.consolidator.core.block_books import Pairs

PIECE_BLOCKS = 4_096
"""A page is full to within a piece."""


class ViewKey(NamedTuple):
    """The names of blocks of one KV group of a rank."""

    namespace: str
    """Digest in hex."""
    rank: int
    group: int


class Piece(NamedTuple):
    """Some blocks of a view."""

    view: ViewKey
    size: int
    """The blocks that it had at the moment of the snapshot."""
    held: Callable[[], Pairs]
    """Returns those that are held when it is called, each with its parent."""


def pieces_of(
    view: ViewKey, names: Sequence[SequenceHash], held_of: Callable[[Sequence[SequenceHash]], Pairs]
) -> list[Piece]:
    """Cut names into pieces; `held_of` returns those of some names that are held by then."""
    cuts = [names[at : at + PIECE_BLOCKS] for at in range(0, len(names), PIECE_BLOCKS)]
    assert sum(map(len, cuts)) == len(names), f"{len(names)} blocks of {view} are cut"
    return [Piece(view, len(cut), partial(held_of, cut)) for cut in cuts]


def pages_of(head: SnapshotReply, pieces: Iterable[Piece], page_blocks: int = PAGE_BLOCKS) -> Pages:
    """Return makers of the pages of a snapshot, at least one; a page ends with the piece that
    fills it. `head` is the snapshot without its blocks."""
    assert page_blocks > 0, f"pages of {page_blocks} blocks"
    pages: list[list[Piece]] = [[]]
    room = page_blocks
    for piece in pieces:
        if room <= 0:
            pages.append([])
            room = page_blocks
        pages[-1].append(piece)
        room -= piece.size
    return [partial(_page, head, number, len(pages), some) for number, some in enumerate(pages)]


def _page(head: SnapshotReply, number: int, count: int, pieces: Sequence[Piece]) -> SnapshotReply:
    """Make a page: what is held now of its blocks."""
    assert 0 <= number < count, f"page {number} of {count}"
    parts: list[SnapshotPart] = []
    for view, some in groupby(pieces, key=lambda piece: piece.view):
        runs = runs_of(chain.from_iterable(piece.held() for piece in some))
        if runs:
            parts.append(
                SnapshotPart(namespace=view.namespace, rank=view.rank, group=view.group, runs=runs)
            )
    return replace(head, parts=parts, page=number, pages=count)
