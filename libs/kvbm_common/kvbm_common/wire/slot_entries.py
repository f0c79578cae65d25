"""Slot entries: what a lease or a fill says of one slot."""

from __future__ import annotations

import builtins
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbm_common.wire.events import Hex128, HexDigest, Natural

GridCode = Annotated[int, Meta(ge=1, le=2**16 - 1)]
"""The number that `tier/parts.py` gives to a cut of a block into parts."""


class LeasedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One pinned block. `checksum` is the xxh3-64 of its first `bytes` bytes, or of the packed
    checksums of its parts where it has several."""

    hash: Hex128
    parent: Hex128
    namespace: HexDigest
    slot: Natural
    checksum: int
    bytes: Natural
    part_checksums: list[int] = []
    """A former release's checksums of parts: neither sent nor read."""
    parts: GridCode = 1
    """The code of the grid that cuts it into parts (`tier/parts.py`)."""


class FilledSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one slot; when `ok` is false, `reason` says why and the slot is unused."""

    hash: Hex128
    slot: Natural
    ok: bool
    parent: Hex128 = "0" * 32
    namespace: HexDigest = "0" * 64
    checksum: int = 0
    bytes: Natural = 0
    reason: str = ""
    part_checksums: list[int] = []
    """A former release's checksums of parts: neither sent nor read."""
    parts: GridCode = 1
    """The code of the grid that cuts it into parts, as in `LeasedSlot`."""
    part_sums: builtins.bytes = b""
    """The packed checksums of the parts, in base64, if the block has several."""
