"""Models of the answers of the HTTP API, as its OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from kvbm_common.wire.events import Tier
from kvbm_common.wire.index_verbs import HolderMatch
from kvbm_common.wire.scores import (
    BlockHolder,
    HolderSummary,
    PlaceScore,
)
from pydantic import BaseModel, ConfigDict, Field

from kvbm_metrics.core.answer_models import AnswerView
from kvbm_metrics.core.parts_models import SizeView, TenantView
from kvbm_metrics.core.recent_models import GoneView
from kvbm_metrics.core.wire_types import view_of

Position = Annotated[list[int], Field(description="[epoch, seq]")]


class _View(BaseModel):
    """An answer: made by us, so nothing is checked twice."""

    model_config = ConfigDict(frozen=True)


class HealthView(_View):
    """The answer of a process that lives."""

    status: str = "ok"


class ReadyView(_View):
    """The answer of `/readyz`: whether the whole system serves, and if not, why."""

    ready: bool
    reasons: list[str]


class ServiceView(_View):
    """One registered instance of a service. One that does not answer is shown with `up` false."""

    kind: str
    host: str
    instance: str
    epoch: int
    pid: int
    started_ms: Annotated[int, Field(description="Wall clock, ms since 1970.")]
    info: dict[str, str | int | float | bool | None]
    up: bool
    ready: bool
    reasons: list[str]
    seq: Annotated[int, Field(description="The last event that it has published.")] = 0
    positions: dict[str, Position] = {}
    memory_bytes: int = 0
    memory_bound_bytes: Annotated[int, Field(description="0: none is declared.")] = 0


class RatesView(_View):
    """The flow into a tier and out of it, per second. Bytes of host memory are those of slots."""

    window_s: Annotated[float, Field(description="Taken over so long; 0: nothing to compare.")] = 0
    blocks_in: float = 0.0
    blocks_out: Annotated[float, Field(description="Read by engines or by the tier above.")] = 0.0
    blocks_evicted: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0


class TierView(_View):
    """One instance of a tier."""

    host: str
    instance: str
    tier: Tier
    up: bool
    ready: bool
    epoch: int
    seq: int = 0
    slots: Annotated[dict[str, int], Field(description="By state, and `total`.")] = {}
    slot_bytes: Annotated[int, Field(description="Of the size that was cut first.")] = 0
    bytes_total: int = 0
    bytes_used: int = 0
    occupancy: Annotated[
        float, Field(description="Used slots / all slots, by their bytes, 0 to 1.")
    ] = 0.0
    fragmentation: Annotated[
        float, Field(description="Part of the used slots' bytes that no block fills, 0 to 1.")
    ] = 0.0
    waste_percent: Annotated[
        float, Field(description="Part of the slabs in use that no block fills, 0 to 100.")
    ] = 0.0
    slab_bytes: int = 0
    slabs: Annotated[dict[str, int], Field(description="By state.")] = {}
    sizes: Annotated[list[SizeView], Field(description="By size of slots.")] = []
    tenants: Annotated[
        list[TenantView], Field(description="Empty while no engine names a tenant.")
    ] = []
    policy: Annotated[str, Field(description="Eviction policy.")] = ""
    draining: Annotated[bool, Field(description="Takes no new blocks.")] = False
    leases: int = 0
    hit_rate: Annotated[float, Field(description="Of recent lookups, 0 to 1.")] = 0.0
    rates: RatesView = RatesView()
    figures: dict[str, float] = {}


class WorkerView(_View):
    """One engine worker that is attached to a host tier, or an engine that passes through."""

    host: str
    host_tier: Annotated[
        str, Field(description="Instance of the host tier; empty: it passes through.")
    ]
    engine: str
    incarnation: str
    rank: int
    world_size: int
    model: str
    block_tokens: int
    namespace: Annotated[str, Field(description="Digest, 64 hex digits.")]
    namespace_fields: Annotated[dict[str, str | int], Field(description="As questions want it.")]
    block_bytes: int
    seen_ms_ago: int
    verify: Annotated[
        str, Field(description="Loads it compares with checksums: always, sampled, never or empty.")
    ] = ""
    prefill_tokens_per_s: Annotated[float, Field(description="Measured; 0: not known.")] = 0.0
    passes_through: Annotated[
        str, Field(description="Why the engine computes without a cache; empty: it has one.")
    ] = ""


class KindView(_View):
    """All instances of one kind of service."""

    kind: str
    expected: bool
    instances: int
    up: int
    ready: int
    memory_bytes: Annotated[int, Field(description="Anonymous memory of the processes.")] = 0
    memory_bound_bytes: Annotated[int, Field(description="What they may take.")] = 0


class MediumView(_View):
    """All instances of one tier together."""

    tier: Tier
    instances: int
    slots_total: int
    slots_used: int
    bytes_total: int
    bytes_used: int
    occupancy: float
    leases: int
    sizes: Annotated[list[SizeView], Field(description="By size of slots.")] = []
    tenants: Annotated[
        list[TenantView], Field(description="Empty while no engine names a tenant.")
    ] = []


class KvbmView(_View):
    """The metrics of KVBM. Counts grow as long as this service lives."""

    kvbm_matched_tokens: float
    kvbm_offload_blocks_d2h: float
    kvbm_offload_blocks_h2d: float
    kvbm_offload_blocks_d2d: float
    kvbm_offload_blocks_d2o: float
    kvbm_onboard_blocks_h2d: float
    kvbm_onboard_blocks_d2d: float
    kvbm_onboard_blocks_o2d: float
    kvbm_object_read_failures: float
    kvbm_object_write_failures: float
    kvbm_host_cache_hit_rate: float
    kvbm_disk_cache_hit_rate: float
    kvbm_object_cache_hit_rate: float


class FlowView(_View):
    """Blocks on their way from one medium to the next; `remote` is another host's memory."""

    source: Literal["device", "host", "disk", "object", "remote"]
    target: Literal["device", "host", "disk", "object"]
    blocks: Annotated[float, Field(description="Per second.")]
    bytes: Annotated[float, Field(description="Per second.")]


