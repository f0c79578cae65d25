"""Messages between an engine's connector and the consolidator: msgpack over ZMQ, as in `local`.

connector                         consolidator
Attach ────────────────────────►            (again when what it says has changed)
      ◄───────────────────────── Attached | Refused
Offered ───────────────────────►            (goes on to the host tier as `verbs.Offer`)
Beat ──────────────────────────►
Detach ────────────────────────►            (the engine ends)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbm_common.identity import Namespace
from kvbm_common.wire import VERSION
from kvbm_common.wire.codec import MsgpackCodec
from kvbm_common.wire.events import Natural, Positive, Token
from kvbm_common.wire.local import Beat, Refused
from kvbm_common.wire.local_fields import Adapter, Generation, GroupNamespaces, Incarnation


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    v: Literal[1] = VERSION  # type: ignore[assignment]


class Attach(_Message, frozen=True, kw_only=True):
    """Follow this engine's event stream (vLLM's wire) and name its blocks in `namespace`.

    The engine's PUB and ROUTER listen at the endpoints. Without events it has none (`""`).

    Sent again when generation, `adapters` or `passes_through` change; all else begins another life.
    """

    engine: Token
    incarnation: Incarnation
    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    rank: Natural = 0
    """Data-parallel rank."""
    namespace: Namespace
    generation: Generation = ""
    """Part of the names of blocks that are stored after the engine's cache is cleared next."""
    generation_us: Natural = 0
    """A time when its cache had no older block, in µs on its events' clock. 0: with a clear."""
    adapters: list[Adapter] | None = None
    """The adapters that requests have used. None: an adapter's name alone names its blocks."""
    group_namespaces: GroupNamespaces = []
    """The namespaces of the model's other KV groups; `namespace` is the first group's."""
    passes_through: str = ""
    """The reason why the engine computes without a cache, for people; empty: it has one."""
    shows_extra_keys: bool = False
    """True if the hash of a prompt's first block shows an extra key that no event says (SGLang)."""


class Attached(_Message, frozen=True, kw_only=True):
    """The stream is followed, under this epoch."""

    engine: Token
    rank: Natural
    epoch: Natural
    offers: bool = True
    """True if offers can be passed on now. The message is sent again when that changes."""
    generation: Generation = ""
    """The one that was said last, in force from the next clear on."""


class Detach(_Message, frozen=True, kw_only=True):
    """The engine ends: announce its device blocks as gone."""

    engine: Token
    incarnation: Incarnation


class OfferedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of device blocks on offer: packed hashes, and the block id of each."""

    parent: bytes
    hashes: bytes
    blocks: list[Natural]


class Offered(_Message, frozen=True, kw_only=True):
    """An offer on its way from the connector to the consolidator, which sends `verbs.Offer`."""

    engine: Token
    incarnation: Incarnation
    offer: Natural
    namespace: bytes
    deadline_ms: Positive
    priority: int = 0
    runs: list[OfferedRun]


ToConsolidator = Attach | Detach | Offered | Beat
FromConsolidator = Attached | Refused

to_consolidator: MsgpackCodec[ToConsolidator] = MsgpackCodec(ToConsolidator)
from_consolidator: MsgpackCodec[FromConsolidator] = MsgpackCodec(FromConsolidator)
