"""Checks of the directories of disk tiers, and of the stores in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm_common.config.settings import Settings

from kvbm_cli.doctor.facts import DiskFacts, Facts, LeftStore
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.printing import size


def disk_checks(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Judge each directory, with those that share its disk, and name the stores left there."""
    slots, share = settings.disk_cache_override_num_blocks or 0, 0
    if not slots:  # Blocks have no bytes before an engine connects.
        share = settings.disk_cache_bytes // max(1, len(facts.disks))
    for number, disk in enumerate(facts.disks):
        beside = [one for one in facts.disks if one is not disk and disk.shares_disk(one)]
        if slots or share:
            yield _disk(disk, share, beside, settings)
            yield from _same(disk, facts.disks[:number])
        yield from (_left(store) for store in disk.left)


def _same(disk: DiskFacts, before: Sequence[DiskFacts]) -> Iterator[Finding]:
    """Name the directory that is this one by another path, as by a link."""
    same = [one for one in before if one.is_there and one.place == disk.place]
    if same:
        yield Finding(
            f"disk {disk.path}",
            "better",
            f"it is the same directory as {same[0].path}",
            "List each disk once in DYN_KVBM_DISK_CACHE_DIR: a second disk tier adds no speed.",
        )


def _left(store: LeftStore) -> Finding:
    found = "of another host's name, which no disk tier uses"
    advice = (
        "Was this host renamed? Set KVBM_HOST to the old name to keep the blocks, or delete the "
        "directory."
    )
    if store.is_own:
        found = "that no disk tier of these settings uses"
        advice = (
            "Set DYN_KVBM_DISK_CACHE_DIR, KVBM_INSTANCE and the size as before to keep the blocks, "
            "or delete the directory."
        )
    return Finding(f"store {store.path}", "better", f"{size(store.bytes)} {found}", advice)


def _disk(disk: DiskFacts, share: int, beside: Sequence[DiskFacts], settings: Settings) -> Finding:
    name = f"disk {disk.path}"
    if disk.error:
        advice = disk.advice or "Make the directory, owned by the services' user."
        return Finding(name, "wrong", disk.error, advice)
    own = {one.place: one.own_bytes for one in (disk, *beside)}
    has_room = disk.free_bytes + sum(own.values())
    found = f"{size(has_room)} for {size(share) if share else 'its blocks'}"
    if beside and share:
        found += f" in each of {len(beside) + 1} directories"
    if has_room < share * (len(beside) + 1):
        return Finding(name, "wrong", found, "A smaller DYN_KVBM_DISK_CACHE_GB or a larger disk.")
    if not disk.direct and not settings.disk_disable_o_direct:
        return Finding(
            name,
            "wrong",
            f"{found}; no O_DIRECT",
            "DYN_KVBM_DISK_DISABLE_O_DIRECT=true, or a file system that has it.",
        )
    if not disk.allocates and not settings.disk_zerofill_fallback:
        return Finding(
            name,
            "wrong",
            f"{found}; no fallocate",
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK=true, or a file system that has it.",
        )
    made = "; the directory will be made" if disk.will_be_made else ""
    return Finding(name, "ok", f"{found}, O_DIRECT {'works' if disk.direct else 'off'}{made}")
