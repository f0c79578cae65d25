"""Names of tenants for all tiers: a tier that engines do not speak to knows tags alone.

Pure: what the instances have answered goes in, and comes out with names where any of them has said
one. A host tier that has just started has forgotten the names that its blocks had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from kvbm_common.tenant_tag import tag_of
from kvbm_common.tier.tenants import shown_name
from kvbm_common.wire.verbs import StatsReply

from kvbm_metrics.core.fleet_view import Instance


def with_names(instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances, with the name of each tenant that an engine of any host has said."""
    names = {
        tag_of(worker.namespace.tenant).hex(): shown_name(worker.namespace.tenant)
        for one in instances
        if one.stats is not None
        for worker in one.stats.workers
        if worker.namespace.tenant
    }
    return [
        replace(one, stats=_named(one.stats, names)) if one.stats and one.stats.tenants else one
        for one in instances
    ]


def _named(stats: StatsReply, names: Mapping[str, str]) -> StatsReply:
    tenants = [
        msgspec.structs.replace(one, name=names.get(one.name, one.name)) for one in stats.tenants
    ]
    assert len(tenants) == len(stats.tenants), f"{len(stats.tenants)} tenants were told"
    return msgspec.structs.replace(stats, tenants=tenants)
