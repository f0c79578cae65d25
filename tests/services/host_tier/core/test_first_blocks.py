"""First blocks of prompts: which other hashes the same tokens have had."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.service.footprint import memory_bytes
from kvbm_common.tier.name_history import ENTRY_BYTES
from kvbm_host_tier.core.first_blocks import (
    FIRST_BLOCKS_MAX,
    FIRST_BLOCKS_MIN,
    HASHES_MAX,
    FirstBlock,
    FirstBlocks,
    first_blocks_for,
    namespace_bits,
)

Oracle = OrderedDict[tuple[bytes, SequenceHash], bytes]


def drawn(rng: random.Random) -> bytes:
    return rng.randbytes(16)


def note_in(
    oracle: Oracle, kept: int, content: bytes, name: SequenceHash, namespace: bytes
) -> list[FirstBlock]:
    """The same note in a dict of so many; returns the others with the tokens."""
    of_content = [key for key in oracle if key[0] == content]
    others = [key for key in of_content if key[1] != name]
    found = [FirstBlock(key[1], namespace_bits(oracle[key])) for key in others]
    if oracle.pop((content, name), None) is None and len(others) >= HASHES_MAX:
        del oracle[others[0]]
    elif len(oracle) >= kept:
        oracle.popitem(last=False)
    oracle[content, name] = namespace
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kept", [5, 40, 300])
def test_they_are_an_ordered_dict_that_forgets(kept: int, seed: int) -> None:
    """Goal: few tokens under many hashes, drawn; the newest stay, of each tokens four."""
    rng = random.Random(f"{kept}/{seed}")
    contents = [drawn(rng) for _ in range(max(2, kept // 4))]
    names = {content: [SequenceHash(drawn(rng)) for _ in range(8)] for content in contents}
    namespaces = [rng.randbytes(32) for _ in range(3)]
    first, oracle = FirstBlocks(kept), Oracle()
    for _ in range(1_000):
        content = rng.choice(contents)
        name, namespace = rng.choice(names[content]), rng.choice(namespaces)
        assert first.note(content, name, namespace) == note_in(
            oracle, kept, content, name, namespace
        )
        assert len(first) == len(oracle)


@pytest.mark.parametrize("name", [b"\0" * 16, b"\xff" * 16])
def test_every_bit_of_a_hash_comes_back(name: bytes) -> None:
    first = FirstBlocks()
    first.note(b"t" * 16, SequenceHash(name), b"n" * 32)
    assert first.note(b"t" * 16, SequenceHash(b"m" * 16), b"n" * 32) == [
        FirstBlock(SequenceHash(name), namespace_bits(b"n" * 32))
    ]


@pytest.mark.parametrize(
    ("slots", "kept"),
    [(1, FIRST_BLOCKS_MIN), (10_000, 80_000), (10_000_000, FIRST_BLOCKS_MAX)],
)
def test_they_follow_the_slots(slots: int, kept: int) -> None:
    first = FirstBlocks()
    first.size_for(slots)
    assert (first.usage().size, first_blocks_for(slots)) == (kept, kept)


@pytest.mark.parametrize("slots", [1, 10_000_000])
def test_a_chosen_number_is_kept_whatever_the_slots(slots: int) -> None:
    first = FirstBlocks(3)
    before = first.usage().size
    first.size_for(slots)
    assert (before, first.usage().size, first_blocks_for(slots, 3)) == (3, 3, 3)


def test_what_is_forgotten_is_counted() -> None:
    first, rng = FirstBlocks(3), random.Random(0)
    for _ in range(5):
        first.note(drawn(rng), SequenceHash(drawn(rng)), b"n" * 32)
    assert first.usage() == (3, 3, 2, None)


def test_a_first_block_takes_what_is_declared() -> None:
    """Goal: no more memory for each than the bound says, measured, when all tokens differ."""
    rng = random.Random(0)
    drawn_blocks = [(drawn(rng), SequenceHash(drawn(rng))) for _ in range(100_000)]
    first = FirstBlocks(100_000)
    before = memory_bytes()
    for content, name in drawn_blocks:
        first.note(content, name, b"n" * 32)
    assert memory_bytes() - before < 100_000 * ENTRY_BYTES + (1 << 20)
    assert len(first) == 100_000
