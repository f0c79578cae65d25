"""Pages: keys become names under a namespace, host pools become regions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvbm_connectors.sglang.pages import (
    UnknownPool,
    is_shared,
    names_of,
    namespace_of,
    pages_of,
    refusal_of_pool,
    regions_of,
)

from tests.connectors.sglang.pool import LAYERS, PAGE_SIZE, PAGES, Config, Pool, keys_of

LAYOUTS = ["page_first", "page_first_direct", "layer_first"]


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_regions_are_the_pieces_of_every_page(layout: str, mla: bool) -> None:
    """Every byte of the pool is in exactly one piece of one page."""
    pool = Pool(layout, mla=mla)
    regions = regions_of(pool)
    assert len(regions) == (1 if mla else 2) * (LAYERS if layout == "layer_first" else 1)
    seen = np.zeros(pool.memory.nbytes, dtype=np.uint8)
    for region in regions:
        assert region.blocks == PAGES
        for page in range(PAGES):
            start = region.address + page * region.stride - pool.memory.ctypes.data
            seen[start : start + region.piece_bytes] += 1
    assert (seen == 1).all()


def test_pages_that_do_not_follow_are_refused() -> None:
    """A layout in which the last page is not where the first two say is not guessed at."""

    class Scattered(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            addresses, lengths = super().get_page_buffer_meta(indices)
            moved = 64 if indices.tolist()[0] == (PAGES - 1) * PAGE_SIZE else 0
            return [address + moved for address in addresses], lengths

    class Empty(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            return [], []

    for pool in (Scattered(), Empty(), Pool(pages=0)):
        with pytest.raises(UnknownPool):
            regions_of(pool)


def test_a_pool_of_one_page() -> None:
    """There is no second page to tell the stride."""
    (keys, values) = regions_of(Pool(pages=1))
    assert keys.stride >= keys.piece_bytes
    assert keys.blocks == values.blocks == 1


def test_token_slots_become_pages() -> None:
    """Pages may come in any order, but whole, and from a multiple of their size on."""
    pool = Pool()
    assert pages_of(pool, pool.indices([3, 0]), 2) == [3, 0]
    for wrong in (pool.indices([3]), pool.indices([3, 0])[:-1], pool.indices([3, 0]) + 1):
        with pytest.raises(UnknownPool):
            pages_of(pool, wrong, 2)


def test_a_key_is_another_name_in_another_namespace() -> None:
    """1. The same key, model and rank: the same name.
    2. Whatever makes bytes differ makes another name: a key says nothing of it.
    """
    pool, config, keys = Pool(), Config(tp_size=2), keys_of(1, 2)

    def named(
        config: Config, pool: Pool = pool, name: str = "kv", revision: str = "r"
    ) -> tuple[bytes, ...]:
        namespace = namespace_of(config, name, pool, regions_of(pool), revision=revision)
        return tuple(names_of(namespace.digest, b"", keys))

    first = named(config)
    assert first == named(Config(tp_size=2))
    assert len(set(first)) == 2
    others = [
        named(replace(config, model_name="another")),
        named(replace(config, tp_rank=1)),
        named(replace(config, tp_size=4)),
        named(replace(config, pp_size=2)),
        named(replace(config, pp_size=2, pp_rank=1)),
        named(replace(config, attn_cp_size=2, attn_cp_rank=1)),
        named(config, revision="s"),
        named(config, name="draft"),
        named(config, Pool("layer_first")),
        named(config, Pool(page_size=8)),
        named(config, Pool(mla=True)),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_stages_with_other_layers_have_other_names() -> None:
    """Goal: with another SGLANG_PP_LAYER_PARTITION, a stage with as many layers as before finds
    nothing of the layers that it had. Without a pipeline there is one partition, and one name."""

    def named(start_layer: int, pp_size: int) -> bytes:
        pool = Pool(start_layer=start_layer)
        config = Config(pp_rank=pp_size - 1, pp_size=pp_size)
        return namespace_of(config, "kv", pool, regions_of(pool)).digest

    assert named(8, pp_size=3) == named(8, pp_size=3) != named(12, pp_size=3)
    assert named(8, pp_size=1) == named(12, pp_size=1)


def test_a_stage_s_pool_without_layers_has_a_name() -> None:
    """Pools of states do not say which layers they hold."""
    pool, config = Pool(), Config(pp_size=2)
    del pool.start_layer, pool.end_layer
    assert "layers" not in namespace_of(config, "mamba", pool, regions_of(pool)).layout


def test_a_generation_changes_every_name() -> None:
    digest = bytes(32)
    keys = keys_of(1, 3)
    assert not set(names_of(digest, b"", keys)) & set(names_of(digest, b"12345678", keys))


def test_ranks_share_what_is_the_same_on_all_of_them() -> None:
    """Latent attention is replicated; its heads, states and drafts of attention are not."""
    config = Config(is_mla_model=True, tp_rank=1, tp_size=2)
    latent, heads = Pool(mla=True), Pool()
    assert is_shared(config, "kv", latent)
    assert not is_shared(config, "draft", heads)
    assert not is_shared(config, "mamba", latent)
    assert not is_shared(replace(config, is_mla_model=False), "kv", latent)

    def layout(rank: int) -> str:
        this = replace(config, tp_rank=rank)
        return namespace_of(this, "kv", latent, regions_of(latent)).layout

    assert layout(0) == layout(1)


def test_a_pool_of_heads_beside_latent_attention_is_refused() -> None:
    """SGLang stores a draft's heads on rank 0 alone; states it stores on every rank."""
    config = Config(is_mla_model=True, tp_size=2)
    latent, heads = Pool(mla=True), Pool()
    for rank in range(2):
        assert "rank 0 alone" in refusal_of_pool(replace(config, tp_rank=rank), "draft", heads)
    assert refusal_of_pool(config, "draft", latent) == ""
    assert refusal_of_pool(config, "mamba", heads) == ""
    assert refusal_of_pool(replace(config, tp_size=1), "draft", heads) == ""
    assert refusal_of_pool(replace(config, is_mla_model=False), "draft", heads) == ""
