"""A snapshot becomes what the index holds, piece by piece."""

from __future__ import annotations

import msgspec
from kvbm_common.wire.events import Run
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply
from kvbm_index.core.snapshot_loader import SnapshotLoader

from tests.services.index.core.test_core import NAMESPACE, block, loaded, runs, snapshot


def parts(*ranks: int) -> SnapshotReply:
    """Blocks 0 to 9 on each rank."""
    named = [SnapshotPart(namespace=NAMESPACE, rank=rank, runs=runs(range(10))) for rank in ranks]
    return msgspec.structs.replace(snapshot(7), parts=named)


def test_every_rank_has_its_blocks() -> None:
    loader = loaded(parts(0, 1))
    assert not loader.malformed
    assert sorted(holder[3] for holder in loader.chains) == [0, 1]
    for chains in loader.chains.values():
        chains.check()
        assert set(chains) == {block(number) for number in range(10)}


def test_others_have_turns_between_the_pieces() -> None:
    loader, pieces = SnapshotLoader(parts(0, 1)), 1
    while not loader.go_on(blocks=4):
        pieces += 1
    assert pieces > 2
    assert {len(chains) for chains in loader.chains.values()} == {10}


def test_when_it_is_there_every_block_is_listed() -> None:
    [chains] = loaded(parts(0)).chains.values()
    assert chains.index_some(100) == 100


def test_a_part_without_blocks_is_a_holder_without_blocks() -> None:
    reply = msgspec.structs.replace(snapshot(7), parts=[SnapshotPart(namespace=NAMESPACE, runs=[])])
    loader = loaded(reply)
    assert not any(loader.chains.values())


def test_a_name_that_is_none_is_noticed() -> None:
    part = SnapshotPart(namespace=NAMESPACE, runs=[Run(parent=block(1).hex(), hashes=["x"])])
    assert loaded(msgspec.structs.replace(snapshot(7), parts=[part])).malformed
