"""Bodies of the HTTP API about parts of a tier: slots of one size, and what one tenant has."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class SizeView(BaseModel, frozen=True):
    """The slots of one size in a tier."""

    slot_bytes: int
    slabs: int
    slots: int
    slots_used: int
    bytes_used: int


class TenantView(BaseModel, frozen=True):
    """The blocks and bytes of one tenant in a tier."""

    name: Annotated[str, Field(description="Empty: engines without KVBM_TENANT.")]
    blocks: int
    bytes: int
    share_bytes: Annotated[int, Field(description="What it keeps when others want all.")]
    waiting: Annotated[int, Field(description="Blocks that wait to be written.")] = 0
