"""Types of fields of local messages: how an engine's lives and caches are named."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbm_common.identity import Namespace
from kvbm_common.tier.kv_groups import GROUPS_MAX
from kvbm_common.wire.events import Natural

Incarnation = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$(?!\n)")]
"""The drawn name of one life of an engine."""
Generation = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?$(?!\n)")]
"""Empty until an engine's caches are reset for the first time."""
GroupNamespaces = Annotated[list[Namespace], Meta(max_length=GROUPS_MAX - 1)]
LOOKUP_MS_MAX = 3_600_000
LookupMs = Annotated[int, Meta(ge=1, le=LOOKUP_MS_MAX)]
"""Settings allow less. A lease outlives an engine that falls silent: it pins slots for so long."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter as events of an engine call it, and the digest of its content."""

    id: Natural
    name: str
    content: str
