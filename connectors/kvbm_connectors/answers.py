"""Answers of the host tier: whether one is sound, and what the engine is told of it."""

from __future__ import annotations

from kvbm_common.wire.local import Found

from kvbm_connectors.messages import Hit, LoadResult


def is_sound(found: Found, asked: int) -> bool:
    """Does the answer fit the question and itself? A load is made of it as it stands."""
    count = len(found.slots)
    if not count == len(found.checksums) <= asked:
        return False
    elsewhere = [*found.disk_blocks, *found.remote_blocks, *found.object_blocks]
    if len(set(elsewhere)) < len(elsewhere) or any(index >= count for index in elsewhere):
        return False
    return count == 0 or (found.block_bytes > 0 and found.lease > 0)


def nothing(found: Found, reason: str) -> Found:
    """What is left of an answer that is not believed."""
    return Found(
        lookup=found.lookup, epoch=found.epoch, lease=0, slots=[], checksums=[], block_bytes=0,
        reason=reason,
    )  # fmt: skip


def hit_of(found: Found) -> Hit:
    """What the engine is told of an answer."""
    disk = len(found.disk_blocks) + len(found.object_blocks)
    remote = len(found.remote_blocks)
    blocks = len(found.slots)
    return Hit(blocks, blocks - disk - remote, disk, remote, found.reason)


def why_failed(result: LoadResult) -> str:
    """Why blocks that were found could not be used, in a word that is explained."""
    if result.corrupt:
        return "corrupt"
    return "lease_ended" if result.reason == "lease_ended" else "load_failed"
