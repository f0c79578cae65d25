"""Service of the disk tier: the shell around its core and the store of its directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.runtime.heap import give_back_large
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run
from kvbm_common.tier.blocks import BATCH_BLOCKS_MOST, batch_blocks
from kvbm_common.tier.layout import Layout

from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import limits_of
from kvbm_disk_tier.core.memory import parts_of
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.mover import TRANSFER_BYTES, DiskMover
from kvbm_disk_tier.shell.nixl_backend import AUTO, file_mover
from kvbm_disk_tier.shell.queue_depth import Tuning
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_header import CIPHER, EXTRA_BYTES
from kvbm_disk_tier.shell.store_options import StoreBusy, StoreError, StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread
from kvbm_disk_tier.shell.tier_shell import TierShell, serve_nothing

if TYPE_CHECKING:
    from kvbm_disk_tier.shell.cipher import Keys

LOCK_DEADLINE_S = 4.5
"""A predecessor whose place we have taken is gone by then (see `process.EXIT_DEADLINE_S`), and a
disk that has not answered hangs."""
LOCK_TRY_S = 0.1
SEALED_BATCHES = 6
"""Batches that are sealed or opened at once: a sealed store takes so much more memory."""
SEALED_TRANSFER_BYTES = TRANSFER_BYTES + BATCH_BLOCKS_MOST * EXTRA_BYTES
"""Bytes of the pool that one transfer of the mover takes at most."""

log = logging.getLogger(__name__)


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
    thread = StoreThread(Store(options))
    if not await _lock(thread, context.stopping):
        thread.close()
        return
    tuning = Tuning(settings.disk_queue_depth, limits.batch_blocks_max, limits.batch_bytes)
    medium = FileMedium(thread, _mover(context, keys, thread.store), tuning)
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


def _mover(context: ServiceContext, keys: Keys | None, store: Store) -> DiskMover:
    wanted = context.settings.disk_nixl_backend
    if not store.locks and wanted != AUTO:
        log.warning("NIXL %s cannot be tried there, POSIX is used instead", wanted.upper())
        wanted = AUTO
    options = store.options
    mover = file_mover(
        f"{context.source}-{context.epoch}", wanted, options.directory, direct=options.direct
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


async def _lock(thread: StoreThread, stopping: asyncio.Event) -> bool:
    """Lock the store, once a predecessor that is just ending lets go of it; raises StoreBusy.

    One whose directory cannot be used now, or hangs, is left to its core: that says so, and tries
    again. Returns False where the service is to stop instead.
    """
    give_up_s = time.monotonic() + LOCK_DEADLINE_S
    while not stopping.is_set():
        attempt = asyncio.wrap_future(thread.call(thread.store.acquire))
        attempt.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({attempt}, timeout=LOCK_DEADLINE_S)
        try:
            if attempt.done():
                attempt.result()
        except StoreBusy:
            if time.monotonic() > give_up_s:
                raise
        except StoreError:
            return True
        else:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCK_TRY_S):
                await stopping.wait()
    return False


def main() -> None:
    """Run the disk tier: the entry point of `kvbm serve disk-tier`."""
    give_back_large()  # A journal is read into columns of a million rows.
    run("disk-tier", serve)
