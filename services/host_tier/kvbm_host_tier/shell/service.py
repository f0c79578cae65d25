"""The host tier service: its core, its shell, and what they are made of."""

from __future__ import annotations

import logging
import os

from kvbm_common.memory.arena import ArenaStopped, remove_stale
from kvbm_common.service.process import ServiceContext, run
from kvbm_common.service.tracing import wanted
from kvbm_common.tier.batches import BATCH_UNIT_BYTES

from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.shell.engine_socket import EngineSocket
from kvbm_host_tier.shell.first_arena import first_arena, is_disk_only
from kvbm_host_tier.shell.host_tier_shell import HostTierShell
from kvbm_host_tier.shell.puller import Puller

log = logging.getLogger(__name__)


async def serve(context: ServiceContext) -> None:
    """Run the host tier of this host."""
    settings = context.settings
    prefix = f"kvbm-{context.host}-{context.instance}-"
    remove_stale(settings.shm_dir, prefix)
    puller = Puller(settings.shm_dir, name=f"{prefix}{context.epoch}", counters=context.counters)
    try:
        core = HostTierCore(
            host=context.host,
            instance=context.instance,
            epoch=context.epoch,
            arena=await first_arena(context, puller),
            limits=_limits(context),
            policy=settings.eviction_policy,
            staging=is_disk_only(settings),
        )
        engines = EngineSocket(
            settings.host_tier_endpoint, context.counters, instance=context.instance
        )
        async with engines:
            await HostTierShell(context, core, puller, engines).run()
    except ArenaStopped as error:
        log.info("%s", error)
    finally:
        puller.close()


def _limits(context: ServiceContext) -> HostTierLimits:
    settings = context.settings
    return HostTierLimits(
        slot_count=settings.cpu_cache_override_num_blocks,
        transfers_max=settings.max_concurrent_transfers,
        batch_blocks_max=settings.max_transfer_batch_size,
        batch_bytes=settings.max_transfer_batch_size * BATCH_UNIT_BYTES,
        peer_pulls_max=settings.peer_pulls_max if settings.peer_pulls else 0,
        peer_deadline_ms=settings.peer_deadline_ms,
        hit_window=settings.cache_stats_max_requests,
        explain_requests=settings.explain_requests,
        recompute_tokens_per_s=settings.recompute_tokens_per_s,
        traces=wanted(settings, os.environ),
        scrub_cpu_percent=settings.scrub_cpu_percent,
    )


def main() -> None:
    """Run the host tier: the entry point of `kvbm serve host-tier`."""
    run("host-tier", serve)
