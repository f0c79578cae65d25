"""The header of a store: what its files are, as JSON."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from kvbm_common.tier.layout import SLAB_BYTES_MAX, UNIT_BYTES, Layout

from kvbm_disk_tier.shell.journal_file import sync_directory
from kvbm_disk_tier.shell.own_files import open_own

HEADER = "header"

FORMAT = 3
"""3 since slots have several sizes, 2 since a record says how many parts a block has. A store of
another format is replaced."""
FORMAT_OF_ONE_SIZE = 2
"""Its slots are where those of the first size are now, and its records are read: it is kept."""
CIPHER = "aes-256-gcm"
EXTRA_BYTES = 4096
"""The cipher of sealed stores, and how many bytes longer their slots are; see `cipher.py`."""
SHORTER_SLABS_MAX = 16
"""Slabs that are so many times shorter than a new store's are replaced: no large block fits."""


class Header(msgspec.Struct, frozen=True):
    """The content of the file `header`."""

    format: int
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    slot_count: Annotated[int, msgspec.Meta(ge=1)]
    cipher: str = ""
    """The cipher that seals blocks; empty: they are not sealed."""
    slab_slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Slots of the first size in a slab; 0 in a store of one size."""
    host: str = ""
    """The host whose disk tier has the store; empty in one of an earlier release."""

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
        extra, count = extra_of(self.cipher), self.slot_count
        layout = Layout.of(self.slot_bytes + extra, count, extra_bytes=extra)
        return replace(layout, slab_slots=self.slab_slots or layout.slab_slots)

    def resized(self, slot_count: int) -> Header:
        """Return the header of the store with another number of slots: its slabs stay."""
        slab_slots = self.layout.slab_slots
        return msgspec.structs.replace(self, slot_count=slot_count, slab_slots=slab_slots)

    def may_grow(self, slot_count: int) -> bool:
        """Tell whether so many slots may keep these slabs: a new store's are not much longer."""
        new = Header.of(self.slot_bytes, slot_count, self.cipher)
        return new.slab_slots <= SHORTER_SLABS_MAX * self.layout.slab_slots

    @classmethod
    def of(cls, slot_bytes: int, slot_count: int, cipher: str, host: str = "") -> Header:
        """Return the header of a new store."""
        header = cls(FORMAT, slot_bytes, slot_count, cipher, host=host)
        return msgspec.structs.replace(header, slab_slots=header.layout.slab_slots)


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
