"""The lower tiers: where a block is taken from when a disk and a bucket have it."""

from __future__ import annotations

import pytest
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Event, Tier
from kvbm_host_tier.core.lower_tier_view import AVOID_MS
from kvbm_host_tier.core.lower_tiers import LowerTiers, tier_of
from kvbm_host_tier.core.messages import AskDiskSnapshot

from tests.services.host_tier.helpers import name, on_disk


def has(below: LowerTiers, tier: Tier, *wanted: int) -> None:
    """A tier announces blocks."""
    source = Announcer(host="h", source=f"{tier}-tier-0", tier=tier, epoch=1)
    events: list[Event] = [source.cleared("start")]
    events += source.stored([on_disk(n) for n in wanted])
    for event in events:
        below.views[tier].apply("0", event)


def test_the_disk_is_nearer_and_the_bucket_stands_in_for_it() -> None:
    """While the disk is avoided, or when it has lost the block."""
    below = LowerTiers()
    has(below, "disk", 1)
    has(below, "object", 1, 2)
    assert below.source(name(1), 0) == ("disk", "0")
    assert below.source(name(2), 0) == ("object", "0")
    below.views["disk"].avoid(name(1), 0)
    assert below.source(name(1), 0) == ("object", "0")
    assert below.source(name(1), AVOID_MS) == ("disk", "0")
    below.views["disk"].forget(name(1))
    assert below.source(name(1), AVOID_MS) == ("object", "0")
    below.views["object"].avoid(name(2), 0)
    assert not below.usable(name(2), 0)
    assert name(2) in below


def test_hits_are_told_while_any_tier_lacks_the_block() -> None:
    """Without tiers there may be some that we have not heard of: then all are told."""
    below = LowerTiers()
    assert below.missing([name(1)]) == [name(1)]
    has(below, "disk", 1, 2)
    assert below.missing([name(1), name(3)]) == [name(3)]
    has(below, "object", 1)
    assert below.missing([name(1), name(2), name(3)]) == [name(2), name(3)]


def test_each_tier_is_asked_for_its_own_snapshot() -> None:
    """They are told apart by the tier, not by the instance."""
    below = LowerTiers()
    assert below.views["disk"].joined("0") == [AskDiskSnapshot("0", "disk")]
    assert below.views["object"].joined("0") == [AskDiskSnapshot("0", "object")]
    below.views["object"].left("0")
    assert below.views["disk"].is_followed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("disk-tier-0", ("disk", "0")),
        ("disk-tier-0-1", ("disk", "0-1")),
        ("object-tier-a", ("object", "a")),
        ("host-tier-0", None),
        ("index-0", None),
    ],
)
def test_a_source_names_its_tier(source: str, expected: tuple[str, str] | None) -> None:
    """Instances may have dashes."""
    assert tier_of(source) == expected
