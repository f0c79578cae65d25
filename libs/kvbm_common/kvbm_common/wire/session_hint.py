"""Session hints: what an agent plans for its session's KV, sent by connectors to host tiers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm_common.identity import HASH_BYTES
from kvbm_common.wire import VERSION
from kvbm_common.wire.events import Natural, Token
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local_fields import Incarnation

SESSION_CHARS_MAX = 256
HINT_TTL_MS_MAX = 3_600_000
"""The longest time to live of a pin; a longer one is cut to it."""

Action = Literal["pin", "demote", "prefetch"]


class SessionHint(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sessionhint"):
    """A hint on the future of a session's blocks. It has no answer.

    `pin`: keep them until `ttl_ms` have passed. `demote`: let them leave first, and have the disk
    tier write those that it lacks. `prefetch`: bring them to host memory.
    """

    v: Literal[1] = VERSION  # type: ignore[assignment]
    engine: Token
    incarnation: Incarnation
    namespace: bytes
    """The 32-byte digest of the first KV group's namespace."""
    session: Annotated[str, Meta(min_length=1, max_length=SESSION_CHARS_MAX)]
    action: Action
    hashes: Annotated[bytes, Meta(max_length=HASH_BYTES * MATCH_BLOCKS_MAX)] = b""
    """The session's blocks from now on, packed, prefix first; empty: those of its last hint."""
    ttl_ms: Natural = 0
