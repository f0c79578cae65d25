"""The view of the core: what metrics, status, snapshots and verbs read between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.admin import pins_of, pins_usage
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.size_figures import size_figures, waste_percent
from kvbm_common.tier.slots import Block
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.explain import ExplainListRequest, Explanation
from kvbm_common.wire.verbs import ArenaReply, SnapshotReply, StatsReply

from kvbm_host_tier.core.messages import ArenaInfo
from kvbm_host_tier.core.parts import Parts
from kvbm_host_tier.core.shard_map import ShardMap

DEPARTURES_BELOW = {"disk": "departures_disk", "object": "departures_object"}
"""The bounds of what is known of departures from lower tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierView:
    """Everything of the core that its shell may read, made once; no call of it changes a block."""

    instance: str
    is_staging: bool
    counts: Mapping[str, int]
    """The counters, by key: a live view."""
    _parts: Parts

    # --- the arena --------------------------------------------------------------------------

    @property
    def arena(self) -> ArenaInfo:
        """The memory, as it is now."""
        return self._parts.arena.info

    @property
    def epoch(self) -> int:
        """The number of this life."""
        return self._parts.announcer.epoch

    @property
    def layout(self) -> Layout | None:
        """The layout of the arena's slots; None: it is not cut yet."""
        return self._parts.arena.layout

    def arena_reply(self) -> ArenaReply:
        """Return where the arena is and how it is cut."""
        arena = self._parts.arena
        sizes = [] if arena.layout is None else list(self._parts.held.table.pool.sizes)
        return ArenaReply(
            path=arena.info.path,
            bytes=arena.info.capacity_bytes,
            slot_bytes=UNIT_BYTES if sizes else 0,
            slot_count=arena.unit_count,
            epoch=self._parts.announcer.epoch,
            instance=self.instance,
            staging=self.is_staging,
            sizes=sizes,
        )

    @property
    def is_quiet(self) -> bool:
        """Tell whether ticks may come seldom: nothing is under way. Leases may end a little
        late."""
        parts = self._parts
        work = (len(parts.offload), len(parts.onboard), len(parts.fills))
        settled = parts.explain.is_settled and parts.peers.is_settled
        settled = settled and all(view.is_settled for view in parts.below.views.values())
        settled = settled and not parts.findable.is_making and parts.leases.is_settled
        return not any(work) and settled and parts.scrubber.is_resting

    # --- the blocks -------------------------------------------------------------------------

    def blocks(self) -> dict[int, Block]:
        """Return every committed block by its place, guests included; O(slots)."""
        return self._parts.held.table.by_place()

    def may_find(self, name: SequenceHash) -> bool:
        """Tell whether a lookup may find a block now: then the miss filter must not deny it.

        For tests, which compare the filter with it.
        """
        parts = self._parts
        is_near = parts.held.table.holds(name) or name in parts.below or name in parts.waiting
        return is_near or parts.peers.may_bring

    def snapshot(self) -> SnapshotReply:
        """Return every announced block, as of the last event."""
        return self._parts.announcer.snapshot(self._parts.held.announced())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """Return the snapshot in pages, made later: each request is answered by one page."""
        return self._parts.announcer.moment(self._parts.held.announced_parts())

    # --- the other host tiers of this host ----------------------------------------------------

    def siblings(self) -> dict[str, tuple[int, str]]:
        """Return epoch and endpoint of each other instance of the shard map."""
        siblings = self._parts.sharding.siblings()
        assert self.instance not in siblings
        return siblings

    @property
    def shard_map(self) -> ShardMap:
        """The shard map in force."""
        return self._parts.sharding.map

    # --- explanations -----------------------------------------------------------------------

    def explanations(self, request: str) -> list[Explanation]:
        """Return the explanations of a request's lookups, the newest first."""
        return self._parts.explain.find(request)

    def latest_explanations(self, asked: ExplainListRequest) -> tuple[list[Explanation], int]:
        """Return the newest that fit, and the number to go on before (0: all were seen)."""
        self._parts.explain.settle()
        return self._parts.explain.kept.latest(asked)

    @property
    def explanation_count(self) -> int:
        """The explanations that are kept."""
        return len(self._parts.explain.kept)

    def explained_since_ms(self) -> int:
        """Return the time of the oldest kept explanation; 0: no explanation is kept."""
        return self._parts.explain.kept.oldest_ms()

    def usages(self, now_ms: int) -> dict[str, Usage]:
        """Return how full each queue, table and history of the core is."""
        parts, limits, counts = self._parts, self._parts.limits, self.counts
        usages = {
            "departures": parts.held.departures.usage(now_ms),
            "former_blocks": parts.former.usage(now_ms),
            "first_blocks": parts.held.first_blocks.usage(),
            "explanations": parts.explain.kept.usage(now_ms),
            "open_explanations": parts.explain.usage(),
            "offers": Usage(
                len(parts.offload), limits.offers_max, counts.get("dropped.offer_busy", 0)
            ),
            "lookups": Usage(
                len(parts.onboard), limits.lookups_max, counts.get("dropped.lookup_busy", 0)
            ),
            "pinned": pins_usage(parts.held.table, parts.leases.leases),
            "hinted": parts.held.session_pins.usage(),
            "awaited_demotions": parts.held.late.usage(),
            "known_runs": parts.held.known.usage(),
            "diary": parts.held.diary.usage(),
        }
        departures = {
            medium: view.departures.usage(now_ms) for medium, view in parts.below.views.items()
        }
        assert departures.keys() == DEPARTURES_BELOW.keys(), f"histories of {list(departures)}"
        return usages | {DEPARTURES_BELOW[medium]: one for medium, one in departures.items()}

    # --- figures ----------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """The lookups that wait for blocks."""
        return len(self._parts.onboard)

    def statistics(self, now_ms: int) -> StatsReply:
        """Return the figures for metrics and admin API."""
        held, layout = self._parts.held, self._parts.arena.layout
        announcer = self._parts.announcer
        return StatsReply(
            kind="host-tier",
            host=announcer.host,
            instance=self.instance,
            epoch=announcer.epoch,
            ready=True,
            seq=announcer.seq,
            tier="host",
            slots=held.table.counts(),
            slot_bytes=0 if layout is None else layout.slot_bytes,
            **size_figures(held.table),
            tenants=held.table.tenant_figures(),
            block_bytes=held.table.block_bytes,
            policy=held.policy_name,
            leases=len(self._parts.leases.leases),
            figures=self._figures(),
            workers=self._parts.engines.statistics(now_ms),
        )

    def estimates(self) -> dict[str, float]:
        """Return what loads and computing take now, as far as that is known."""
        speeds = {
            f"prefill_tokens_per_s.{engine.id.engine}": 1e9 / engine.prefill.token_ns
            for engine in self._parts.engines
            if engine.prefill is not None
        }
        return self._parts.load_times.figures() | speeds

    def _engine_leases(self) -> dict[str, float]:
        """Return how many leases each engine has now."""
        owners = Counter(lease.owner for lease in self._parts.leases.leases.all())
        return {
            f"engine_leases.{engine.id.engine}": float(owners[engine.label])
            for engine in self._parts.engines
        }

    def _figures(self) -> dict[str, float]:
        figures = {name: float(value) for name, value in self.counts.items()}
        figures |= self._parts.answers.hit_rates()
        figures["leases_expired"] = float(self._parts.leases.leases.expired_count)
        figures["pins"] = float(len(pins_of(self._parts.leases.leases)))
        figures["slots_unsettled"] = float(self._parts.offload.unsettled_count)
        figures["draining"] = float(self._parts.held.draining)
        figures |= self._parts.peers.figures() | self._parts.findable.figures()
        figures |= self.estimates() | self._engine_leases()
        figures["shards"] = float(len(self._parts.sharding.map.endpoints))
        figures["front"] = float(self._parts.sharding.is_front)
        figures["waste_percent"] = waste_percent(self._parts.held.table)
        figures |= self._parts.held.session_pins.figures()
        figures["guests"] = float(len(self._parts.held.guests))
        figures["offers"] = float(len(self._parts.offload))
        figures["explained_requests"] = float(len(self._parts.explain.kept))
        figures["lookups_waiting"] = float(self.waiting_count)
        for medium, view in self._parts.below.views.items():
            figures[f"known_on_{medium}"] = float(len(view))
        assert all(value >= 0 for value in figures.values())
        return figures
