"""A restart takes little more memory than what stays, and little of that for each block.

Blocks that come later take hardly more, though they share no object with others.
"""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import Block, SlotTable
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.journal import Operation, Record, Replay, encode_records
from kvbm_disk_tier.core.messages import StoreOpened
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions

COUNT, CHAIN = 20_000, 50
BYTES_MAX = {"adaptive": 255, "lru": 255, "lfu": 270, "prefix": 655}
"""Bytes that are asked of Python for a block; a third of those of `prefix` are there without any.
What Python hands out is rounded up: some 10 % more."""
CAME_MAX = 285
"""The same of blocks that have come since, with `lru`."""


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
        table = SlotTable(store.header.layout, partial(make_policy, policy), packs=True)
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


def test_a_disk_tier_packs_its_blocks() -> None:
    """So that what is measured here is the table that it has."""
    core = DiskTierCore(host="h", instance="0", epoch=1)
    assert core.inventory.table.packs
    core.step(StoreOpened(Layout.of(4096, 1), Replay({}, 1, 0, 0)), 1)
    assert core.inventory.table.packs


def fresh(value: bytes) -> bytes:
    """Equal bytes that nothing else shares, as a message brings them."""
    return bytes(bytearray(value))


def test_blocks_that_come_take_little_though_they_share_nothing() -> None:
    """Each brings a name, a parent, a checksum and a length; of a batch the namespace is one."""
    rng = random.Random(3)
    table = SlotTable(Layout.of(4096, COUNT), partial(make_policy, "lru"), packs=True)
    last, root, namespace = b"", bytes(16), rng.randbytes(32)
    tracemalloc.start()
    try:
        for _ in range(0, COUNT, CHAIN):
            blocks: list[Block] = []
            for at in range(CHAIN):
                parent = SequenceHash(fresh(last if at else root))
                last = rng.randbytes(16)
                checksum, size = rng.getrandbits(64), int("4096")
                blocks.append(Block(SequenceHash(last), parent, namespace, checksum, size))
            slots = table.stage_all([one.hash for one in blocks], 4096)
            table.register_all([*zip(slots, blocks, strict=True)])
            namespace = fresh(namespace)
        del blocks
        stays, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == COUNT
    assert stays < CAME_MAX * COUNT, f"{stays / COUNT} bytes a block"
    table.check()
