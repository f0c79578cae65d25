"""What the core hears of the host tiers of its host (inputs), and says of itself (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_host_tier.core.shard_map import ShardMap

# --- inputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A host tier of this host, perhaps ourselves, has an entry or has changed it."""

    instance: str
    epoch: int
    endpoint: str
    """Empty: it serves no engine yet."""
    takes: bool
    is_new: bool
    """There was no entry before."""


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """Its entry is gone (`said_so`: it took it away itself), or no process listens at its
    endpoint."""

    instance: str
    epoch: int
    said_so: bool


@dataclass(frozen=True, slots=True)
class MapTold:
    """A front says who shares the engines."""

    shard_map: ShardMap


@dataclass(frozen=True, slots=True)
class FrontTaken:
    """We hold the well-known endpoint."""

    now_us: int
    """The time of day."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process is to end: engines are to go, if there is another host tier for them."""


ShardInput = MemberJoined | MemberLeft | MapTold | FrontTaken | Leaving


# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SayPlace:
    """Say in the registry whether we take blocks, and, as the front, what the map is."""

    takes: bool
    shard_map: ShardMap | None


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The last engine has gone, or none has anywhere to go."""


ShardEffect = SayPlace | HandedOver
