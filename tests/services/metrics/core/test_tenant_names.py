"""Names of tenants: what one tier has heard from engines, all tiers are shown with."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.identity import of_tenant
from kvbm_common.tenant_tag import tag_of
from kvbm_common.wire.tier_stats import TenantStats
from kvbm_metrics.core.fleet_view import Instance
from kvbm_metrics.core.tenant_names import with_names

from tests.services.metrics.samples import NAMESPACE, WORKER, record, stats


def tier(kind: str, *tenants: str, engine_of: str = "") -> Instance:
    """A tier with blocks of tenants, and with an engine of one where it is a host tier."""
    worker = msgspec.structs.replace(WORKER, namespace=of_tenant(NAMESPACE, engine_of))
    told = [TenantStats(name=name, blocks=1, bytes=2, share_bytes=3) for name in tenants]
    said = stats(kind, tenants=told, workers=[worker] if engine_of else [])
    return Instance(record=record(kind), stats=said, up=True)


def names_of(*tiers: Instance) -> list[list[str]]:
    return [[one.name for one in tier.stats.tenants] for tier in with_names(tiers) if tier.stats]


def test_a_disk_tier_shows_the_names_that_engines_have_said_to_a_host_tier() -> None:
    gold, tin = tag_of("gold").hex(), tag_of("tin").hex()
    shown = names_of(tier("host-tier", "", "gold", engine_of="gold"), tier("disk-tier", gold, tin))
    assert shown == [["", "gold"], ["gold", tin]]


@pytest.mark.parametrize("unclear", ["others", "0" * 16])
def test_a_name_that_would_pass_for_another_stays_a_tag(unclear: str) -> None:
    tag = tag_of(unclear).hex()
    assert names_of(tier("host-tier", tag, "others", engine_of=unclear)) == [[tag, "others"]]


def test_a_service_that_does_not_answer_stays_as_it_is() -> None:
    away = Instance(record=record("disk-tier"))
    assert with_names([away]) == [away]
