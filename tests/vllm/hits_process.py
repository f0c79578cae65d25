"""Hits of vLLM's own KV cache coordinator beside those of our rule, on drawn groups and blocks.

`python -m tests.vllm.hits_process SEEDS` writes a JSON object: how many hits there were, and the
seeds where the two differ. vLLM alone says which blocks of each group a hit uses.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from math import lcm
from typing import Any

TOKENS_MAX = 400
BASES = (2, 4)
"""Tokens of vLLM's hash blocks; a group's block is one to four of them."""


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seeds = int(sys.argv[1])
    outcomes = {seed: outcome(random.Random(seed)) for seed in range(seeds)}
    differ = [[seed, text] for seed, (_, text) in outcomes.items() if text]
    json.dump({"hits": sum(tokens > 0 for tokens, _ in outcomes.values()), "differ": differ}, ours)
    ours.close()


def drawn_groups(rng: random.Random) -> tuple[int, list[Any]]:
    """Draw vLLM's hash block and the specs of up to four groups.

    vLLM takes chunked attention beside blocks of one size alone, with chunks of whole blocks.
    """
    from vllm import __version_tuple__
    from vllm.v1 import kv_cache_interface as specs

    from tests.vllm.device.kinds import FEATURES, full, states, window

    modes = ["align", "all"] if __version_tuple__[:2] < (0, 33) else ["align"]
    base, count = rng.choice(BASES), rng.randint(1, 4)
    is_even = rng.random() < 0.4
    sizes = [base * rng.randint(1, 4)] * count
    if not is_even:
        sizes = [base * rng.randint(1, 4) for _ in sizes]
    groups: list[Any] = []
    for size in sizes:
        kind = rng.choice("fwwcs" if len(set(sizes)) == 1 else "fwws")
        if kind == "f":
            groups.append(full(size))
        elif kind == "w":
            groups.append(window(rng.randint(1, 40), size))
        elif kind == "s":
            groups.append(states(size, rng.choice(modes)))
        else:
            spec = full(size)
            groups.append(
                specs.ChunkedLocalAttentionSpec(
                    block_size=size, attention_chunk_size=size * rng.randint(1, 5),
                    dtype=spec.dtype, **FEATURES,
                )
            )  # fmt: skip
    return base, groups


def outcome(rng: random.Random) -> tuple[int, str]:
    """Return vLLM's hit in one drawn case, and how ours differs from it; `""`: not at all."""
    from kvbm_common.tier.kv_groups import GroupRun, has_each, needed, reach
    from kvbm_connectors.vllm.kv_groups import chunk_tokens, window_blocks

    base, groups = drawn_groups(rng)
    step = lcm(*[group.block_size for group in groups])
    total = min(TOKENS_MAX, step * rng.randint(1, 8) + rng.randrange(step))
    share = rng.choice([0.3, 0.6, 0.8, 0.9, 0.97, 1.0])
    names = [
        [at.to_bytes(2, "big") + n.to_bytes(14, "big") for n in range(total // one.block_size)]
        for at, one in enumerate(groups)
    ]
    there = {name for row in names for name in row if rng.random() < share}
    tokens, used = hit_of_vllm(base, groups, names, there, total)
    runs = [
        GroupRun(one.block_size, (total - 1) // step * step // one.block_size,
                 window_blocks(one), chunk_tokens(one))
        for one in groups
    ]  # fmt: skip
    asked: Any = [row[: run.blocks] for row, run in zip(names, runs, strict=True)]
    mine = reach(runs, asked, has_each(there.__contains__)).tokens
    if mine != tokens:
        return tokens, f"{tokens} tokens of {total}, and ours {mine}: {runs}"
    wanted = [set(places) for places in needed(runs, tokens)]
    if used == wanted:
        return tokens, ""
    return tokens, f"a hit of {tokens} tokens is of blocks {used}, and ours of {wanted}: {runs}"


def hit_of_vllm(
    base: int,
    groups: Sequence[Any],
    names: Sequence[Sequence[bytes]],
    there: set[bytes],
    total: int,
) -> tuple[int, list[set[int]]]:
    """Return the tokens of vLLM's hit on these blocks, and which blocks of each group it uses."""
    from vllm.v1 import kv_cache_interface as specs
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

    config = specs.KVCacheConfig(
        num_blocks=2 + sum(map(len, names)), kv_cache_tensors=[], kv_cache_layout="LBHNC",
        kv_cache_groups=[
            specs.KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(groups)
        ],
    )  # fmt: skip
    unit = base if len(groups) > 1 else groups[0].block_size
    step = lcm(*[group.block_size for group in groups])
    coordinator = get_kv_cache_coordinator(
        config, max_model_len=1000, max_in_flight_tokens=1000, use_eagle=False,
        enable_caching=True, enable_kv_cache_events=False, dcp_world_size=1, pcp_world_size=1,
        scheduler_block_size=step, hash_block_size=unit, allow_partial_hash_hits=False,
    )  # fmt: skip
    hashes = [utils.BlockHash(n.to_bytes(32, "big")) for n in range(1, total // unit + 1)]
    pool = coordinator.block_pool
    free = iter(pool.blocks[1:])
    for at, (spec, row) in enumerate(zip(groups, names, strict=True)):
        own: Any = hashes
        if spec.block_size != unit:
            own = utils.BlockHashListWithBlockSize(hashes, unit, spec.block_size)
        for place, name in enumerate(row):
            if name in there:
                key = utils.make_block_hash_with_group_id(own[place], at)
                pool.cached_block_hash_to_block.insert(key, next(free))
    blocks, tokens, *_ = coordinator.find_longest_cache_hit(hashes, total - 1)
    used = [{at for at, one in enumerate(row) if not one.is_null} for row in blocks]
    return int(tokens), used


if __name__ == "__main__":
    main()
