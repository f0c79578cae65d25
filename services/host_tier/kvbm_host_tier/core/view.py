"""The view of the core: what metrics, status, snapshots and verbs read between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.explain import Explanation
from kvbm_common.wire.verbs import ArenaReply, SnapshotReply, StatsReply

from kvbm_host_tier.core.answers import Answers
from kvbm_host_tier.core.arena import Arena
from kvbm_host_tier.core.arena_leases import ArenaLeases
from kvbm_host_tier.core.engines import Engines
from kvbm_host_tier.core.explain import Explain
from kvbm_host_tier.core.held_blocks import HeldBlocks
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.messages import ArenaInfo
from kvbm_host_tier.core.offload import Offload
from kvbm_host_tier.core.onboard import Onboard
from kvbm_host_tier.core.peers import Peers
from kvbm_host_tier.core.shard_map import Sharding, ShardMap


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierView:
    """Everything of the core that its shell may read, made once; no call of it changes a block."""

    instance: str
    is_staging: bool
    counts: Mapping[str, int]
    """The counters, by key: a live view."""
    _announcer: Announcer
    _arena: Arena
    _held: HeldBlocks
    _leases: ArenaLeases
    _below: LowerTiers
    _engines: Engines
    _sharding: Sharding
    _offload: Offload
    _onboard: Onboard
    _answers: Answers
    _peers: Peers
    _explain: Explain

    # --- the arena --------------------------------------------------------------------------

    @property
    def arena(self) -> ArenaInfo:
        """The memory, as it is now."""
        return self._arena.info

    @property
    def epoch(self) -> int:
        """The number of this life."""
        return self._announcer.epoch

    @property
    def slot_bytes(self) -> int:
        """The size of a slot; 0: the arena is not cut yet."""
        return self._arena.slot_bytes

    @property
    def slot_count(self) -> int:
        """The slots of the arena; 0: it is not cut yet."""
        return self._arena.slot_count

    def arena_reply(self) -> ArenaReply:
        """Return where the arena is and how it is cut."""
        arena = self._arena
        assert bool(arena.slot_bytes) == bool(arena.slot_count)
        return ArenaReply(
            path=arena.info.path,
            bytes=arena.info.capacity_bytes,
            slot_bytes=arena.slot_bytes,
            slot_count=arena.slot_count,
            epoch=self._announcer.epoch,
            instance=self.instance,
            staging=self.is_staging,
        )

    # --- the blocks -------------------------------------------------------------------------

    def blocks(self) -> dict[int, Block]:
        """Return every committed block by its slot, guests included; O(slots)."""
        table = self._held.table
        return {slot: one for one in table.blocks() if (slot := table.find(one.hash)) is not None}

    def snapshot(self) -> SnapshotReply:
        """Return every announced block, as of the last event."""
        return self._announcer.snapshot(self._held.announced())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """Return the snapshot in pages, made later: each request is answered by one page."""
        return self._announcer.moment(self._held.announced())

    # --- the other host tiers of this host ----------------------------------------------------

    def siblings(self) -> dict[str, tuple[int, str]]:
        """Return epoch and endpoint of each other instance of the shard map."""
        siblings = self._sharding.siblings()
        assert self.instance not in siblings
        return siblings

    @property
    def shard_map(self) -> ShardMap:
        """The shard map in force."""
        return self._sharding.map

    # --- explanations -----------------------------------------------------------------------

    def explanations(self, request: str) -> list[Explanation]:
        """Return the explanations of a request's lookups, the newest first."""
        return self._explain.find(request)

    def latest_explanations(
        self, *, limit: int, reason: str, engine: str, missed: bool, before: int
    ) -> tuple[list[Explanation], int]:
        """Return the newest that fit, and the number to go on before (0: all were seen)."""
        assert limit > 0
        self._explain.settle()
        return self._explain.kept.latest(
            limit=limit, reason=reason, engine=engine, missed=missed, before=before
        )

    @property
    def explanation_count(self) -> int:
        """The explanations that are kept."""
        return len(self._explain.kept)

    def explained_since_ms(self) -> int:
        """Return the time of the oldest kept explanation; 0: no explanation is kept."""
        return self._explain.kept.oldest_ms()

    # --- figures ----------------------------------------------------------------------------

    def statistics(self, now_ms: int) -> StatsReply:
        """Return the figures for metrics and admin API."""
        held, arena, announcer = self._held, self._arena, self._announcer
        assert held.table.slot_count == arena.slot_count
        return StatsReply(
            kind="host-tier",
            host=announcer.host,
            instance=self.instance,
            epoch=announcer.epoch,
            ready=True,
            seq=announcer.seq,
            tier="host",
            slots=held.table.counts(),
            slot_bytes=arena.slot_bytes,
            block_bytes=held.table.block_bytes,
            policy=held.policy_name,
            leases=len(self._leases.leases),
            figures=self._figures(),
            workers=self._engines.statistics(now_ms),
        )

    def _figures(self) -> dict[str, float]:
        figures = {name: float(value) for name, value in self.counts.items()}
        figures |= self._answers.hit_rates()
        figures["leases_expired"] = float(self._leases.leases.expired_count)
        figures["slots_unsettled"] = float(self._offload.unsettled_count)
        figures["draining"] = float(self._held.draining)
        figures |= self._peers.figures()
        figures["shards"] = float(len(self._sharding.map.endpoints))
        figures["front"] = float(self._sharding.is_front)
        figures["guests"] = float(len(self._held.guests))
        figures["offers"] = float(len(self._offload))
        figures["explained_requests"] = float(len(self._explain.kept))
        figures["lookups_waiting"] = float(len(self._onboard))
        for medium, view in self._below.views.items():
            figures[f"known_on_{medium}"] = float(len(view))
        assert all(value >= 0 for value in figures.values())
        return figures
