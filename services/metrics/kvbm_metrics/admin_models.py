"""The bodies of the routes that operators change things with, and of a block's story."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kvbm_common.wire.admin import PIN_TTL_MS_MAX, STEP_BLOCKS_MAX
from kvbm_common.wire.events import Tier
from kvbm_common.wire.verbs import MATCH_BLOCKS_MAX
from pydantic import Field

from kvbm_metrics.models import (
    BlockHolderView,
    Hash,
    NamespaceQuery,
    TokenId,
    _Query,
    _up_to,
    _View,
)

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Medium = Literal["host", "disk", "object", "all"]
Hashes = Annotated[list[Hash], Field(min_length=1, max_length=STEP_BLOCKS_MAX, fail_fast=True)]


# --- questions ------------------------------------------------------------------------------


class TierQuery(_Query):
    """Which tiers. A host or instance that is not named means all of them."""

    tier: Medium
    host: Name | None = None
    instance: Name | None = None


class RemoveQuery(TierQuery):
    """Which blocks, in which tiers. Exactly one of hashes, prefix, namespace and everything."""

    hashes: Annotated[list[Hash], _up_to(MATCH_BLOCKS_MAX)] | None = None
    prefix: Annotated[
        Hash | None, Field(description="A block and all behind it, as far as a tier has the chain.")
    ] = None
    namespace: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    everything: bool = False


class PinQuery(TierQuery):
    """Keep blocks in these tiers, wherever they are, for a while."""

    hashes: Hashes
    ttl_s: Annotated[float, Field(gt=0, le=PIN_TTL_MS_MAX / 1000)]


class UnpinQuery(_Query):
    """One pin, as `/v1/pins` lists it."""

    tier: Literal["host", "disk", "object"]
    host: Name
    instance: Name
    pin: Annotated[int, Field(ge=1, le=2**63 - 1)]


class PrefetchQuery(_Query):
    """Which run to bring into host memory. Give `hashes`, or `tokens` with a `namespace`."""

    hashes: Annotated[list[Hash], _up_to(MATCH_BLOCKS_MAX)] | None = None
    tokens: Annotated[list[TokenId], _up_to(MATCH_BLOCKS_MAX * 64)] | None = None
    namespace: NamespaceQuery | None = None
    salt: str | None = None
    lora: str | None = None
    host: Name | None = None
    instance: Name | None = None


class DrainQuery(TierQuery):
    """Instances of tiers that shall take no new blocks, or take them again."""


class ResizeQuery(_Query):
    """Use so many slots of the medium; more than it has is refused. Not said means all hosts."""

    tier: Literal["host", "disk"]
    slots: Annotated[int, Field(ge=1, le=2**40, description="Of each instance that is meant.")]
    host: Name | None = None
    instance: Name | None = None


class PolicyQuery(TierQuery):
    """Choose victims by this eviction policy from now on; what the tiers hold stays."""

    policy: Literal["lru", "lfu", "prefix"]


class FilterQuery(_Query):
    """Which blocks deserve a lower tier. What is not named stays as it is."""

    tier: Literal["disk", "object", "all"]
    enabled: bool | None = None
    pass_count: Annotated[
        int | None,
        Field(ge=1, le=1_000_000, description="A new block counts 1, each sight doubles that."),
    ] = None
    decay_s: Annotated[
        float | None, Field(ge=1, le=7 * 24 * 3600, description="All counts lose 1 every so often.")
    ] = None
    host: Name | None = None
    instance: Name | None = None


Kind = Literal["index", "host-tier", "disk-tier", "object-tier", "metrics", "consolidator"]


class LogLevelQuery(_Query):
    """A level, and the services that shall have it; what is not named means all."""

    level: Literal["debug", "info", "warning", "error"]
    kind: Kind | None = None
    host: Name | None = None
    instance: Name | None = None


# --- answers --------------------------------------------------------------------------------


class InstanceView(_View):
    """One instance of a service."""

    kind: str
    host: str
    instance: str


class OutcomeView(InstanceView):
    """What became of a change at one instance."""

    ok: bool
    reply: dict[str, Any] = Field(default_factory=dict, description="What the verb has answered.")
    code: Annotated[str, Field(description="Of the error; empty when `ok`.")] = ""
    message: str = ""


class ChangeView(_View):
    """A change at each instance that was meant; some may have failed."""

    outcomes: list[OutcomeView]


class JobView(_View):
    """A change that takes long."""

    id: str
    verb: str
    actor: str
    state: Literal["running", "done", "failed", "cancelled"]
    started_ms: Annotated[int, Field(description="Wall clock, ms since 1970.")]
    ended_ms: Annotated[int, Field(description="0 while it runs.")]
    progress: Annotated[dict[str, int], Field(description="What was counted so far.")]
    errors: Annotated[dict[str, str], Field(description="By instance, who did not do its part.")]


class JobsView(_View):
    """Newest first; ended ones are forgotten after a while."""

    jobs: list[JobView]


class LeaseView(_View):
    """A lease that holds a block."""

    id: int
    owner: str
    reason: str
    left_ms: int


class StoryView(_View):
    """Something that happened to a block."""

    ago_ms: int
    what: str


class PlacedBlockView(InstanceView):
    """One tier's own account of a block: where it is, who holds it, and what happened to it."""

    tier: Tier
    held: bool
    slot: int = 0
    bytes: int = 0
    checksum: Annotated[str, Field(description="xxh3-64, 16 hex digits.")] = ""
    parent: str = ""
    namespace: str = ""
    pins: int = 0
    leases: list[LeaseView] = Field(default_factory=list)
    story: list[StoryView] = Field(
        default_factory=list, description="Oldest first, as far as remembered."
    )


class BlockStoryView(_View):
    """Everything that is known of one block."""

    hash: str
    holders: Annotated[list[BlockHolderView], Field(description="As the index knows them.")]
    tiers: list[PlacedBlockView]
    silent: list[str] = Field(default_factory=list, description="Who could not be asked, and why.")


class PinView(InstanceView):
    """One pin."""

    tier: Tier
    pin: int
    owner: str
    blocks: int
    left_ms: int


class PinsView(_View):
    """All pins of all tiers."""

    pins: list[PinView]
    silent: list[str] = Field(default_factory=list)


class AuditEntryView(InstanceView):
    """A change that somebody has asked for, whichever way."""

    ts_ms: int
    verb: str
    actor: str
    request: str
    outcome: Annotated[str, Field(description="`ok`, or the code of the error.")]
    reply: str


class AuditView(_View):
    """The newest changes, oldest first."""

    entries: list[AuditEntryView]
