"""Service of the object tier: the disk tier's shell over a bucket or a shared directory."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.extras import ExtraMissing
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run

from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import limits_of
from kvbm_disk_tier.core.memory import parts_of
from kvbm_disk_tier.objects.core.core import ObjectTierCore
from kvbm_disk_tier.objects.core.packing import Packing, Plain
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.counters import listed_counter, requests_counter
from kvbm_disk_tier.objects.shell.directory import Directory
from kvbm_disk_tier.objects.shell.file_transport import FileTransport
from kvbm_disk_tier.objects.shell.medium import ObjectMedium, ObjectOptions
from kvbm_disk_tier.objects.shell.mover import ObjectMover, Transport
from kvbm_disk_tier.objects.shell.object_store import ObjectStore
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions
from kvbm_disk_tier.shell.service import keys_of
from kvbm_disk_tier.shell.tier_shell import TierShell, serve_nothing

if TYPE_CHECKING:
    from kvbm_disk_tier.shell.cipher import Keys

log = logging.getLogger(__name__)


async def serve(context: ServiceContext) -> None:
    """Run an object tier."""
    settings = context.settings
    limits = limits_of(settings)
    core = ObjectTierCore(
        host=context.host,
        instance=context.instance,
        epoch=context.epoch,
        frequency_filter=FrequencyFilter(enabled=not settings.disable_object_offload_filter),
        limits=limits,
        policy=settings.disk_eviction_policy,
        ttl_ms=round(1000 * settings.object_ttl_s),
    )
    if not settings.object_enabled:
        why = "DYN_KVBM_OBJECT_ENABLED is false, and KVBM_OBJECT_URL is not set"
        await serve_nothing(context, core, why)
        return
    medium = make_medium(context)
    context.footprint.declare(
        lambda: parts_of(
            limits,
            slot_count=core.view.slot_count(),
            buffer_bytes=medium.buffer_bytes,
        )
    )
    try:
        await TierShell(context, core, medium).run()
    finally:
        medium.close()


def make_medium(context: ServiceContext) -> ObjectMedium:
    """Make the medium for the configured store, without a request; raises BadKeys."""
    settings = context.settings
    keys = keys_of(settings)
    options = ObjectOptions(
        prefix=settings.object_prefix,
        slot_count=settings.object_num_blocks,
        list_s=settings.object_list_s,
        label=f"{context.host}-{context.instance}",
        keys=keys,
    )
    requests = requests_counter(context.counters)

    def counted(request: str, ok: bool) -> None:
        requests.labels(request, "ok" if ok else "failed").inc()

    lanes = settings.object_concurrency
    directory = settings.object_directory
    store: ObjectStore
    transport: Transport
    if directory is not None:
        listed = listed_counter(context.counters)
        store = Directory(
            directory, counted, lambda kind, count: listed.labels(kind=kind).inc(count)
        )
        transport = FileTransport(directory, lanes)
    else:
        where = _bucket_of(settings)
        store = Bucket(where, counted)
        transport = MoverThread(
            f"{context.source}-{context.epoch}",
            backends=("OBJ",),
            object_params=where.for_nixl(threads=lanes),
        )
    mover = ObjectMover(
        transport=transport, lanes=lanes, counters=context.counters, packing=_packing(keys)
    )
    return ObjectMedium(options, store, mover, context.counters)


def _bucket_of(settings: Settings) -> BucketOptions:
    return BucketOptions(
        bucket=settings.object_bucket,
        endpoint=settings.object_endpoint,
        region=settings.object_region,
        access_key=settings.object_access_key,
        secret_key=settings.object_secret_key,
        path_style=settings.object_path_style,
    )


def _packing(keys: Keys | None) -> Packing:
    if keys is None:
        return Plain()
    from kvbm_disk_tier.objects.shell.sealed_packing import Sealed

    log.info("objects are sealed, with keys %s", ", ".join(keys.ids()))
    return Sealed(keys)


def check(settings: Settings) -> None:
    """Check whether this configuration can have an object tier at all; raises KvbmError."""
    if not settings.object_enabled or settings.object_directory is not None:
        return
    if not settings.object_bucket:
        accepted = (
            "the name of a bucket when DYN_KVBM_OBJECT_ENABLED is true, or KVBM_OBJECT_URL instead"
        )
        raise ConfigError("DYN_KVBM_OBJECT_BUCKET", "", accepted)
    if find_spec("boto3") is None:
        raise ExtraMissing("DYN_KVBM_OBJECT_BUCKET", "boto3", "s3")


def main() -> None:
    """Run the object tier: the entry point of `kvbm serve object-tier`."""
    run("object-tier", serve, check=check)
