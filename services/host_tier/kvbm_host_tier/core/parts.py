"""The parts of the core, and how they are put together: each is given what it needs.

engines ── hello, beat ──► engines      who may offer and look up, and where its memory is
        ── offer ────────► offload      G1 → G2
        ── lookup ───────► onboard      G2 → G1, with `fills` (lower tiers) and `peers`
held                                    the blocks, and the announcements of all that change
arena, leases                           the memory, and the leases over its slots
explain, placement, scrubber            why lookups missed, sibling instances, idle checks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from kvbm_common.tier.announcer import Announcer

from kvbm_host_tier.core.administered import AdministeredHost
from kvbm_host_tier.core.answers import Answers
from kvbm_host_tier.core.arena import Arena
from kvbm_host_tier.core.arena_leases import ArenaLeases
from kvbm_host_tier.core.engines import Engines
from kvbm_host_tier.core.explain import Explain
from kvbm_host_tier.core.fills import Fills
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.means import Means
from kvbm_host_tier.core.messages import ArenaInfo
from kvbm_host_tier.core.miss_reason import MissReasons
from kvbm_host_tier.core.offload import Offload
from kvbm_host_tier.core.onboard import Onboard
from kvbm_host_tier.core.peers import Peers
from kvbm_host_tier.core.placement import Placement
from kvbm_host_tier.core.scrub import Scrubber
from kvbm_host_tier.core.shard_map import Sharding
from kvbm_host_tier.core.view import HostTierView


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One of each; only the core has all of them, to hand each input to its part."""

    announcer: Announcer
    below: LowerTiers
    held: HeldBlocks
    arena: Arena
    leases: ArenaLeases
    reasons: MissReasons
    explain: Explain
    engines: Engines
    offload: Offload
    fills: Fills
    peers: Peers
    answers: Answers
    onboard: Onboard
    sharding: Sharding
    placement: Placement
    administered: AdministeredHost
    scrubber: Scrubber


def assemble(
    announcer: Announcer,
    instance: str,
    info: ArenaInfo,
    means: Means,
    *,
    policy: str,
    staging: bool,
) -> Parts:
    """Make the parts, those first that others need."""
    assert instance
    limits, counts, emit, epoch = means.limits, means.counts, means.emit, announcer.epoch
    below = LowerTiers()
    held = HeldBlocks(
        announcer, below=below, counts=counts, emit=emit, policy=policy, staging=staging
    )
    table = held.table
    arena = Arena(info, slots_wanted=limits.slot_count, make_slots=held.make_slots, emit=emit)
    leases = ArenaLeases(table, counts, epoch=epoch)
    reasons = MissReasons(table, held.departures, below)
    explain = Explain(
        reasons, below, requests_max=limits.explain_requests, counts=counts, emit=emit
    )
    answers = Answers(
        table, leases.leases, epoch=epoch, hit_window=limits.hit_window,
        answered=explain.fresh.append, counts=counts, emit=emit,
    )  # fmt: skip
    engines = Engines(arena, announcer, means)
    fills, peers = Fills(held, arena, below, means, epoch=epoch), Peers(table, arena, means)
    offload, sharding = Offload(held, engines, means), Sharding(instance)
    return Parts(
        announcer=announcer,
        below=below,
        held=held,
        arena=arena,
        leases=leases,
        reasons=reasons,
        explain=explain,
        engines=engines,
        offload=offload,
        fills=fills,
        peers=peers,
        answers=answers,
        onboard=Onboard(held, below, fills, peers, answers, means),
        sharding=sharding,
        placement=Placement(engines, sharding, means, is_draining=lambda: held.draining),
        administered=AdministeredHost(held, leases),
        scrubber=Scrubber(
            held, arena, cpu_percent=limits.scrub_cpu_percent, counts=counts, emit=emit,
            is_busy=_is_busy(offload, fills, peers, leases),
        ),
    )  # fmt: skip


def _is_busy(
    offload: Offload, fills: Fills, peers: Peers, leases: ArenaLeases
) -> Callable[[], bool]:
    """Return what tells whether the arena is read or written now, as far as is known here."""
    return lambda: offload.is_pulling or fills.is_filling or peers.is_pulling or leases.is_read()


def view_of(parts: Parts, instance: str, means: Means, *, staging: bool) -> HostTierView:
    """Return what the shell may read of the parts."""
    assert parts.held.table.slot_count == 0, "the view is made with the core"
    return HostTierView(
        instance=instance,
        is_staging=staging,
        counts=MappingProxyType(means.counts),
        _announcer=parts.announcer,
        _arena=parts.arena,
        _held=parts.held,
        _leases=parts.leases,
        _below=parts.below,
        _engines=parts.engines,
        _sharding=parts.sharding,
        _offload=parts.offload,
        _onboard=parts.onboard,
        _answers=parts.answers,
        _peers=parts.peers,
        _explain=parts.explain,
    )
