"""The parts of the core, and how they are put together: each is given what it needs.

engines ── hello, beat ──► engines      who may offer and look up, and where its memory is
        ── offer ────────► offload      G1 → G2
        ── lookup ───────► onboard      G2 → G1, with `fills` (lower tiers) and `peers`
held                                    the blocks, and the announcements of all that change
arena, leases                           the memory, and the leases over its slots
explain, placement, scrubber            why lookups missed, sibling instances, idle checks
hints                                   what agents say of their sessions
findable                                what lookups may find, for the filter that engines read
"""

from __future__ import annotations

from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.former_blocks import FormerBlocks

from kvbm_host_tier.core.answers import Answers
from kvbm_host_tier.core.arena import Arena, ArenaLeases
from kvbm_host_tier.core.engines import Engines
from kvbm_host_tier.core.explain import Explain
from kvbm_host_tier.core.fills import Fills
from kvbm_host_tier.core.filtered_lookups import FilteredLookups
from kvbm_host_tier.core.findable import Findable
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.limits import Means
from kvbm_host_tier.core.load_cost import LoadCost
from kvbm_host_tier.core.load_times import LoadTimes
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import ArenaInfo
from kvbm_host_tier.core.miss_reason import MissReasons
from kvbm_host_tier.core.offload import Offload
from kvbm_host_tier.core.onboard import Onboard
from kvbm_host_tier.core.peer_messages import PeerId
from kvbm_host_tier.core.peers import Peers
from kvbm_host_tier.core.placement import Placement
from kvbm_host_tier.core.scrub import Scrubber
from kvbm_host_tier.core.session_hints import SessionHints
from kvbm_host_tier.core.shard_map import Sharding
from kvbm_host_tier.core.waiting_lookups import WaitingLookups


class Parts:
    """One of each; only the core and its view have all of them, to hand each input to its part."""

    def __init__(
        self,
        announcer: Announcer,
        instance: str,
        info: ArenaInfo,
        means: Means,
        *,
        policy: str,
        staging: bool,
    ) -> None:
        """Make the parts, those first that others need."""
        assert instance, "a host tier has a name"
        epoch = announcer.epoch
        self.announcer, self.limits = announcer, means.limits
        self.former = former = FormerBlocks()
        self.findable = findable = Findable(means.limits, means.counts)
        self.below = below = LowerTiers(former, findable, means.limits)
        self.held = held = HeldBlocks(
            announcer, below, former, findable, means, policy=policy, staging=staging
        )
        self.arena = arena = Arena(info, held.table, lay_out=held.lay_out, means=means)
        self.leases = ArenaLeases(held.table, means, epoch=epoch)
        held.unpin_ended, held.let_go = self.leases.settle, self.leases.let_go
        self.reasons = MissReasons(held.table, held.departures, former, held.first_blocks, below)
        self.explain = Explain(self.reasons, below, means)
        self.answers = Answers(
            held.table, self.leases.leases, held.departures, epoch=epoch, known=held.known,
            answered=self.explain.fresh.append, means=means,
        )  # fmt: skip
        self.filtered_lookups = FilteredLookups(
            self.answers, keep=self.explain.fresh.append, means=means
        )
        self.engines = Engines(arena, announcer, findable, means)
        self.offload = Offload(held, self.engines, means)
        self.load_times = times = LoadTimes()
        self.fills = Fills(held, below, times, means, epoch=epoch)
        self.peers = Peers(PeerId(announcer.host, instance), held, arena, times, means)
        self.waiting = waiting = WaitingLookups(findable)
        cost = LoadCost(held.table, below, waiting, times, means)
        self.onboard = Onboard(
            held, below, self.fills, self.peers, self.answers, waiting, cost, means
        )
        self.hints = SessionHints(held, self.onboard, means)
        findable.name_sets = lambda: [waiting.names]
        findable.tables = [held.table.names, *(view.table for view in below.views.values())]
        self.sharding = Sharding(instance)
        self.placement = Placement(
            self.engines, self.sharding, means, is_draining=lambda: held.draining,
            is_cut=lambda: arena.layout is not None,
        )  # fmt: skip
        self.scrubber = Scrubber(held, arena, is_busy=self._is_busy, means=means)

    def _is_busy(self) -> bool:
        """Tell whether the arena is read or written now, as far as is known here."""
        moving = self.offload.is_pulling or self.fills.is_filling or self.peers.is_pulling
        return moving or self.leases.is_read()
