"""The connector's options: KVBM's settings, and what `kv_connector_extra_config` overrides."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbm_common.config import Settings, settings_by_name
from kvbm_common.errors import ConfigError

from kvbm_connectors.core import Limits
from kvbm_connectors.worker import VERIFY_SAMPLE

log = logging.getLogger(__name__)

LOADS = ("async", "sync")


@dataclass(frozen=True, slots=True)
class Options:
    """What is in force in one engine."""

    settings: Settings
    load: str = "async"
    """`async`: other requests compute while blocks are loaded. `sync`: the step waits for them,
    which saves a lone request two steps."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """Settings from the environment; `extra` goes before it, by attribute or variable name.

        Raises ConfigError for a value that does not parse. A name that is no setting is logged.
        """
        names = settings_by_name()
        by_variable = {declared.variable: name for name, declared in names.items()}
        load = str(extra.get("load", "async"))
        if load not in LOADS:
            raise ConfigError("kv_connector_extra_config.load", load, " or ".join(LOADS))
        overrides: dict[str, object] = {}
        for key, value in extra.items():
            name = by_variable.get(key, key)
            if name in names:
                overrides[name] = value
            elif key != "load":
                log.warning("kv_connector_extra_config.%s is not a setting", key)
        return cls(Settings.load(environ, overrides), load)

    @property
    def limits(self) -> Limits:
        """The bounds of the connector's core."""
        return Limits.of(self.settings)

    @property
    def verify_every(self) -> int:
        """One load in so many is verified; 0: none."""
        return {"always": 1, "sampled": VERIFY_SAMPLE, "never": 0}[self.settings.verify_host_reads]
