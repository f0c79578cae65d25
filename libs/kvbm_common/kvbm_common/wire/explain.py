"""Explain verbs: why blocks were found or missed.

For each lookup that a host tier has answered: where its blocks came from, and why others did not.
For a block that a lower tier lacks: what became of it.

A host tier keeps its last requests (`KVBM_EXPLAIN_REQUESTS`). Times are wall-clock ms since 1970.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.events import Natural

LIST_MAX = 1_000
"""Requests in one reply."""
FATES_MAX = 4_096
"""Blocks in one question."""
REQUEST_CHARS_MAX = 256
"""Characters of an engine's request id; a longer one is cut."""

Place = Literal["device", "host", "disk", "object", "remote", ""]
"""A tier of this host, or host memory of another."""


def _says(text: str) -> Meta:
    """Return what a field means, for the documents of NATS and HTTP."""
    return Meta(description=text)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    v: Literal[1] = VERSION  # type: ignore[assignment]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring blocks of a request that have one fate.

    A hit has a `tier` and no `reason`. Of a miss, `tier` is where it was last or what failed.
    """

    blocks: Natural
    tier: Annotated[Place, _says("Where it came from, was last, or what failed.")] = ""
    reason: str = ""
    hash: Annotated[str, _says("Of its first block; see /v1/blocks/{hash}.")] = ""
    policy: Annotated[str, _says("Which eviction policy chose it.")] = ""
    at_ms: Annotated[Natural, _says("When that happened; 0: not known.")] = 0
    """To its first block; of `never_stored`, how far back we know."""
    detail: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One lookup, block by block."""

    request: str
    engine: str
    ts_ms: Annotated[Natural, _says("Wall clock, ms since 1970.")]
    blocks: Annotated[Natural, _says("Blocks that were asked for.")]
    hit_blocks: Natural
    reason: Annotated[str, _says("Of the first missed block; empty: none was missed.")]
    segments: list[Segment]
    """In the order of the blocks."""
    outcome: Annotated[
        str, _says("Why blocks that were found were not used; empty: they were.")
    ] = ""
    """The outcome that its connector has reported after the answer."""
    lost_blocks: Annotated[Natural, _says("Blocks that were found and not used.")] = 0
    trace: str = ""
    """Its trace in OpenTelemetry, 32 hex digits."""


class ExplainRequest(_Message, frozen=True, kw_only=True):
    """The question why a request of an engine missed."""

    request: str


class ExplainReply(_Message, frozen=True, kw_only=True):
    """Its lookups, the newest first; none when it is not (or no longer) kept."""

    requests: list[Explanation]
    kept: Natural
    """Requests that are kept now."""
    since_ms: Natural = 0
    """The oldest of them."""


class ExplainListRequest(_Message, frozen=True, kw_only=True):
    """The latest requests. With `reason` only those whose first missed block has it; `before`
    goes on where a reply has ended."""

    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100
    reason: str = ""
    engine: str = ""
    missed: bool = False
    """Only those that missed a block."""
    before: Natural = 0


class ExplainListReply(_Message, frozen=True, kw_only=True):
    """The newest first. `next` is the `before` that goes on; 0: nothing older is kept."""

    requests: list[Explanation]
    next: Natural = 0


class FatesRequest(_Message, frozen=True, kw_only=True):
    """The question what became of these blocks in this tier."""

    hashes: Annotated[list[str], Meta(max_length=FATES_MAX)]


class FateEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`why` is empty when nothing is known."""

    why: str
    ago_ms: Natural = 0
    detail: str = ""


class FatesReply(_Message, frozen=True, kw_only=True):
    """One for each hash, in the asked order."""

    fates: list[FateEntry]


explain_request: JsonCodec[ExplainRequest] = JsonCodec(ExplainRequest)
explain_reply: JsonCodec[ExplainReply] = JsonCodec(ExplainReply)
explain_list_request: JsonCodec[ExplainListRequest] = JsonCodec(ExplainListRequest)
explain_list_reply: JsonCodec[ExplainListReply] = JsonCodec(ExplainListReply)
fates_request: JsonCodec[FatesRequest] = JsonCodec(FatesRequest)
fates_reply: JsonCodec[FatesReply] = JsonCodec(FatesReply)
