"""Options from SGLang's configuration: the back end's, and where KV events are published."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError

from kvbm_connectors.client.engine_options import (
    PLAIN_RESETS,
    EngineOptions,
    one_of,
    settings_of,
)

log = logging.getLogger(__name__)

WHERE = "hicache_storage_backend_extra_config"
SGLANGS = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
})  # fmt: skip
"""Keys of the same mapping that are SGLang's own."""
OURS = frozenset({"revision", "plain_reset"})
CALL_MAX_S = 8.0
"""The longest wait of a call. Where a flush waits 10 s for one of SGLang's storage threads, its
scheduler ends."""
DEADLINES = ("onboard_deadline_ms", "offer_deadline_ms")


@dataclass(frozen=True, slots=True)
class Options(EngineOptions):
    """The options in force in one rank of an engine."""

    revision: str = ""
    """An operator's name for the weights; then that, with all that changes what is computed."""
    plain_reset: str = PLAIN_RESETS[0]
    """One of PLAIN_RESETS: whether a flush of SGLang's own cache hides what was stored before."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """See `settings_of`. Raises ConfigError for a value that does not parse, and where SGLang
        was not told to use the calls that we implement."""
        if not extra.get("interface_v1"):
            raise ConfigError("interface_v1", str(extra.get("interface_v1")), "1: pages are read "
                              "and written where they are")  # fmt: skip
        settings = bounded(settings_of(extra, environ, where=WHERE, others=SGLANGS | OURS))
        plain_reset = one_of(PLAIN_RESETS, extra, "plain_reset", where=WHERE)
        return cls(settings, str(extra.get("revision", "")), plain_reset)

    def of_revision(self, revision: str) -> Options:
        """Return the same options for certain weights."""
        return replace(self, revision=revision)


def bounded(settings: Settings) -> Settings:
    """Return the same settings, with deadlines that end before a flush of SGLang's does."""
    longest_ms = int(1000 * CALL_MAX_S)
    late = [name for name in DEADLINES if getattr(settings, name) > longest_ms]
    if not late:
        return settings
    log.warning("%s: %d ms here, SGLang's scheduler ends where a flush waits longer for a thread",
                ", ".join(late), longest_ms)  # fmt: skip
    shorter: dict[str, Any] = dict.fromkeys(late, longest_ms)
    return replace(settings, **shorter)


FORMAT = "dynamo"
"""SGLang's format of events whose hashes hold a request's extra key."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, as an `Attach` names it; without an endpoint there are offers alone."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    shows_extra_keys: bool = False


def stream_of(config: str | None, rank: int) -> Stream:
    """Return the stream of one data-parallel rank, from `--kv-events-config`."""
    if not config:
        return Stream()
    try:
        fields: dict[str, Any] = json.loads(config)
        if fields.get("publisher") != "zmq":
            return Stream()
        endpoint = fields.get("endpoint") or "tcp://*:5557"
        if not binds(endpoint, fields.get("bind")):
            log.warning("KV events cannot be followed, SGLang connects to %s: use tcp://*:PORT, or "
                        'add "bind":true', endpoint)  # fmt: skip
            endpoint = ""
        if not (followed := reachable(endpoint, rank)):
            return Stream()  # Its replay alone would tell late, and of no flush.
        shows_extra_keys = fields.get("format") == FORMAT
        if not shows_extra_keys:
            log.info('KV events without "format":"%s" show no extra_key', FORMAT)
        return Stream(
            endpoint=followed,
            replay_endpoint=reachable(fields.get("replay_endpoint") or "", rank),
            topic=str(fields.get("topic") or ""),
            shows_extra_keys=shows_extra_keys,
        )
    except (AttributeError, TypeError, ValueError) as error:
        log.warning("--kv-events-config cannot be read, its events are not followed: %s", error)
        return Stream()


def binds(endpoint: str, asked: bool | None) -> bool:
    """Return whether SGLang binds an endpoint of its publisher, as `asked` or by the host that it
    names: it connects to the others, where a router listens."""
    if asked is not None:
        return asked
    return endpoint.startswith(("ipc://", "inproc://")) or any(
        every_host in endpoint for every_host in ("*", "::", "0.0.0.0")
    )


def reachable(endpoint: str, rank: int) -> str:
    """Return an endpoint that SGLang binds as one that a process of this host can connect to.

    With TCP, every rank adds its number to the port. Empty if the endpoint cannot be followed.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint if endpoint.startswith("ipc://") and rank == 0 else ""
    found = re.fullmatch(r"tcp://(.+):(\d+)", endpoint)
    if found is None or found[2] == "0":
        log.warning("KV events at %s cannot be followed: use tcp://*:PORT", endpoint)
        return ""
    host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(found[1], found[1])
    return f"tcp://{host}:{int(found[2]) + rank}"
