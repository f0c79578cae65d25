"""An engine's options: KVBM's settings, and what its own configuration puts before them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_common.config.declarations import settings_by_name
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError

from kvbm_connectors.core.messages import ConnectorLimits

log = logging.getLogger(__name__)

VERIFY_SAMPLE = 16
"""`sampled` verifies one load in so many: a wrong arena is noticed soon."""
VERIFY_EVERY = {"always": 1, "sampled": VERIFY_SAMPLE, "never": 0}
PLAIN_RESETS = ("auto", "forget", "keep")
"""The choices of `plain_reset`, for an engine that empties its own cache alone: forget all that was
stored, keep it, or `auto`."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options in force in one engine."""

    settings: Settings

    @property
    def limits(self) -> ConnectorLimits:
        """The bounds of the connector's core."""
        return ConnectorLimits.of(self.settings)

    @property
    def verify_every(self) -> int:
        """One load in so many is verified; 0: none."""
        return VERIFY_EVERY[self.settings.verify_host_reads]


def settings_of(
    extra: Mapping[str, Any], environ: Mapping[str, str], *, where: str, others: Collection[str]
) -> Settings:
    """Load the settings from the environment; `extra` goes before it, by attribute or variable
    name.

    `others` are keys of the same mapping that are not settings; a key that is neither is logged, as
    one of `where`. Raises ConfigError for a value that does not parse.
    """
    names = settings_by_name()
    by_variable = {declared.variable: name for name, declared in names.items()}
    overrides: dict[str, object] = {}
    for key, value in extra.items():
        name = by_variable.get(key, key)
        if name in names:
            overrides[name] = value
        elif key not in others:
            log.warning("%s.%s is not a setting", where, key)
    return Settings.load(environ, overrides)


def one_of(accepted: Sequence[str], extra: Mapping[str, Any], name: str, *, where: str) -> str:
    """Return an option's value, or the first accepted one. Raises ConfigError for another one."""
    if (value := extra.get(name, accepted[0])) not in accepted:
        raise ConfigError(f"{where}.{name}", value, f"{', '.join(accepted[:-1])} or {accepted[-1]}")
    return str(value)


def forgets(choice: str, *, pushed: bool) -> bool:
    """Return what a choice of `PLAIN_RESETS` means in an engine whose weights are `pushed` while it
    runs, or not."""
    return pushed if choice == "auto" else choice == "forget"


def log_beside(engine_logger: str, *, level: int | None = None) -> None:
    """Write where the engine does, as loudly unless a level is given: it configures its own logger
    only."""
    theirs = logging.getLogger(engine_logger)
    for name in ("kvbm_connectors", "kvbm_common"):
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level if level is None else level)
            ours.propagate = False
