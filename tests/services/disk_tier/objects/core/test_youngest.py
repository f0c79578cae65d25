"""What is kept of a range: tenants have shares, and the youngest of each stay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tenant_tag import digest_end
from kvbm_common.tier.slots import Block
from kvbm_common.tier.tenants import Tenants, shares_of
from kvbm_disk_tier.objects.core.youngest import Youngest

NO_PARENT = SequenceHash(bytes(16))


def block_of(tenant: str, number: int, *, size: int = 64) -> Block:
    """A block of a tenant's only namespace; `""`: of none by name."""
    end = digest_end(tenant) if tenant else bytes(12)
    name = SequenceHash(number.to_bytes(16, "big"))
    return Block(name, NO_PARENT, bytes(20) + end, number, size)


def kept(
    stored: list[tuple[str, int]], most: int, shares: str = "", *, seed: int = 1
) -> dict[str, list[int]]:
    """The blocks that are kept of those of tenants, by when each was stored; in a drawn order."""
    youngest = Youngest(most, Tenants(shares_of(shares)))
    blocks = {block_of(one, n): (one, age) for n, (one, age) in enumerate(stored)}
    left = set(blocks)
    for block in random.Random(seed).sample(list(blocks), len(blocks)):
        left.discard(youngest.add(block, blocks[block][1]) or block_of("none", 0))
        youngest.check()
    assert {entry[-1] for entry in youngest.entries()} == left
    found: dict[str, list[int]] = {one: [] for one, _ in stored}
    for tenant, age in map(blocks.__getitem__, left):
        found[tenant].append(age)
    return {one: sorted(ages) for one, ages in found.items()}


def test_a_tenant_below_its_share_loses_nothing_however_old_it_is() -> None:
    """A neighbour that stores without end makes room itself."""
    stored = [("quiet", n) for n in range(10)] + [("noisy", 100 + n) for n in range(90)]
    found = kept(stored, 40, "quiet=1,noisy=1")
    assert found == {"quiet": list(range(10)), "noisy": list(range(160, 190))}


@pytest.mark.parametrize(
    ("shares", "gold", "tin"), [("", 20, 20), ("gold=3,tin=1", 30, 10), ("gold=1,*=3", 10, 30)]
)
def test_tenants_above_their_shares_keep_them(shares: str, gold: int, tin: int) -> None:
    stored = [("gold", n) for n in range(50)] + [("tin", 50 + n) for n in range(50)]
    found = kept(stored, 40, shares)
    assert found == {"gold": list(range(50 - gold, 50)), "tin": list(range(100 - tin, 100))}


def test_engines_without_a_tenant_are_one() -> None:
    stored = [("", n) for n in range(50)] + [("tin", n) for n in range(5)]
    assert kept(stored, 10) == {"": list(range(45, 50)), "tin": list(range(5))}


def test_shares_are_of_bytes() -> None:
    """Twenty blocks of one tenant are as long as ten of the other."""
    youngest = Youngest(12, Tenants())
    for number in range(20):
        youngest.add(block_of("long", number, size=128), number)
        youngest.add(block_of("short", 100 + number), number)
    sizes = [entry[-1].bytes for entry in youngest.entries()]
    assert (sizes.count(128), sizes.count(64)) == (4, 8)


@given(
    stored=st.lists(
        st.tuples(st.sampled_from(["", "gold", "tin"]), st.integers(0, 3)), max_size=40
    ),
    most=st.integers(1, 20),
    seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_the_order_of_a_listing_changes_no_more_than_one_block_of_a_tenant(
    stored: list[tuple[str, int]], most: int, seeds: tuple[int, int]
) -> None:
    first, second = (kept(stored, most, seed=seed) for seed in seeds)
    assert sum(map(len, first.values())) == min(most, len(stored))
    for tenant, ages in first.items():
        assert abs(len(ages) - len(second[tenant])) <= 1
        of_tenant = sorted(age for one, age in stored if one == tenant)
        assert ages == of_tenant[len(of_tenant) - len(ages) :]
