"""A restart takes little more memory than what stays, and little of that for each block."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_disk_tier.core.journal import Operation, Record, encode_records
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

COUNT, CHAIN = 20_000, 50
BYTES_MAX = {"adaptive": 325, "lru": 325, "lfu": 345, "prefix": 740}
"""Bytes that are asked of Python for a block; a third of those of `prefix` are there without any.
What Python hands out is rounded up: some 10 % more."""


def journal() -> bytes:
    """Blocks in chains, each with a checksum of 64 bits."""
    rng = random.Random(3)
    names = [SequenceHash(rng.randbytes(16)) for _ in range(COUNT)]
    root, namespace = SequenceHash(bytes(16)), rng.randbytes(32)
    return encode_records(
        Record(
            Operation.COMMITTED, slot + 1, slot,
            Block(one, names[slot - 1] if slot % CHAIN else root, namespace, rng.getrandbits(64),
                  4096),
        )
        for slot, one in enumerate(names)
    )  # fmt: skip


def restarted(options: StoreOptions, policy: str) -> SlotTable:
    """A table of the blocks of a store, unfolded."""
    store = Store(options)
    try:
        found = store.recover()
        assert found is not None
        assert store.header is not None
        table = SlotTable(store.header.layout, partial(make_policy, policy))
        table.restore(found.blocks)
        del found
        while table.folded_count:
            table.unfold(2_048)
        return table
    finally:
        store.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_restart_takes_little_more_than_what_stays(tmp_path: Path, policy: str) -> None:
    """The journal is read, its blocks are unfolded, and all that was needed for it is gone."""
    options = StoreOptions(tmp_path / "store", 0, COUNT, direct=False)
    store = Store(options)
    store.create(4096)
    store.close()
    (options.directory / "journal").write_bytes(journal())
    restarted(options, policy)  # What is imported on the way stays, too.
    tracemalloc.start()
    try:
        table = restarted(options, policy)
        stays, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == COUNT
    assert stays < BYTES_MAX[policy] * COUNT, f"{stays / COUNT} bytes a block"
    assert most < 1.3 * stays, f"{most / stays} times what stays"
