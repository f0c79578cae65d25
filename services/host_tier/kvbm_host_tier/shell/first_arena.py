"""The first arena: its size by the settings, and its allocation before anything is served."""

from __future__ import annotations

import asyncio

from kvbm_common.config.settings import Settings
from kvbm_common.service.process import ServiceContext

from kvbm_host_tier.core.messages import NO_ARENA, ArenaInfo
from kvbm_host_tier.shell.puller import Puller

BLOCKS_SETTING = "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"


async def first_arena(context: ServiceContext, puller: Puller) -> ArenaInfo:
    """Allocate the arena, unless its size is a number of blocks, in a thread: it takes seconds.

    Raises ArenaNoSpace, ArenaUnavailable, and ArenaStopped when the service is stopped meanwhile.
    """
    settings = context.settings
    if settings.cpu_cache_override_num_blocks:
        return NO_ARENA
    size, setting = settings.cpu_cache_bytes, "DYN_KVBM_CPU_CACHE_GB"
    if is_disk_only(settings):
        size, setting = settings.staging_bytes, "KVBM_STAGING_GB"
    making = asyncio.create_task(asyncio.to_thread(puller.make_arena, size, setting=setting))
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait({making, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not making.done():
            puller.stop_making()
    return await making


def is_disk_only(settings: Settings) -> bool:
    """Return whether the arena only stages blocks for the disk."""
    return not settings.cpu_cache_bytes and not settings.cpu_cache_override_num_blocks
