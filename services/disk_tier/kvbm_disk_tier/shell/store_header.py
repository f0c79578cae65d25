"""The header of a store: what its files are, as JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from kvbm_common.tier.layout import SLAB_BYTES_MAX, UNIT_BYTES, Layout

from kvbm_disk_tier.shell.journal_file import sync_directory
from kvbm_disk_tier.shell.own_files import open_own

HEADER = "header"

FORMAT = 3
"""A store of another format is replaced."""
CIPHER = "aes-256-gcm"
EXTRA_BYTES = 4096
"""The cipher of sealed stores, and how many bytes longer their slots are; see `cipher.py`."""
SHORTER_SLABS_MAX = 16
"""Slabs that are so many times shorter than a new store's are replaced: no large block fits."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `header`."""

    format: int
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    slot_count: Annotated[int, msgspec.Meta(ge=1)]
    cipher: str = ""
    """The cipher that seals blocks; empty: they are not sealed."""
    slab_slots: Annotated[int, msgspec.Meta(ge=1)]
    """Slots of the first size in a slab."""
    host: str = ""
    """The host whose disk tier has the store."""

    @property
    def damage(self) -> str:
        """Return which number no store has; empty: all of them may be right.

        How long the file is says the rest.
        """
        if self.slot_bytes % UNIT_BYTES:
            return f"slots of {self.slot_bytes} bytes"
        if self.slab_slots * self.slot_bytes > max(SLAB_BYTES_MAX, self.slot_bytes):
            return f"slabs of {self.slab_slots} slots"
        return ""

    @property
    def layout(self) -> Layout:
        """Return the places of slots in the file."""
        extra = extra_of(self.cipher)
        return Layout(self.slot_bytes + extra, self.slot_count, self.slab_slots, extra)

    def resized(self, slot_count: int) -> Header:
        """Return the header of the store with another number of slots: its slabs stay."""
        return msgspec.structs.replace(self, slot_count=slot_count)

    def may_grow(self, slot_count: int) -> bool:
        """Tell whether so many slots may keep these slabs: a new store's are not much longer."""
        new = Header.of(self.slot_bytes, slot_count, self.cipher)
        return new.slab_slots <= SHORTER_SLABS_MAX * self.slab_slots

    @classmethod
    def of(cls, slot_bytes: int, slot_count: int, cipher: str, host: str = "") -> Header:
        """Return the header of a new store."""
        slab_slots = Layout.of(slot_bytes + extra_of(cipher), slot_count).slab_slots
        return cls(
            format=FORMAT, slot_bytes=slot_bytes, slot_count=slot_count, cipher=cipher,
            slab_slots=slab_slots, host=host,
        )  # fmt: skip


def extra_of(cipher: str) -> int:
    """Return what a slot in the file is longer than its block in whole units."""
    return EXTRA_BYTES if cipher else 0


def write_header(directory: Path, header: Header) -> None:
    """Put a header in place of the old one, at once or not at all; raises OSError.

    It is synchronised before it has its name: a power cut leaves no empty header.
    """
    path = directory / f"{HEADER}.new"
    fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(header))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path, directory / HEADER)
    sync_directory(directory)
