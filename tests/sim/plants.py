"""Planted bugs: one small mistake each, in a core or a shell, of which the checkers must tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import pytest
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.leases import Lease, LeaseTable
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.local import Confirm, Pulled
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_connectors.consolidator.core.merged_stream import MergedStreams
from kvbm_connectors.consolidator.core.replaced_books import Change
from kvbm_connectors.consolidator.core.tier_views import TierViews
from kvbm_connectors.core import messages as connector
from kvbm_connectors.core.core import ConnectorCore
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as disk
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_host_tier.core import messages as host
from kvbm_host_tier.core.arena import ArenaLeases
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.scrub import Scrubber
from kvbm_host_tier.core.scrub_messages import ScrubDone
from kvbm_index.core.chains import Chains
from kvbm_index.core.holdings import Holdings
from kvbm_index.core.image import SegmentImage

from tests.sim import plants_engines, plants_filter, plants_groups, plants_tiers
from tests.sim.disk_tier import DiskTier
from tests.sim.plant import ONE_HOST, WRONG_BYTES, Plant

# --- wrong bytes ------------------------------------------------------------------------------


def compare_no_checksum(patch: pytest.MonkeyPatch) -> None:
    """The disk tier's mover says that all is well."""
    patch.setattr(DiskTier, "compares", False)


def confirm_a_revoked_offer(patch: pytest.MonkeyPatch) -> None:
    """The engine says that it has held blocks which it has reused."""
    pulled = ConnectorCore.pulled

    def planted(core: ConnectorCore, message: Pulled) -> list[connector.Effect]:
        return [_held(effect) for effect in pulled(core, message)]

    patch.setattr(ConnectorCore, "pulled", planted)


def _held(effect: connector.Effect) -> connector.Effect:
    if isinstance(effect, connector.ToHost) and isinstance(effect.message, Confirm):
        return connector.ToHost(msgspec.structs.replace(effect.message, held=True))
    return effect


def believe_a_late_load(patch: pytest.MonkeyPatch) -> None:
    """The engine forgets that a lease has an end."""
    take = ConnectorCore.take

    def planted(
        core: ConnectorCore, request: str, blocks: Sequence[int], now_ms: int
    ) -> connector.Load:
        load = take(core, request, blocks, now_ms)
        return replace(load, deadline_ms=load.deadline_ms + 60_000)

    patch.setattr(ConnectorCore, "take", planted)


def believe_a_late_write(patch: pytest.MonkeyPatch) -> None:
    """The disk tier keeps what it has copied under a lease that was over."""
    step = DiskTierCore.step

    def planted(core: DiskTierCore, event: disk.Input, now_ms: int) -> Sequence[wanted.Effect]:
        if isinstance(event, disk.Released):
            event = replace(event, valid=True)
        return step(core, event, now_ms)

    patch.setattr(DiskTierCore, "step", planted)


# --- slots ------------------------------------------------------------------------------------


def pull_into_one_slot(patch: pytest.MonkeyPatch) -> None:
    """All blocks of a pull go where the first one goes."""
    step = HostTierCore.step

    def planted(core: HostTierCore, event: host.Input, now_ms: int) -> Sequence[host.Effect]:
        return [_into_one_slot(effect) for effect in step(core, event, now_ms)]

    patch.setattr(HostTierCore, "step", planted)


def _into_one_slot(effect: host.Effect) -> host.Effect:
    if isinstance(effect, host.StartPull):
        return replace(effect, slots=effect.slots[:1] * len(effect.slots))
    return effect


def give_a_lent_slot_away(patch: pytest.MonkeyPatch) -> None:
    """A fill without an answer is taken for ended, though the disk tier may still write."""
    step = HostTierCore.step

    def planted(core: HostTierCore, event: host.Input, now_ms: int) -> Sequence[host.Effect]:
        if isinstance(event, host.FillFailed):
            event = replace(event, settled=True)
        return step(core, event, now_ms)

    patch.setattr(HostTierCore, "step", planted)


def never_take_a_lent_slot_back(patch: pytest.MonkeyPatch) -> None:
    """The grace of a fill without an answer never ends."""
    patch.setattr("kvbm_host_tier.core.fills.FILL_GRACE_MS", 10**9)


def scrub_without_generations(patch: pytest.MonkeyPatch) -> None:
    """The scrubber takes what is in a slot now for what was there when it began to read."""
    done = Scrubber.done

    def planted(scrubber: Scrubber, event: ScrubDone, now_ms: int) -> None:
        table = scrubber._table
        scrubber._reading = tuple(
            one
            if (block := table.idle_block(one.slot)) is None
            else one._replace(name=block.hash, generation=table.generation(one.slot))
            for one in scrubber._reading
        )
        done(scrubber, event, now_ms)

    patch.setattr(Scrubber, "done", planted)


# --- leases -----------------------------------------------------------------------------------