class LookupsView(_View):
    """The lookups of engines and what they find, per second."""

    window_s: Annotated[float, Field(description="Taken over so long; 0: nothing to compare.")]
    lookups: float
    matched_tokens: float
    blocks: Annotated[dict[str, float], Field(description="By where they were, or `miss`.")]
    hit_rate: Annotated[float | None, Field(description="Of blocks; null: none asked.")] = None


class StatusView(_View):
    """The whole system at a glance."""

    version: str
    ready: bool
    reasons: list[str]
    services: list[KindView]
    tiers: list[MediumView]
    flows: list[FlowView]
    lookups: LookupsView
    engines: int
    workers: Annotated[int, Field(description="Attached to a host tier.")]
    passing_through: Annotated[
        list[str], Field(description="Engines that compute without a cache, each with its reason.")
    ]
    kvbm: KvbmView
    host: Annotated[str, Field(description="The host of tiers, flows and lookups; or all.")] = ""
    hosts: Annotated[list[str], Field(description="Every host that has or had a service.")] = []
    gone: Annotated[
        list[GoneView], Field(description="Lost ones for a day, those that left for 10 minutes.")
    ] = []


class HolderView(view_of(HolderMatch)):  # type: ignore[misc]
    """The blocks of the prefix that one holder has without a gap, from the first on."""


class MatchView(AnswerView):
    """Holders with at least one block, longest first."""

    asked: int
    matches: list[HolderView]


class MatchBatchView(AnswerView):
    """One answer per question, in order."""

    replies: list[MatchView]


class PlaceView(view_of(PlaceScore)):  # type: ignore[misc]
    """One rank of an engine, with its own blocks and those of its host's tiers together."""


class ScoreView(AnswerView):
    """Places with at least one block, the highest score first."""

    asked: int
    scores: list[PlaceView]


class BlockHolderView(view_of(BlockHolder)):  # type: ignore[misc]
    """One holder of one block."""


class BlockView(_View):
    """A block and all who have it."""

    hash: str
    holders: list[BlockHolderView]


class WhereView(AnswerView):
    """One entry per asked block, in order."""

    blocks: list[BlockView]


class HolderSummaryView(view_of(HolderSummary)):  # type: ignore[misc]
    """One holder, how many blocks it has, and the position up to which that is true."""


class HoldersView(AnswerView):
    """Every holder that the index knows."""

    holders: list[HolderSummaryView]


class Problem(_View):
    """An error (RFC 9457, application/problem+json)."""

    type: Annotated[str, Field(description="`urn:kvbm:` and the code.")]
    title: str
    status: int
    detail: str
    code: Annotated[str, Field(description="Stable; for programs.")]
    field: Annotated[str, Field(description="The first field at fault, or empty.")] = ""
    errors: Annotated[dict[str, str], Field(description="What is wrong, by field.")] = {}
