"""Service of the disk tier: the shell around its core and the store of its directory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.service.process import ServiceContext, run
from kvbm_common.tier.blocks import BATCH_BLOCKS_MOST, batch_blocks
from kvbm_common.tier.layout import Layout

from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import limits_of
from kvbm_disk_tier.core.memory import parts_of
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.mover import TRANSFER_BYTES, DiskMover
from kvbm_disk_tier.shell.nixl_backend import file_mover
from kvbm_disk_tier.shell.queue_depth import Tuning
from kvbm_disk_tier.shell.store import Store, StoreBusy, StoreError, StoreOptions
from kvbm_disk_tier.shell.store_header import CIPHER, EXTRA_BYTES
from kvbm_disk_tier.shell.tier_shell import TierShell, serve_nothing

if TYPE_CHECKING:
    from kvbm_disk_tier.shell.cipher import Keys

LOCK_DEADLINE_S = 4.5
"""A predecessor whose place we have taken is gone by then (see `process.EXIT_DEADLINE_S`)."""
LOCK_TRY_S = 0.1
SEALED_BATCHES = 6
"""Batches that are sealed or opened at once: a sealed store takes so much more memory."""
SEALED_TRANSFER_BYTES = TRANSFER_BYTES + BATCH_BLOCKS_MOST * EXTRA_BYTES
"""What one transfer of the mover takes of the pool at most."""


async def serve(context: ServiceContext) -> None:
    """Run a disk tier; without a disk cache it only says that it is there, and empty."""
    settings = context.settings
    keys = keys_of(settings)
    limits = limits_of(settings)
    options = StoreOptions(
        directory=settings.disk_store(settings.disk_cache_dir, context.instance),
        capacity_bytes=settings.disk_cache_bytes,
        slot_count=settings.disk_cache_override_num_blocks or None,
        direct=not settings.disk_disable_o_direct,
        zerofill_fallback=settings.disk_zerofill_fallback,
        cipher=CIPHER if keys is not None else "",
        sync=settings.disk_sync,
        journal_records_per_slot=limits.journal_records_per_slot,
        host=context.host,
        state_dir=settings.state_dir,
    )
    core = DiskTierCore(
        host=context.host,
        instance=context.instance,
        epoch=context.epoch,
        frequency_filter=FrequencyFilter(enabled=not settings.disable_disk_offload_filter),
        limits=limits,
        policy=settings.disk_eviction_policy,
        write_budget=int(settings.disk_write_budget_gb_per_day * 1e9),
    )
    if options.capacity_bytes == 0 and options.slot_count is None:
        await serve_nothing(context, core, "DYN_KVBM_DISK_CACHE_GB is 0")
        return
    store = await _wait_store(options, context.stopping)
    if store is None:
        return
    tuning = Tuning(settings.disk_queue_depth, limits.batch_blocks_max, limits.batch_bytes)
    medium = FileMedium(store, _mover(context, keys, options), tuning)
    sealed = SEALED_BATCHES * SEALED_TRANSFER_BYTES if keys is not None else 0
    context.footprint.declare(
        lambda: parts_of(limits, slot_count=core.view.slot_count(), buffer_bytes=sealed)
    )
    try:
        await TierShell(context, core, medium).run()
    finally:
        medium.close()


def keys_of(settings: Settings) -> Keys | None:
    """Return the keys that blocks are sealed with, None: they are not; raises BadKeys."""
    if settings.disk_keys and settings.disk_keys_file is not None:
        raise KvbmError("KVBM_DISK_KEYS and KVBM_DISK_KEYS_FILE are both set: one is enough")
    if not settings.disk_keys and settings.disk_keys_file is None:
        return None
    from kvbm_disk_tier.shell.cipher import Keys  # Needs a library that plain blocks do not.

    if settings.disk_keys_file is not None:
        return Keys.read(settings.disk_keys_file, "KVBM_DISK_KEYS_FILE")
    return Keys.parse(settings.disk_keys, "KVBM_DISK_KEYS")


def _mover(context: ServiceContext, keys: Keys | None, options: StoreOptions) -> DiskMover:
    mover = file_mover(
        f"{context.source}-{context.epoch}",
        context.settings.disk_nixl_backend,
        options.directory,
        direct=options.direct,
    )
    if keys is None:
        return DiskMover(mover=mover, counters=context.counters)
    from kvbm_disk_tier.shell.sealed_mover import SealedMover

    limits = limits_of(context.settings)

    def pool_bytes(layout: Layout) -> int:
        stride = layout.slot_bytes
        batch = batch_blocks(limits.batch_blocks_max, limits.batch_bytes, stride)
        transfers = SEALED_BATCHES * min(batch * stride, SEALED_TRANSFER_BYTES)
        return max(transfers, layout.slab_bytes)  # A block of any size passes through.

    return SealedMover(mover=mover, counters=context.counters, keys=keys, pool_bytes=pool_bytes)


async def _wait_store(options: StoreOptions, stopping: asyncio.Event) -> Store | None:
    """Take the store, from a predecessor that is just ending if need be; raises StoreBusy.

    One whose directory cannot be used now is returned as well: its core says so, and tries again.
    """
    store = Store(options)
    give_up_s = time.monotonic() + LOCK_DEADLINE_S
    while not stopping.is_set():
        try:
            await asyncio.to_thread(store.acquire)
        except StoreBusy:
            if time.monotonic() > give_up_s:
                raise
        except StoreError:
            return store
        else:
            return store
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCK_TRY_S):
                await stopping.wait()
    return None


def main() -> None:
    """Run the disk tier: the entry point of `kvbm serve disk-tier`."""
    run("disk-tier", serve)
