"""Answers of the host tier: whether one is sound, and what the engine learns of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvbm_common.checksum import SUM_BYTES, pack_sums
from kvbm_common.tier.kv_groups import GroupRun, boundary_tokens, largest_boundary, needed
from kvbm_common.wire.local import Found

from kvbm_connectors.core.messages import Hit, LoadResult


def is_sound(
    found: Found, asked: int, groups: Sequence[GroupRun] = (), *, only_asks: bool = False
) -> bool:
    """Tell whether an answer fits the question and itself: a load is made of it as it stands."""
    assert asked > 0, f"lookup {found.lookup} asked for nothing"
    count = len(found.slots)
    if found.usable and (count or not only_asks or found.usable > asked):
        return False
    if not _are_boundaries(found, groups) or (groups and count != _needed(groups, found.boundary)):
        return False
    if not count == len(found.checksums) <= asked:
        return False
    if not _are_checksums(found.checksums):
        return False
    if found.part_sums and (not count or len(found.part_sums) % (count * SUM_BYTES)):
        return False
    elsewhere = [*found.disk_blocks, *found.remote_blocks, *found.object_blocks]
    if len(set(elsewhere)) < len(elsewhere) or any(index >= count for index in elsewhere):
        return False
    return count == 0 or (found.block_bytes > 0 and found.lease > 0)


def _are_checksums(values: Sequence[int]) -> bool:
    """Tell whether each of these has 64 bits; compared in C, since a hit has hundreds."""
    try:
        array("Q", values)
    except OverflowError:
        return False
    return True


def _are_boundaries(found: Found, groups: Sequence[GroupRun]) -> bool:
    """Tell whether both numbers of tokens are boundaries that were asked for, the hit's first.

    `shared` is 0, too, where a host tier does not say it.
    """
    if not groups:
        return found.boundary == found.shared == 0
    step, largest = boundary_tokens(groups), largest_boundary(groups)
    in_order = found.boundary <= (found.shared or largest) <= largest
    return in_order and not found.boundary % step and not found.shared % step


def _needed(groups: Sequence[GroupRun], boundary: int) -> int:
    """Return how many blocks a hit up to a boundary needs."""
    return sum(map(len, needed(groups, boundary)))


def checksums_of(found: Found) -> tuple[bytes, ...]:
    """Return, of each block, the packed checksums of its parts."""
    sums = found.part_sums or pack_sums(found.checksums)
    step = len(sums) // max(1, len(found.slots))
    assert step or not found.slots, f"lookup {found.lookup}: blocks without checksums"
    return tuple(sums[start : start + step] for start in range(0, len(sums), step or 1))


def nothing(lookup: int, epoch: int, reason: str) -> Found:
    """Return the answer that nothing was found: none came, or one that is not believed."""
    assert reason, f"lookup {lookup} finds nothing without a reason"
    return Found(
        lookup=lookup, epoch=epoch, lease=0, slots=[], checksums=[], block_bytes=0,
        reason=reason,
    )  # fmt: skip


def hit_of(found: Found) -> Hit:
    """Return what the engine learns of an answer."""
    disk = len(found.disk_blocks) + len(found.object_blocks)
    remote = len(found.remote_blocks)
    blocks = len(found.slots) or found.usable
    assert disk + remote <= blocks, f"lookup {found.lookup}: {disk} + {remote} of {blocks} blocks"
    return Hit(
        blocks, blocks - disk - remote, disk, remote, found.reason, found.boundary, found.shared
    )


def why_failed(result: LoadResult) -> str:
    """Return why blocks that were found could not be used, by the word that is explained."""
    assert not all(result.intact), "nothing has failed"
    if result.corrupt:
        return "corrupt"
    return "lease_ended" if result.reason == "lease_ended" else "load_failed"
