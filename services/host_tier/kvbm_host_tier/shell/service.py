"""The host tier service: its core, its shell, and what they are made of."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from kvbm_common.access.curve import refuse_open_to_engines
from kvbm_common.config.settings import Settings
from kvbm_common.memory.arena import ArenaStopped, remove_stale
from kvbm_common.memory.leftovers import remove_left
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run
from kvbm_common.service.tracing import wanted
from kvbm_common.tier.blocks import BATCH_UNIT_BYTES

from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.memory import parts_of
from kvbm_host_tier.core.messages import NO_ARENA, ArenaInfo
from kvbm_host_tier.core.view import HostTierView
from kvbm_host_tier.shell.engine_socket import EngineSocket
from kvbm_host_tier.shell.host_tier_shell import HostTierShell
from kvbm_host_tier.shell.puller import Puller

log = logging.getLogger(__name__)


async def serve(context: ServiceContext) -> None:
    """Run the host tier of this host."""
    settings = context.settings
    prefix = f"kvbm-{context.host}-{context.instance}-"
    await asyncio.to_thread(_sweep, settings.shm_dir, prefix)
    puller = Puller(settings.shm_dir, name=f"{prefix}{context.epoch}", counters=context.counters)
    limits = _limits(context)
    try:
        core = HostTierCore(
            host=context.host,
            instance=context.instance,
            epoch=context.epoch,
            arena=await first_arena(context, puller),
            limits=limits,
            policy=settings.eviction_policy,
            staging=is_disk_only(settings),
        )
        context.footprint.declare(lambda: _memory_of(core.view, limits))
        engines = EngineSocket(
            settings.host_tier_endpoint,
            context.counters,
            instance=context.instance,
            curve_file=settings.curve_server_file,
        )
        async with engines:
            await HostTierShell(context, core, puller, engines).run()
    except ArenaStopped as error:
        log.info("%s", error)
    finally:
        puller.close()


def _sweep(shm_dir: Path, prefix: str) -> None:
    """Remove what a former life of this instance has left, and killed processes of other names."""
    remove_stale(shm_dir, prefix)
    for left in remove_left(shm_dir):
        log.warning("removed %s, %d bytes: its owner was killed", left.path, left.bytes)


def _memory_of(view: HostTierView, limits: HostTierLimits) -> dict[str, int]:
    """Return the parts of the memory; a tier below has as many blocks as fit into its size."""
    layout = view.layout
    if layout is None:
        return parts_of(limits, slot_count=limits.slot_count or 0, below_count=0)
    below = limits.below_count(layout.slot_bytes)
    return parts_of(limits, slot_count=layout.slot_count, below_count=below)


def _limits(context: ServiceContext) -> HostTierLimits:
    settings = context.settings
    return HostTierLimits(
        slot_count=settings.cpu_cache_override_num_blocks,
        transfers_max=settings.max_concurrent_transfers,
        batch_blocks_max=settings.max_transfer_batch_size,
        batch_bytes=settings.max_transfer_batch_size * BATCH_UNIT_BYTES,
        peer_pulls_max=settings.peer_pulls_max if settings.peer_pulls else 0,
        peer_deadline_ms=settings.peer_deadline_ms,
        tenant_shares=settings.tenant_shares,
        hint_pin_percent=settings.hint_pin_percent,
        hit_window=settings.cache_stats_max_requests,
        explain_requests=settings.explain_requests,
        history_entries=settings.history_entries,
        disk_bytes=settings.disk_cache_bytes,
        disk_blocks=settings.disk_cache_override_num_blocks,
        object_blocks=settings.object_num_blocks if settings.object_enabled else 0,
        miss_filter=settings.miss_filter,
        recompute_tokens_per_s=settings.recompute_tokens_per_s,
        load_or_compute=settings.load_or_compute,
        traces=wanted(settings, os.environ),
        scrub_cpu_percent=settings.scrub_cpu_percent,
        scrub_round_ms=round(settings.scrub_round_s * 1000),
    )


def main() -> None:
    """Run the host tier: the entry point of `kvbm serve host-tier`."""
    run("host-tier", serve, check=_check)


def _check(settings: Settings) -> None:
    """Raise ConfigError for a socket that would be open."""
    refuse_open_to_engines(settings, settings.host_tier_endpoint, "KVBM_HOST_TIER_ENDPOINT")


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
