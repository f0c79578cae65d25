"""The blocks of a request that a lookup asks for: as many as it can name, no failed ones."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.failed_blocks import FailedBlocks
from kvbm_common.tier.kv_groups import (
    GroupRun,
    boundary_tokens,
    has_each,
    largest_boundary,
    reach,
    split,
)
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from msgspec.structs import replace

AskedBlocks = tuple[Sequence[SequenceHash], Sequence[GroupRun]]
"""The names, group after group, and the KV groups that they are of; none: there is one group."""


def as_many_as_fit(hashes: Sequence[SequenceHash], groups: Sequence[GroupRun]) -> AskedBlocks:
    """Return the blocks before the largest boundary for which a lookup can name all blocks."""
    if len(hashes) <= MATCH_BLOCKS_MAX:
        return hashes, groups
    if not groups:
        return hashes[:MATCH_BLOCKS_MAX], ()
    step = boundary_tokens(groups)
    fitting = MATCH_BLOCKS_MAX // sum(step // one.block_tokens for one in groups) * step
    kept = _up_to(fitting, hashes, groups)
    assert len(kept[0]) <= MATCH_BLOCKS_MAX, f"{len(kept[0])} blocks of {groups}"
    return kept


def without_failed(
    hashes: Sequence[SequenceHash],
    groups: Sequence[GroupRun],
    failed: FailedBlocks,
    now_ms: int,
    *,
    is_careful: bool = False,
) -> AskedBlocks:
    """Return the blocks of the largest hit that needs no block whose load has failed.

    The answer may be a smaller hit, whose window needs a failed block. With `is_careful` no
    smaller hit may need one either.
    """
    assert now_ms >= 0, f"asked at {now_ms} ms"
    if not groups:
        return hashes[: failed.run_before(hashes, now_ms)], ()
    if not len(failed):
        return _up_to(largest_boundary(groups), hashes, groups)
    names = split(groups, hashes)
    if is_careful:
        runs = zip(groups, names, strict=True)
        good = min(failed.run_before(run, now_ms) * one.block_tokens for one, run in runs)
        return _up_to(good // boundary_tokens(groups) * boundary_tokens(groups), hashes, groups)
    has = has_each(lambda name: not failed.is_failed(name, now_ms))
    return _up_to(reach(groups, names, has).tokens, hashes, groups)


def _up_to(tokens: int, hashes: Sequence[SequenceHash], groups: Sequence[GroupRun]) -> AskedBlocks:
    """Return the whole blocks of each group within the first `tokens` tokens."""
    assert tokens >= 0, f"{tokens} tokens of {groups}"
    counts = [min(one.blocks, tokens // one.block_tokens) for one in groups]
    shorter = [replace(one, blocks=count) for one, count in zip(groups, counts, strict=True)]
    names = zip(split(groups, hashes), counts, strict=True)
    return [name for found, count in names for name in found[:count]], shorter
