"""The back end's options: KVBM's settings, and what SGLang's extra config overrides."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbm_common.config import Settings, settings_by_name
from kvbm_common.errors import ConfigError

from kvbm_connectors.core import Limits
from kvbm_connectors.worker import VERIFY_SAMPLE

log = logging.getLogger(__name__)

SGLANGS = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
})  # fmt: skip
"""Keys of the same mapping that are SGLang's own."""
OURS = frozenset({"revision"})


@dataclass(frozen=True, slots=True)
class Options:
    """What is in force in one rank of an engine."""

    settings: Settings
    revision: str = ""
    """Of the weights, if SGLang's arguments do not say it."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """Settings from the environment; `extra` goes before it, by attribute or variable name.

        Raises ConfigError for a value that does not parse, and where SGLang was not told to use
        the calls that we implement. A name that is no setting is logged.
        """
        if not extra.get("interface_v1"):
            raise ConfigError("interface_v1", str(extra.get("interface_v1")), "1: pages are read "
                              "and written where they are")  # fmt: skip
        names = settings_by_name()
        by_variable = {declared.variable: name for name, declared in names.items()}
        overrides: dict[str, object] = {}
        for key, value in extra.items():
            name = by_variable.get(key, key)
            if name in names:
                overrides[name] = value
            elif key not in SGLANGS | OURS:
                log.warning("hicache_storage_backend_extra_config.%s is not a setting", key)
        return cls(Settings.load(environ, overrides), str(extra.get("revision", "")))

    def of_revision(self, revision: str) -> Options:
        """The same for certain weights."""
        return replace(self, revision=revision)

    @property
    def limits(self) -> Limits:
        """The bounds of the connector's core."""
        return Limits.of(self.settings)

    @property
    def verify_every(self) -> int:
        """One load in so many is verified; 0: none."""
        return {"always": 1, "sampled": VERIFY_SAMPLE, "never": 0}[self.settings.verify_host_reads]
