"""Services as every registry tells them: records, and the events of their coming and going."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvbm_common.wire.events import Natural, Token

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
    """What its peers need: endpoints, sizes, names."""

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
