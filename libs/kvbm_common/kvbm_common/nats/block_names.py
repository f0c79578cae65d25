"""Names of blocks by their first digits, from pages of the index's dump.

A page may begin at any number, and the names of a page are the next ones of a holder. So a few
names that begin alike take one short page of each holder.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import DumpReply, DumpRequest, HolderDump
from kvbm_common.wire.scores import HoldersReply, HolderSummary

DIGITS_MIN = 4
"""Fewer digits are shared by some of a hundred thousand blocks."""
NAME_DIGITS = 32
NAMES_MAX = 16
"""Enough to show what begins alike; a page of the dump has as many."""
KEY_DIGITS = 16
"""The digits of a name by which the dump is ordered."""
PAGES_MAX = 64
"""Pages that are read of one holder. They are short where blocks leave meanwhile."""

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Sends the request of a verb of the index, and returns the answer."""

_request: JsonCodec[DumpRequest] = JsonCodec(DumpRequest)
_holders: JsonCodec[HoldersReply] = JsonCodec(HoldersReply)
_page: JsonCodec[DumpReply] = JsonCodec(DumpReply)


class NoSuchBlock(KvbmError):
    """No holder has a block whose name begins like this."""

    code = "unknown_block"


def is_whole(name: str) -> bool:
    """Return whether a text is the whole name of a block."""
    return re.fullmatch(f"[0-9a-f]{{{NAME_DIGITS}}}", name) is not None


def is_beginning(name: str) -> bool:
    """Return whether a text may be the first digits of a block's name."""
    return re.fullmatch(f"[0-9a-f]{{{DIGITS_MIN},{NAME_DIGITS - 1}}}", name) is not None


def only_one(digits: str, found: list[str], field: str) -> str:
    """Return the one name that was found; raises NoSuchBlock, or ConfigError where several were."""
    if not found:
        raise NoSuchBlock(f"no holder has a block whose name begins with {digits}")
    if len(found) > 1:
        raise ConfigError(field, digits, f"more digits: {', '.join(found[:3])} begin with these")
    return found[0]


async def names_with(ask: Ask, digits: str) -> list[str]:
    """Return the names that begin with these digits, NAMES_MAX at most, in ascending order.

    Raises KvbmError: what `ask` raises, WireError.
    """
    assert is_beginning(digits) or is_whole(digits), digits
    summary = _holders.decode(await ask("holders", _request.encode(DumpRequest())))
    found: set[str] = set()
    for holder in summary.holders:
        found |= await _names_of(ask, holder, digits)
        if len(found) >= NAMES_MAX:
            break
    return sorted(found)[:NAMES_MAX]


async def _names_of(ask: Ask, holder: HolderSummary, digits: str) -> set[str]:
    """Return the names of one holder that begin with these digits, of its first pages."""
    key = digits[:KEY_DIGITS].ljust(KEY_DIGITS, "0")
    last = digits[:KEY_DIGITS].ljust(KEY_DIGITS, "f")
    place = f"{holder.host}/{holder.source}/{holder.tier}/{holder.rank}/{holder.group}/"
    found: set[str] = set()
    for _ in range(PAGES_MAX):
        request = DumpRequest(limit=NAMES_MAX, after=place + key)
        page = _page.decode(await ask("dump", _request.encode(request)))
        found.update(
            name
            for part in page.holders
            if _place_of(part) == place
            for name in part.hashes
            if name.startswith(digits)
        )
        key = page.next.removeprefix(place)
        if not page.next.startswith(place) or key > last or len(found) >= NAMES_MAX:
            break
    return found


def _place_of(part: HolderDump) -> str:
    """Return a holder as cursors of the dump begin."""
    return f"{part.host}/{part.source}/{part.tier}/{part.rank}/{part.group}/"
