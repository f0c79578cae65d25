"""Names of objects: what goes in comes out, and nothing else is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.objects.core.names import Names

BLOCKS = st.builds(
    Block,
    st.binary(min_size=16, max_size=16).map(SequenceHash),
    st.binary(min_size=16, max_size=16).map(SequenceHash),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**16).map(lambda pieces: 720 * pieces),
    st.sampled_from([1, 2, 3, 8, 16]),
)
NAMES = Names("team/kv")
GOOD = (
    "team/kv/v2/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f/"
    "00000000000000000000000000000002.00000000000000000000000000000001.4096.2.00000000000007d1"
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
        bytes(range(32)), 2001, 4096, 2,
    )  # fmt: skip
    assert NAMES.name_of(block) == GOOD


@pytest.mark.parametrize(
    "name",
    [
        "", "team/kv/v2/", "other/v2" + GOOD.removeprefix("team/kv/v2"),
        GOOD + "0", GOOD[:-1], GOOD.upper(), GOOD + "\n", GOOD + "/x",
        GOOD.replace("/v2/", "/v1/"), GOOD.replace(".4096.", ".0."), GOOD.replace(".4096.", ".-1."),
        GOOD.replace(".2.", ".0."), GOOD.replace(".2.", ".3."), GOOD.replace(".2.", ".02."),
        GOOD.replace(".2.", "."), GOOD.replace(".2.", ".65536."),
        GOOD.replace(".4096.", ".04096."), GOOD.replace(".4096.", ".9999999999999."),
        "team/kv/v2/../" + GOOD.removeprefix("team/kv/v2/"),
    ],
)  # fmt: skip
def test_what_is_not_ours_is_nobodys(name: str) -> None:
    """Other prefixes, other formats, torn names."""
    assert NAMES.block_of(name) is None
