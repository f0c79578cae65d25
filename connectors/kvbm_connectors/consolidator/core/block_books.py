"""Books of blocks: large tables that change while they are announced, a part at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_from_hex
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotReply

LOOKS_PER_BLOCK = 8
"""Blocks that are looked at in the time that it takes to announce one."""
DROPS_PER_BLOCK = 16
"""Blocks whose memory is given back in the time that it takes to announce one."""
DISCARDED_MAX = 8
"""Books that wait until their memory is given back; the oldest one's is given back at once."""
Blocks = BlockLookup[SequenceHash]
"""Block → its parent."""
Pairs = list[tuple[SequenceHash, SequenceHash]]
"""Blocks, each with its parent."""
NOTHING: Blocks = BlockLookup()


def store_pairs(book: Blocks, pairs: Pairs) -> None:
    """Note blocks with their parents."""
    book.set_each([name for name, _ in pairs], [parent for _, parent in pairs])
    assert not pairs or pairs[-1][0] in book, f"{len(pairs)} blocks are not in their book"


def listed(book: Blocks) -> Iterator[SequenceHash]:
    """Yield the blocks of a book that changes meanwhile: each part as it is when it is reached."""
    for number in range(book.part_count):
        yield from map(SequenceHash, list(book.part(number)))


def parents_before_children(books: Sequence[Blocks]) -> Iterator[SequenceHash | None]:
    """Yield every block of some books once, each after its parent if that is in one of them.

    Dynamo's router refuses a block before its parent. None stands for some that were looked at
    again: at the end nearly all have been yielded.
    """
    done: BlockLookup[bool] = BlockLookup()
    for book in books:
        for looks, name in enumerate(listed(book), start=1):
            if not looks % LOOKS_PER_BLOCK:
                yield None
            chain: list[SequenceHash] = []
            at: SequenceHash | None = name
            while at is not None and at not in done:
                if not (len(chain) + 1) % LOOKS_PER_BLOCK:
                    yield None
                parent = parent_in(books, at)
                if parent is not None:
                    done.set((at,), True)
                    chain.append(at)
                at = parent
            yield from reversed(chain)
    for _ in range(done.part_count if done.part_count > 1 else 0):
        dropped = done.shed()
        yield from repeat(None, dropped // DROPS_PER_BLOCK)


class Discarded:
    """Books that are of no use any more: a million blocks' memory takes 90 ms to give back."""

    def __init__(self) -> None:
        self._books: deque[BlockLookup[Any]] = deque()

    def __bool__(self) -> bool:
        return bool(self._books)

    def add(self, book: BlockLookup[Any]) -> None:
        """Take a book whose blocks are never asked for again; a small one goes at once."""
        if book.part_count > 1:
            self._books.append(book)
            if len(self._books) > DISCARDED_MAX:
                self._books.popleft()
        assert len(self._books) <= DISCARDED_MAX, f"{len(self._books)} books wait"

    def shed(self, count: int) -> None:
        """Give back the memory of about so many blocks: whole parts of a book."""
        while self._books and count > 0:
            book = self._books[0]
            count -= book.shed() + 1
            if not len(book):
                self._books.popleft()


def parent_in(books: Iterable[Blocks], name: SequenceHash) -> SequenceHash | None:
    """Return the parent of a block that is in one of these books; None: it is in none."""
    for book in books:
        parent = book.get(name)
        if parent is not None:
            return parent
    return None


def parts_of(reply: SnapshotReply, blocks_max: int) -> Iterator[tuple[str, Pairs]]:
    """Yield the namespaces of a snapshot, each with some blocks; raises IdentityError."""
    assert blocks_max > 0, f"parts of {blocks_max} blocks"
    for part in reply.parts:
        yield part.namespace, []
        for run in part.runs:
            parent = run.parent
            for start in range(0, len(run.hashes), blocks_max):
                hashes = run.hashes[start : start + blocks_max]
                yield part.namespace, pairs_of([Run(parent=parent, hashes=hashes)])
                parent = hashes[-1]


def pairs_of(runs: Iterable[Run]) -> Pairs:
    """Return the blocks of these runs, with their parents; raises IdentityError."""
    pairs: Pairs = []
    for run in runs:
        hashes = hashes_from_hex(run.hashes)
        # Not strict: an empty run has a parent, and no block.
        pairs += zip(hashes, [hash_from_hex(run.parent), *hashes[:-1]], strict=False)
    return pairs
