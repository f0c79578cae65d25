"""Pages: what SGLang's page keys and host pools are in our terms. Pure.

A page key is a hash over the tokens up to the page's end. Where a request has them, it begins with
a cache salt and an extra key, which holds the id of a LoRA adapter: a hash of its name and path,
not of its content (adapters.py). The key says nothing of model, layout or rank, so it becomes a
name only under the namespace of the pool:

    name = BLAKE2b-128(key = namespace digest, person = "kvbm-page", generation ‖ page key)

`generation` is what `clear` changes. A page is a block; page p of a pool holds the token slots
from p × page size on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from kvbm_common.errors import KvbmError
from kvbm_common.identity import HASH_BYTES, Namespace, SequenceHash
from kvbm_common.wire.local import Region

from kvbm_connectors.sglang.engine_types import HostPool, Indices, StorageConfig

PERSON = b"kvbm-page"
PIECES_MAX = 4_096
"""Pieces of one page: two for each of a thousand layers are half of it."""
KV = "kv"
SHARDED = frozenset({"mamba"})
"""Pools that differ from rank to rank even where the KV pool does not."""


class UnknownPool(KvbmError):
    """A host pool whose pages are not where we understand them to be."""

    code = "unknown_pool"


def names_of(namespace: bytes, generation: bytes, keys: Sequence[str]) -> list[SequenceHash]:
    """Return the names of some pages; `namespace` is the digest."""
    base = hashlib.blake2b(generation, key=namespace, digest_size=HASH_BYTES, person=PERSON)
    names: list[SequenceHash] = []
    for key in keys:
        page = base.copy()
        page.update(key.encode())
        names.append(SequenceHash(page.digest()))
    return names


def pages_of(pool: HostPool, indices: Indices, count: int) -> list[int]:
    """Return the pages that the token slots of `count` keys are in; raises UnknownPool if the slots
    are not whole pages."""
    size = pool.page_size
    slots = indices.tolist()
    if len(slots) != count * size:
        raise UnknownPool(f"{len(slots)} token slots for {count} pages of {size}")
    starts = slots[::size]
    if any(start % size for start in starts):
        raise UnknownPool("a page that does not begin at a multiple of the page size")
    return [start // size for start in starts]


def regions_of(pool: HostPool) -> list[Region]:
    """Return where the pieces of all pages are, by the pool's own account; raises UnknownPool.

    The first two pages tell, and the last one must agree: layouts need not be known.
    """
    size, count = pool.page_size, pool.size // pool.page_size
    if count < 1:
        raise UnknownPool("a pool without pages")
    first, second, last = (_pieces(pool, page) for page in (0, min(1, count - 1), count - 1))
    regions = [
        Region(
            address=address,
            stride=(following - address) or length,
            piece_bytes=length,
            blocks=count,
        )
        for (address, length), (following, _) in zip(first, second, strict=True)
    ]
    found = [(r.address + (count - 1) * r.stride, r.piece_bytes) for r in regions]
    if found != last or any(region.stride < region.piece_bytes for region in regions):
        raise UnknownPool(f"the pages of layout {pool.layout!r}, of {size} slots, do not follow")
    return regions


def _pieces(pool: HostPool, page: int) -> list[tuple[int, int]]:
    indices = np.arange(page * pool.page_size, (page + 1) * pool.page_size)
    found = pool.get_page_buffer_meta(indices)
    addresses, lengths = found if found else ([], [])
    if not 0 < len(addresses) <= PIECES_MAX or len(addresses) != len(lengths):
        raise UnknownPool(f"a page of layout {pool.layout!r} in {len(addresses)} pieces")
    return list(zip(map(int, addresses), map(int, lengths), strict=True))


def is_shared(config: StorageConfig, pool_name: str, pool: HostPool) -> bool:
    """Return whether tensor-parallel ranks hold the same bytes in this pool: one writes them."""
    by_head = pool_name in SHARDED or hasattr(pool, "head_num")
    return config.is_mla_model and not by_head


def refusal_of_pool(config: StorageConfig, pool_name: str, pool: HostPool) -> str:
    """Return why no prefix could ever be restored with this pool, or `""`.

    Beside latent attention SGLang stores on rank 0 alone, but for states. It takes the minimum of
    all ranks' hits.
    """
    by_head = pool_name not in SHARDED and hasattr(pool, "head_num")
    if not config.is_mla_model or config.tp_size == 1 or not by_head:
        return ""
    return (
        f"pool {pool_name!r} is cut by heads beside latent attention, and SGLang stores it on rank "
        "0 alone: no page of it would be found on the others"
    )


def namespace_of(
    config: StorageConfig,
    pool_name: str,
    pool: HostPool,
    regions: Sequence[Region],
    *,
    revision: str = "",
) -> Namespace:
    """Return all that makes the bytes of two pages incompatible.

    What has no field of its own is in `layout`: the pool, where a page's pieces begin, which rank,
    and which layers a stage of a pipeline has.
    """
    shared = is_shared(config, pool_name, pool)
    sizes = ",".join(str(region.piece_bytes) for region in regions).encode()
    pieces = hashlib.blake2b(sizes, digest_size=4).hexdigest()
    ranks = [
        ("tp", 0, 1) if shared else ("tp", config.tp_rank, config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
    ]
    rank = "".join(f"/{kind}{of}.{size}" for kind, of, size in ranks if size > 1)
    rank += _layers(config, pool)
    return Namespace(
        model=config.model_name or "unnamed",
        revision=revision,
        block_tokens=pool.page_size,
        dtype=str(pool.dtype).removeprefix("torch."),
        layout=f"sglang/{pool_name}/{pool.layout}/{len(regions)}x{pieces}{rank}",
        layers=int(getattr(pool, "layer_num", 0)),
        heads=int(getattr(pool, "head_num", 0)),
        head_dim=int(getattr(pool, "head_dim", 0)),
        tensor_parallel=1 if shared else config.tp_size,
        pipeline_parallel=config.pp_size,
    )


def _layers(config: StorageConfig, pool: HostPool) -> str:
    """Return which layers a stage's pool holds: two partitions of a model may give a stage as many.

    Pools that do not say it, of states for one, differ by the variable that sets the partition.
    """
    bounds = [getattr(pool, name, None) for name in ("start_layer", "end_layer")]
    if config.pp_size == 1 or None in bounds:
        return ""
    return "/layers{}-{}".format(*bounds)
