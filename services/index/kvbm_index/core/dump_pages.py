"""Pages of a dump: the blocks of all holders in the order of their names, a piece at a time.

A page is found without sorting all that a holder has. Names are hashes, so their first 8 bytes are
spread evenly: of n blocks, some m lie between two numbers that are m/n of 2⁶⁴ apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from kvbm_common.identity import HASH_BYTES
from kvbm_common.wire.index_verbs import HolderDump
from numpy.typing import NDArray

from kvbm_index.core.chains import Chains
from kvbm_index.core.messages import Holder
from kvbm_index.core.requests import BadRequest

END = 1 << 64
"""A number above the first 8 bytes of every name."""


class HeldBy(NamedTuple):
    """A holder, the position up to which its blocks are known, and the blocks."""

    holder: Holder
    epoch: int
    seq: int
    chains: Chains


class Cursor(NamedTuple):
    """The start of a page: a holder's first block whose hash begins with no less than `key`."""

    holder: tuple[str, str, str, int, int]
    key: int

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that an earlier page ended with; raises BadRequest."""
        try:
            host, source, tier, rank, group, key = text.split("/")
            return cls((host, source, tier, int(rank), int(group)), int(key, 16))
        except ValueError as error:
            raise BadRequest("after is no `next` of a page", field="after") from error

    def __str__(self) -> str:
        return "/".join([*map(str, self.holder), f"{self.key:016x}"])


def page_of(held: Sequence[HeldBy], after: str, limit: int) -> tuple[list[HolderDump], str]:
    """Return at most `limit` blocks from a cursor on, and the next cursor; "": there is no more.

    `held` is in the order of holders. Raises BadRequest.
    """
    assert limit > 0, f"a page of {limit} blocks"
    start = Cursor.parse(after) if after else None
    page: list[HolderDump] = []
    room = limit
    for holder, epoch, seq, chains in held:
        if start is not None and holder < start.holder:
            continue
        low = start.key if start is not None and holder == start.holder else 0
        if not room:
            return page, str(Cursor(holder, low))
        names, high = _between(chains.names(), low, room)
        if len(names) or low:  # The position shows which blocks left between two pages.
            page.append(HolderDump(**holder._asdict(), epoch=epoch, seq=seq, hashes=_hex(names)))
        room -= len(names)
        assert room >= 0, f"{-room} blocks too many of {holder}"
        if high < END:
            return page, str(Cursor(holder, high))
    return page, ""


def _between(names: bytes, low: int, room: int) -> tuple[NDArray[np.uint64], int]:
    """Return the names from `low` on, at most `room` of them, and where the next ones begin.

    Names that agree in their first 8 bytes stay together; if these alone are too many (a hash
    does not make so many), the rest of them is left out.
    """
    words = np.frombuffer(names, ">u8").reshape(-1, HASH_BYTES // 8)
    keys = words[:, 0]
    # A tenth less than fits: half of the pages would be a few blocks too long, and be halved.
    width = END if len(keys) <= room else max(END * room * 9 // (10 * len(keys)), 1)
    high = low
    found = np.zeros(0, np.intp)
    while not len(found) and high < END:
        low, high = high, min(high + width, END)
        found = np.flatnonzero((keys >= low) & (keys <= high - 1))
        width *= 2
    while len(found) > room and high - low > 1:
        high = low + (high - low) // 2
        found = found[keys[found] <= high - 1]
    return words[found[:room]], high


def _hex(names: NDArray[np.uint64]) -> list[str]:
    """Return names in ascending order, as JSON has them."""
    text = names[np.lexsort((names[:, 1], names[:, 0]))].tobytes().hex()
    size = 2 * HASH_BYTES
    return [text[start : start + size] for start in range(0, len(text), size)]
