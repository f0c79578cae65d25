"""The back end's options: KVBM's settings, and what SGLang's extra config overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbm_common.errors import ConfigError

from kvbm_connectors.client.engine_options import EngineOptions, settings_of

WHERE = "hicache_storage_backend_extra_config"
SGLANGS = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
})  # fmt: skip
"""Keys of the same mapping that are SGLang's own."""
OURS = frozenset({"revision"})


@dataclass(frozen=True, slots=True)
class Options(EngineOptions):
    """What is in force in one rank of an engine."""

    revision: str = ""
    """An operator's name for the weights; then that, with all that changes what is computed."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """See `settings_of`. Raises ConfigError for a value that does not parse, and where SGLang
        was not told to use the calls that we implement."""
        if not extra.get("interface_v1"):
            raise ConfigError("interface_v1", str(extra.get("interface_v1")), "1: pages are read "
                              "and written where they are")  # fmt: skip
        settings = settings_of(extra, environ, where=WHERE, others=SGLANGS | OURS)
        return cls(settings, str(extra.get("revision", "")))

    def of_revision(self, revision: str) -> Options:
        """Return the same options for certain weights."""
        return replace(self, revision=revision)
