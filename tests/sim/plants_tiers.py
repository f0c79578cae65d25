"""Planted bugs of tiers: fills, peers, shards and objects."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.parts import grid_of
from kvbm_common.tier.slot_tenants import SlotTenants
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import ErrorBody, LeaseReply, LeaseRequest
from kvbm_connectors.core.core import ConnectorCore
from kvbm_disk_tier.objects.core.listing import Listing
from kvbm_host_tier.core import fills, peers
from kvbm_host_tier.core.answers import Answers
from kvbm_host_tier.core.arena import ArenaLeases
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.engines import Engine
from kvbm_host_tier.core.known_runs import KnownRuns, Stretch
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.open_lookup import OpenLookup
from kvbm_host_tier.core.peer_messages import PeerPullFailed, PulledBlock
from kvbm_host_tier.core.peers import Outcome, Peers
from kvbm_host_tier.core.session_pins import SessionPins

from tests.sim.memory import right_cells, sums_of
from tests.sim.object_tier import ObjectTier
from tests.sim.plant import OBJECTS, ONE_HOST, TWO_HOSTS, TWO_SHARDS, WRONG_BYTES, Plant


def believe_any_slot(patch: pytest.MonkeyPatch) -> None:
    """A fill's answer is believed, whichever slot it says that it has filled."""
    outcome = fills._outcome

    def planted(name: SequenceHash, slot: int, filled: FilledSlot | None) -> Block | str:
        if filled is not None:
            filled = msgspec.structs.replace(filled, slot=slot)
        return outcome(name, slot, filled)

    patch.setattr(fills, "_outcome", planted)


def believe_known_runs(patch: pytest.MonkeyPatch) -> None:
    """What was answered once is answered again, whatever has come of the slots."""

    def planted(known: KnownRuns, packed: bytes, start: int) -> Stretch | None:
        end = start + known._stretch_bytes
        stretch = known._stretches.get(packed[end - HASH_BYTES : end])
        return stretch if stretch is not None and stretch.packed == packed[start:end] else None

    patch.setattr(KnownRuns, "_stretch_at", planted)


