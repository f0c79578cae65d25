"""Names of objects: what goes in comes out, and nothing else is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.slots import Block
from kvbm_disk_tier.objects.names import Names

BLOCKS = st.builds(
    Block,
    st.binary(min_size=16, max_size=16).map(SequenceHash),
    st.binary(min_size=16, max_size=16).map(SequenceHash),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**32),
)
NAMES = Names("team/kv")
GOOD = (
    "team/kv/v1/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f/"
    "00000000000000000000000000000002.00000000000000000000000000000001.4096.00000000000007d1"
)


@given(BLOCKS)
def test_a_name_says_all_of_a_block(block: Block) -> None:
    """There and back; and no name is as long as S3 forbids."""
    name = NAMES.name_of(block)
    assert NAMES.block_of(name) == block
    assert len(name) < 1024


def test_the_form_is_fixed() -> None:
    """Buckets outlive releases: this literal may never change."""
    block = Block(
        SequenceHash((2).to_bytes(16, "big")), SequenceHash((1).to_bytes(16, "big")),
        bytes(range(32)), 2001, 4096,
    )  # fmt: skip
    assert NAMES.name_of(block) == GOOD


@pytest.mark.parametrize(
    "name",
    [
        "", "team/kv/v1/", "other/v1" + GOOD.removeprefix("team/kv/v1"),
        GOOD + "0", GOOD[:-1], GOOD.upper(), GOOD + "\n", GOOD + "/x",
        GOOD.replace("/v1/", "/v2/"), GOOD.replace(".4096.", ".0."), GOOD.replace(".4096.", ".-1."),
        GOOD.replace(".4096.", ".04096."), GOOD.replace(".4096.", ".9999999999999."),
        "team/kv/v1/../" + GOOD.removeprefix("team/kv/v1/"),
    ],
)  # fmt: skip
def test_what_is_not_ours_is_nobodys(name: str) -> None:
    """Other prefixes, other formats, torn names."""
    assert NAMES.block_of(name) is None