def never_end_a_lease_by_deadline(patch: pytest.MonkeyPatch) -> None:
    """A lease whose owner is silent lives for ever."""

    def planted(_table: LeaseTable, _now_ms: int) -> list[object]:
        return []

    patch.setattr(LeaseTable, "expire", planted)


def never_unpin(patch: pytest.MonkeyPatch) -> None:
    """A lease ends, and its slots stay pinned."""
    end = ArenaLeases.end

    def planted(arena: ArenaLeases, leases: Iterable[Lease]) -> None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(SlotTable, "unpin", lambda *_: None)
            end(arena, leases)

    patch.setattr(ArenaLeases, "end", planted)


# --- views ------------------------------------------------------------------------------------


def overlook_removals(patch: pytest.MonkeyPatch) -> None:
    """The index goes on to say that a tier has what it has lost."""

    def planted(_holdings: Holdings, _holder: object, _hashes: Iterable[object]) -> None:
        return None

    patch.setattr(Holdings, "discard", planted)


def keep_removals_secret(patch: pytest.MonkeyPatch) -> None:
    """A tier evicts without a word."""

    def planted(_announcer: Announcer, _blocks: Sequence[object], _reason: str) -> list[object]:
        return []

    patch.setattr(Announcer, "removed", planted)


def leave_blocks_out_of_images(patch: pytest.MonkeyPatch) -> None:
    """The index comes back without one chain of each holder."""
    images = Chains.images

    def planted(chains: Chains) -> list[SegmentImage]:
        return images(chains)[:1]

    patch.setattr(Chains, "images", planted)


def say_nothing_of_tiers(patch: pytest.MonkeyPatch) -> None:
    """After a clear the consolidator does not say again what the tiers hold."""

    def planted(_consolidated: MergedStreams, *, has_turn: bool) -> None:
        return None

    patch.setattr(MergedStreams, "rebuild", planted)


def ignore_a_tiers_snapshot(patch: pytest.MonkeyPatch) -> None:
    """The consolidator takes a snapshot of a tier for read, and changes nothing."""

    snapshot = TierViews.snapshot

    def planted(views: TierViews, reply: SnapshotReply, now_ms: int) -> list[Change]:
        snapshot(views, reply, now_ms)
        while views.is_going_on:
            views.go_on(now_ms)
        return []

    patch.setattr(TierViews, "snapshot", planted)


ROTTEN = {"faults": ("rot disk",), "fault_every_ms": 500.0, "verified": False}
LATE = {"late": {"pull": 0.0, "load": 0.4, "read": 0.0, "write": 0.4}, "lease_ms": 800}
LATE_READS = {
    "late": {"pull": 0.0, "load": 0.0, "read": 0.9, "write": 0.0},
    "host_slots": 12,
    "faults": ("outage",),
    "fault_every_ms": 700.0,
}

CROWDED = {"host_slots": 6}
STOPS = {"faults": ("stop engine",), "fault_every_ms": 700.0, "vllm": False}
RESTARTS = {"faults": ("kill index",), "fault_every_ms": 700.0}

SERVICES = (
    Plant("no checksum is compared", compare_no_checksum, WRONG_BYTES, ROTTEN),
    Plant("a revoked offer is confirmed", confirm_a_revoked_offer, WRONG_BYTES),
    Plant("a late load is believed", believe_a_late_load, WRONG_BYTES, LATE),
    Plant("a late write is believed", believe_a_late_write, WRONG_BYTES, LATE),
    Plant("a slot is pulled into twice", pull_into_one_slot, WRONG_BYTES),
    Plant("a lent slot is given away", give_a_lent_slot_away, WRONG_BYTES, LATE_READS),
    Plant(
        "a lent slot is kept for ever", never_take_a_lent_slot_back, "staged slots left", seed=1_023
    ),
    Plant("the scrubber mixes blocks up", scrub_without_generations, WRONG_BYTES, CROWDED),
    Plant("a lease never expires", never_end_a_lease_by_deadline, "leases left"),
    Plant("a slot stays pinned", never_unpin, "a pinned slot has no lease"),
    Plant("the index overlooks removals", overlook_removals, "index differs"),
    Plant("a tier keeps removals secret", keep_removals_secret, "(index|consolidated) differs"),
    Plant("an image leaves blocks out", leave_blocks_out_of_images, "index differs", RESTARTS),
    Plant("tiers are not said again", say_nothing_of_tiers, "consolidated differs", STOPS),
    Plant("a tier's snapshot changes nothing", ignore_a_tiers_snapshot, "announces it|differs"),
)
PLANTS = (
    *(replace(plant, plan={**ONE_HOST, **plant.plan}) for plant in SERVICES),
    *plants_engines.PLANTS,
    *plants_tiers.PLANTS,
    *plants_filter.PLANTS,
    *plants_groups.PLANTS,
)
