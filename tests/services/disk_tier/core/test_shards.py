"""Which of several disk tiers writes a block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_disk_tier.core.shards import Shards, writers_of

BLOCKS = [SequenceHash(number.to_bytes(16, "big")) for number in range(300)]
NAMES = ["0", "1", "2", "0-d1", "host-x"]
some_instances = st.sets(st.sampled_from(NAMES), min_size=1)


def shards_of(own: str, instances: set[str]) -> Shards:
    shards = Shards(own)
    shards.set(instances)
    return shards


def test_alone_one_writes_everything() -> None:
    assert Shards("0").owned(BLOCKS) == BLOCKS


@given(some_instances)
def test_each_block_is_written_by_exactly_one(instances: set[str]) -> None:
    owned = [shards_of(own, instances).owned(BLOCKS) for own in instances]
    assert sorted(block for blocks in owned for block in blocks) == BLOCKS


@given(some_instances, st.sampled_from(NAMES))
def test_only_the_blocks_of_who_comes_or_goes_change_hands(instances: set[str], other: str) -> None:
    few, many = shards_of("0", instances - {other}), shards_of("0", instances | {other})
    for block in BLOCKS:
        if many.owner(block) != other:
            assert few.owner(block) == many.owner(block)


def test_the_blocks_are_spread_evenly() -> None:
    shares = [len(shards_of(own, {"0", "1", "2"}).owned(BLOCKS)) for own in ("0", "1", "2")]
    assert all(70 < share < 130 for share in shares), shares


def test_who_does_not_write_owns_nothing() -> None:
    assert shards_of("0", {"1"}).owned(BLOCKS) == []
    assert shards_of("0", set()).owned(BLOCKS) == []
    assert shards_of("0", set()).owner(BLOCKS[0]) is None


def test_when_nobody_takes_blocks_each_keeps_its_own() -> None:
    assert writers_of({"0": True, "1": False}) == {"0"}
    assert writers_of({"0": False, "1": False}) == {"0", "1"}
    assert writers_of({}) == frozenset()
