"""Options of a store of files: where it is, how large it gets, and how durable; and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbm_common.errors import KvbmError

from kvbm_disk_tier.core.journal import RECORD_BYTES
from kvbm_disk_tier.core.journal_writer import journal_records_max
from kvbm_disk_tier.shell.store_header import Header, extra_of

PAGE_BYTES = 4096
"""The space of a journal is a multiple of a file system's pages."""
JOURNAL_SLACK = 4
"""One part of so many more: a journal goes on growing while its rewrite waits for its turn."""


class StoreError(KvbmError):
    """The store cannot be opened, made or written. The text says what to change."""

    code = "store"


class StoreBusy(StoreError):
    """Another process has the store."""

    code = "store_busy"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The configured properties of the store's files."""

    directory: Path
    capacity_bytes: int
    slot_count: int | None = None
    """Wins over the capacity."""
    direct: bool = True
    zerofill_fallback: bool = False
    cipher: str = ""
    """The cipher, as in the header."""
    sync: str = "commit"
    """`commit`: data and journal are synchronised before a block is announced."""
    journal_records_per_slot: int = 4
    """Records per slot, as the core counts them: the journal's space is taken for so many."""
    host: str = ""
    """The name of this host, for the header."""
    state_dir: Path | None = None
    """The directory that notes on which disk the store is; None: it is not noted."""

    def slots_of(self, slot_bytes: int) -> int:
        """Return how many slots of this size the store is to have; raises StoreError for none."""
        if self.slot_count is not None:
            return self.slot_count
        count = self.capacity_bytes // (slot_bytes + extra_of(self.cipher))
        if count < 1:
            raise StoreError(
                f"DYN_KVBM_DISK_CACHE_GB is {self.capacity_bytes / 1e9:g}: "
                f"not one block of {slot_bytes} bytes fits"
            )
        return count

    def journal_bytes(self, header: Header) -> int:
        """Return the space of a journal: what a full disk must not keep from it."""
        per_slot = self.journal_records_per_slot
        records = journal_records_max(header.slot_count, header.slot_bytes, per_slot)
        size = (records + records // JOURNAL_SLACK) * RECORD_BYTES
        return -(-size // PAGE_BYTES) * PAGE_BYTES
