"""Answers of the operators' routes, and the one body that is more than a request's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kvbm_common.wire.admin import Audited, BlockEntry, BlockLease, PinEntry
from kvbm_common.wire.events import Tier
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from pydantic import Field

from kvbm_metrics.core.models import BlockHolderView, _View
from kvbm_metrics.core.query_models import Hash, NamespaceQuery, TokenId, _Query, _up_to
from kvbm_metrics.core.wire_types import view_of

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
"""A `Token` of the wire, in a body: Python's engine reads the pattern."""


# --- questions ------------------------------------------------------------------------------


class PrefetchQuery(_Query):
    """The run to bring into host memory. Give `hashes`, or `tokens` with a `namespace`."""

    hashes: Annotated[list[Hash], _up_to(MATCH_BLOCKS_MAX)] | None = None
    tokens: Annotated[list[TokenId], _up_to(MATCH_BLOCKS_MAX * 64)] | None = None
    namespace: NamespaceQuery | None = None
    salt: str | None = None
    lora: str | None = None
    host: Name | None = None
    instance: Name | None = None


# --- answers --------------------------------------------------------------------------------


class InstanceView(_View):
    """One instance of a service."""

    kind: str
    host: str
    instance: str


class OutcomeView(InstanceView):
    """The outcome of a change at one instance."""

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


class LeaseView(view_of(BlockLease)):  # type: ignore[misc]
    """A lease that holds a block."""


class StoryView(view_of(BlockEntry)):  # type: ignore[misc]
    """Something that happened to a block."""


class PlacedBlockView(InstanceView):
    """One tier's own account of a block: where it is, who holds it, and what happened to it."""

    tier: Tier
    held: bool
    slot: int = 0
    bytes: int = 0
    checksum: Annotated[str, Field(description="xxh3-64, 16 hex digits.")] = ""
    part_count: Annotated[
        int, Field(description="Parts: ranges of layers, by groups of heads.")
    ] = 1
    part_checksums: list[str] = Field(
        default_factory=list, description="Of each part, where there are several and known."
    )
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
    silent: list[str] = Field(
        default_factory=list, description="Instances without an answer, and why."
    )


class NamesView(_View):
    """Hashes of blocks, in ascending order."""

    hashes: list[str]


class PinView(InstanceView, view_of(PinEntry)):  # type: ignore[misc]
    """One pin of an operator."""

    tier: Tier


class PinsView(_View):
    """All pins of all tiers."""

    pins: list[PinView]
    silent: list[str] = Field(default_factory=list)


class AuditEntryView(view_of(Audited)):  # type: ignore[misc]
    """A change that an operator has asked for, by any of the ways."""


class AuditView(_View):
    """The newest changes, oldest first."""

    entries: list[AuditEntryView]
