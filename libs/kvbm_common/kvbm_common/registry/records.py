"""Services as every registry tells them: records, and the events of their coming and going."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvbm_common.errors import RegistryUnavailable
from kvbm_common.wire.epochs import epoch_max
from kvbm_common.wire.events import Natural, Token

PARTITIONS_INFO = "partitions"
"""In `info`: for how many partitions a service publishes events; left out: one."""
ENGINE = "engine"
"""The kind under which a consolidator enters the engines it hears. They serve no verbs."""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live service in the registry."""

    kind: Token
    host: Token
    instance: Token
    epoch: Natural
    pid: int
    started_ms: int
    """Wall clock, for people."""
    ttl_s: float
    info: dict[str, str | int | float | bool | None] = {}
    """Facts that peers of the service need: endpoints, sizes, names."""

    reads_packed: bool = False
    """True if the service reads packed events. Releases before them say nothing."""

    held_by: str = ""
    """The key of another entry of the same process, whose heartbeats speak for this one; empty: it
    has its own. `ttl_s` is for releases that do not know this."""

    held_epoch: Natural = 0
    """The epoch of the entry `held_by`: its next life speaks for nothing of this one."""

    machine: str = ""
    """A digest that tells running kernels apart. Releases before them say nothing."""

    machine_name: str = ""
    """The name that the machine, or container, has for itself: for people."""

    @property
    def key(self) -> str:
        """`<kind>.<host>.<instance>`: one service in all its lives."""
        return f"{self.kind}.{self.host}.{self.instance}"


@dataclass(frozen=True, slots=True)
class Joined:
    """A service is there that was not."""

    record: ServiceRecord


@dataclass(frozen=True, slots=True)
class Changed:
    """A service says something else, or lives a new life (another epoch)."""

    before: ServiceRecord
    record: ServiceRecord


@dataclass(frozen=True, slots=True)
class Left:
    """A service is gone: `deleted` by itself, or `expired` in silence."""

    record: ServiceRecord
    reason: str


RegistryEvent = Joined | Changed | Left
Info = dict[str, str | int | float | bool | None]


def require_believable(epoch: int, now_s: float) -> None:
    """Raise RegistryUnavailable for an epoch from the future: consumers would drop all events of
    such a life, and believe what it said before."""
    if epoch > epoch_max(now_s):
        text = (
            f"epoch {epoch} is more than a day ahead of this host's clock: either it is wrong, or"
        )
        raise RegistryUnavailable(f"{text} the store's was when the registry was made: delete that")