def serve_another_namespace(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given to whoever knows their names."""
    keep_own = Answers.keep_own

    def planted(answers: Answers, lookup: OpenLookup) -> None:
        lookup.namespaces |= {block.namespace for block in answers._table.blocks()}
        keep_own(answers, lookup)

    patch.setattr(Answers, "keep_own", planted)


def keep_counting_for_a_tenant(patch: pytest.MonkeyPatch) -> None:
    """A block that leaves still counts for its tenant."""
    take_back = SlotTenants._take_back

    def planted(table: SlotTenants, slot: int, _size_bytes: int) -> None:
        take_back(table, slot, 0)

    patch.setattr(SlotTenants, "_take_back", planted)


def pin_a_session_on(patch: pytest.MonkeyPatch) -> None:
    """The time of a session's pins never passes."""
    patch.setattr(SessionPins, "tick", lambda _pins, _now_ms: None)


# --- peers ------------------------------------------------------------------------------------


def lease_for_a_moment(patch: pytest.MonkeyPatch) -> None:
    """The verb grants a lease, and ends it at once."""
    lease = ArenaLeases.lease_to_copy

    def planted(leases: ArenaLeases, request: LeaseRequest, now_ms: int) -> LeaseReply | ErrorBody:
        return lease(leases, msgspec.structs.replace(request, lease_ms=1), now_ms)

    patch.setattr(ArenaLeases, "lease_to_copy", planted)


def reuse_slots_of_a_late_read(patch: pytest.MonkeyPatch) -> None:
    """A read from a peer that was given up is taken for ended."""
    failed = Peers.failed

    def planted(peers: Peers, event: PeerPullFailed, now_ms: int) -> list[Outcome]:
        return failed(peers, replace(event, settled=True), now_ms)

    patch.setattr(Peers, "failed", planted)


def believe_a_peer(patch: pytest.MonkeyPatch) -> None:
    """What a peer has sent is not compared with its checksum."""
    verdict = vars(peers)["verdict"]

    def planted(name: SequenceHash, came: PulledBlock | None, slot_bytes: int) -> Block | str:
        if came is not None:
            grid = grid_of(came.leased.parts)
            assert grid is not None
            came = replace(came, sums=sums_of(right_cells(name, grid.count)))
        found: Block | str = verdict(name, came, slot_bytes)
        return found

    patch.setattr(peers, "verdict", planted)


# --- shards -----------------------------------------------------------------------------------


def take_a_bye_for_a_replacement(patch: pytest.MonkeyPatch) -> None:
    """An engine that has gone to another host tier cannot come back in the same life."""
    bye = vars(HostTierCore)["_bye"]

    def planted(core: HostTierCore, engine: Engine, now_ms: int) -> None:
        bye(core, engine, now_ms)
        core._engines._former.add(engine.id)

    patch.setattr(HostTierCore, "_bye", planted)


def leave_with_loads(patch: pytest.MonkeyPatch) -> None:
    """An engine goes to another host tier at once, whatever is under way."""
    view = vars(ConnectorCore)["view"].fget
    planted = property(lambda core: view(core)._replace(may_leave=True))
    patch.setattr(ConnectorCore, "view", planted)


# --- objects ----------------------------------------------------------------------------------


def put_without_comparing(patch: pytest.MonkeyPatch) -> None:
    """What was copied under a lease that may be over becomes an object."""
    patch.setattr(ObjectTier, "compares_sources", False)


def get_without_comparing(patch: pytest.MonkeyPatch) -> None:
    """What an object holds is not compared with its name."""
    patch.setattr(ObjectTier, "compares", False)


def keep_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    """An object that a complete listing has not named stays in the table."""
    patch.setattr(Listing, "lose_gone", lambda _listing, _first, _count, _now_ms: None)


def leave_blocks_below(patch: pytest.MonkeyPatch) -> None:
    """Nothing is brought from a lower tier."""
    patch.setattr(LowerTiers, "usable", lambda _below, _name, _now_ms, _own: False)


TWO_MODELS = {**ONE_HOST, "sizes": (1, 3)}
LATE_PEERS = {
    **TWO_HOSTS, "late": {"pull": 0.0, "load": 0.0, "read": 0.0, "write": 0.0, "peer": 0.6},
    "host_slots": 12, "faults": (),
}  # fmt: skip
ROTTEN_PEERS = {**TWO_HOSTS, "faults": ("rot arena",), "fault_every_ms": 200.0, "verified": True}
MOVES = {**TWO_SHARDS, "faults": ("drain host", "undrain host"), "fault_every_ms": 400.0}
LATE_MOVES = {
    **MOVES, "late": {"pull": 0.0, "load": 0.6, "read": 0.0, "write": 0.0, "peer": 0.0},
    "host_slots": 10,
}  # fmt: skip
LATE_PUTS = {
    **OBJECTS,
    "late": {"pull": 0.0, "load": 0.0, "read": 0.0, "write": 0.6, "peer": 0.0},
    "host_slots": 12,
    "lease_ms": 800,
    "faults": (),
}
ROTTEN_OBJECTS = {**OBJECTS, "faults": ("rot objects",), "fault_every_ms": 400.0}
VANISHING = {**OBJECTS, "faults": ("vanish",), "fault_every_ms": 400.0, "object_ttl_ms": 0}

PLANTS = (
    Plant("any slot of a fill is believed", believe_any_slot, WRONG_BYTES,
          {**ONE_HOST, "crossed": 0.8, "host_slots": 12}),
    Plant("known runs never expire", believe_known_runs,
          f"KeyError|no 'pin' in|{WRONG_BYTES}"),
    Plant("a name is enough", serve_another_namespace, "of another namespace", TWO_MODELS),
    Plant("blocks stay below", leave_blocks_below, "are here",
          {**ONE_HOST, "filters": False, "host_slots": 12}),
    Plant("a tenant keeps what has left", keep_counting_for_a_tenant, "bytes are of|beside",
          {**ONE_HOST, "tenants": ("", "gold")}),
    Plant("a session pins on", pin_a_session_on, "pinned slots left",
          {**ONE_HOST, "hints": True}),
    Plant("a peer's lease is short", lease_for_a_moment, WRONG_BYTES, LATE_PEERS),
    Plant("a late read is taken for ended", reuse_slots_of_a_late_read,
          f"{WRONG_BYTES}|settled twice", LATE_PEERS),
    Plant("a peer is believed", believe_a_peer, WRONG_BYTES, ROTTEN_PEERS),
    Plant("a bye is taken for a replacement", take_a_bye_for_a_replacement, "attached to", MOVES),
    Plant("an engine leaves with loads", leave_with_loads, WRONG_BYTES, LATE_MOVES),
    Plant("a put is not compared", put_without_comparing, WRONG_BYTES, LATE_PUTS),
    Plant("an object is not compared", get_without_comparing, WRONG_BYTES, ROTTEN_OBJECTS),
    Plant("a listing forgets nothing", keep_what_is_gone, "objects that are gone", VANISHING),
)  # fmt: skip
