"""Collector: makes what an operator sees from the answers of all instances.

Pure: a `FleetView` goes in, views come out. Nothing here waits, reads a clock or knows HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm_common.wire.events import Tier
from kvbm_common.wire.metrics import MEMORY, MEMORY_BOUND

from kvbm_metrics.core import flows
from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.kvbm_totals import Totals, hit_rate, kvbm_view
from kvbm_metrics.core.models import (
    KindView,
    MediumView,
    ServiceView,
    StatusView,
    TierView,
    WorkerView,
)
from kvbm_metrics.core.rates import Rate, Rates
from kvbm_metrics.core.recent_models import GoneView
from kvbm_metrics.core.sizes import (
    USED_STATES,
    bytes_of,
    fragmentation,
    occupancy,
    part_used,
    size_view,
    sizes_of,
    tenant_view,
    tenants_of,
)
from kvbm_metrics.core.worker_view import worker_view

TIER_OF_KIND: Mapping[str, Tier] = {
    "host-tier": "host",
    "disk-tier": "disk",
    "object-tier": "object",
}
TIERS: tuple[Tier, ...] = ("device", "host", "disk", "object")


def service_views(view: FleetView) -> list[ServiceView]:
    """Return every registered instance."""
    return [_service_view(one) for one in view.instances]


def _service_view(one: Instance) -> ServiceView:
    record = one.record
    return ServiceView(
        kind=record.kind,
        host=record.host,
        instance=record.instance,
        epoch=record.epoch,
        pid=record.pid,
        started_ms=record.started_ms,
        info=record.info,
        up=one.up,
        ready=one.ready,
        reasons=one.reasons,
        seq=one.stats.seq if one.stats else 0,
        positions=one.stats.positions if one.stats else {},
        memory_bytes=_figure(one, MEMORY),
        memory_bound_bytes=_figure(one, MEMORY_BOUND),
    )


def _figure(one: Instance, name: str) -> int:
    return int(one.stats.figures.get(name, 0.0)) if one.stats else 0


def tier_views(view: FleetView, rates: Rates) -> list[TierView]:
    """Return every tier instance; one without an answer has no figures."""
    by_host: dict[str, list[Instance]] = {}
    for one in view.instances:
        by_host.setdefault(one.record.host, []).append(one)
    return [
        _tier_view(one, tier, rates, by_host[one.record.host])
        for one in view.instances
        if (tier := tier_of(one)) is not None
    ]


def tier_of(one: Instance) -> Tier | None:
    """Return the medium of an instance; None when it is not a tier."""
    if one.stats is not None and one.stats.tier is not None:
        return one.stats.tier
    return TIER_OF_KIND.get(one.record.kind)


def _rate_of(one: Instance, rates: Rates) -> Rate:
    return rates.of(one.record.kind, one.record.host, one.record.instance)


def counted(view: FleetView, rates: Rates) -> list[flows.Counted]:
    """Return what the tiers of a view have reported, each with its rate."""
    return [
        (tier, _rate_of(one, rates))
        for one in view.instances
        if one.stats is not None and (tier := tier_of(one)) is not None
    ]


def _tier_view(one: Instance, tier: Tier, rates: Rates, beside: Sequence[Instance]) -> TierView:
    record, stats = one.record, one.stats
    if stats is None:
        return TierView(
            host=record.host,
            instance=record.instance,
            tier=tier,
            up=one.up,
            ready=False,
            epoch=record.epoch,
        )
    total, used = bytes_of(stats)
    figure = f"{tier}_cache_hit_rate"
    return TierView(
        host=record.host,
        instance=record.instance,
        tier=tier,
        up=True,
        ready=stats.ready,
        epoch=stats.epoch,
        seq=stats.seq,
        slots=stats.slots,
        slot_bytes=stats.slot_bytes,
        bytes_total=total,
        bytes_used=used,
        occupancy=occupancy(stats),
        fragmentation=fragmentation(stats),
        waste_percent=stats.figures.get("waste_percent", 0.0),
        slab_bytes=stats.slab_bytes,
        slabs=stats.slabs,
        sizes=[size_view(one) for one in stats.sizes],
        tenants=[tenant_view(one) for one in stats.tenants],
        policy=stats.policy,
        draining=stats.figures.get("draining", 0.0) > 0,
        leases=stats.leases,
        rates=flows.rates_of(tier, _rate_of(one, rates)),
        # Of a tier below it the host tier knows how often lookups hit there.
        hit_rate=stats.figures.get(figure, 0.0) if tier == "host" else hit_rate(beside, figure),
        figures=stats.figures,
    )


def worker_views(view: FleetView) -> list[WorkerView]:
    """Return every engine worker that a host tier knows, and every engine that passes through."""
    return [
        worker_view(one.record, worker)
        for one in view.instances
        if one.stats is not None
        for worker in one.stats.workers
    ]


def _passing_line(one: WorkerView) -> str:
    return f"{one.engine} on {one.host} computes without a cache: {one.passes_through}"


def status_view(
    view: FleetView,
    totals: Totals,
    rates: Rates,
    *,
    expected: Sequence[str],
    version: str,
    gone: Sequence[GoneView] = (),
    host: str = "",
) -> StatusView:
    """Return the status page: every tier, worker and service, and what is wrong.

    With `host`, tiers, flows, lookups and workers are those of that host.
    """
    reasons = unready_reasons(view, expected)
    here = view.on_host(host)
    workers = worker_views(here)
    tiers = tier_views(here, rates)
    rated = counted(here, rates)
    kinds = [*expected, *sorted({one.record.kind for one in view.instances} - set(expected))]
    return StatusView(
        version=version,
        ready=not reasons,
        reasons=reasons,
        services=[_kind_view(view, kind, expected=kind in expected) for kind in kinds],
        tiers=[
            _medium_view(tier, group)
            for tier in TIERS
            if (group := [one for one in tiers if one.tier == tier])
        ],
        flows=flows.flows_of(rated),
        lookups=flows.lookups_of(rated),
        engines=len({(one.host, one.engine, one.incarnation) for one in workers}),
        workers=sum(not one.passes_through for one in workers),
        passing_through=[_passing_line(one) for one in workers if one.passes_through],
        kvbm=kvbm_view(view, totals),
        host=host,
        hosts=sorted({one.record.host for one in view.instances} | {one.host for one in gone}),
        gone=list(gone),
    )


def _kind_view(view: FleetView, kind: str, *, expected: bool) -> KindView:
    group = [one for one in view.instances if one.record.kind == kind]
    up, ready = sum(one.up for one in group), sum(one.ready for one in group)
    assert ready <= up, f"{ready} instances of {kind} are ready, {up} are up"
    return KindView(
        kind=kind,
        expected=expected,
        instances=len(group),
        up=up,
        ready=ready,
        memory_bytes=sum(_figure(one, MEMORY) for one in group),
        memory_bound_bytes=sum(_figure(one, MEMORY_BOUND) for one in group),
    )


def _medium_view(tier: Tier, group: Sequence[TierView]) -> MediumView:
    assert {one.tier for one in group} == {tier}, f"{len(group)} are counted as {tier}"
    total = sum(one.slots.get("total", 0) for one in group)
    used = sum(one.slots.get(state, 0) for one in group for state in USED_STATES)
    return MediumView(
        tier=tier,
        instances=len(group),
        slots_total=total,
        slots_used=used,
        bytes_total=sum(one.bytes_total for one in group),
        bytes_used=sum(one.bytes_used for one in group),
        occupancy=part_used(group, used, total),
        leases=sum(one.leases for one in group),
        sizes=sizes_of(group),
        tenants=tenants_of(group),
    )


def unready_reasons(view: FleetView, expected: Sequence[str]) -> list[str]:
    """Return why the system does not serve as it should; empty when it does.

    Strict on purpose: each expected kind must be there, and each instance must be ready.
    """
    reasons = [] if view.connected else ["NATS is away"]
    if view.registry_error:
        reasons.append(f"registry: {view.registry_error}")
    present = {one.record.kind for one in view.instances}
    reasons += [f"{kind}: no instance is registered" for kind in expected if kind not in present]
    away = [one for one in view.instances if not one.ready]
    return reasons + [f"{one.record.key}: {'; '.join(one.reasons) or 'not ready'}" for one in away]
