"""The configuration: one typed, frozen object from variables, a TOML file and defaults.

The command line goes before the environment, the environment before the file, the file before the
default. The names and meanings of `DYN_KVBM_*` are those of NVIDIA's KVBM; `KVBM_*` are ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_common.config import schema
from kvbm_common.config.declarations import DeclaredSettings, all_settings, settings_by_name
from kvbm_common.config.schema import Setting, text_of
from kvbm_common.errors import ConfigError

FILE_VARIABLE = "KVBM_CONFIG_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(DeclaredSettings):
    """The configuration in force. Sizes in GB mean 1e9 bytes."""

    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Name of an attribute that is not at its default → the origin of its value."""
    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Warnings for the operator: unknown names and names without effect."""

    def __post_init__(self) -> None:
        for name, socket_name in (
            ("host_tier_endpoint", "host-tier.sock"),
            ("consolidator_endpoint", "consolidator.sock"),
            ("router_endpoint", "router.sock"),
            ("router_replay_endpoint", "router-replay.sock"),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, f"ipc://{self.runtime_dir / socket_name}")
        if self.object_url:
            self._follow_object_url()
        if self.creds_dir == schema.UNSET_DIR:
            object.__setattr__(self, "creds_dir", self.state_dir / "creds")
        if self.disk_cache_dirs == (schema.UNSET_DIR,):
            object.__setattr__(self, "disk_cache_dirs", (self.state_dir / "disk",))
        if self.registry_url == "etcd":
            try:
                schema.etcd_servers(self.etcd_endpoints)
            except ValueError as error:
                accepted = schema.ETCD_SERVERS
                shown = schema.HIDDEN if "@" in self.etcd_endpoints else self.etcd_endpoints
                raise ConfigError("ETCD_ENDPOINTS", shown, accepted) from error

    def _follow_object_url(self) -> None:
        """Set what the URL says: the object tier is on, and has this bucket."""
        object.__setattr__(self, "object_enabled", True)
        bucket = self.object_url.removeprefix("s3://")
        if bucket == self.object_url:
            return
        if self.object_bucket not in ("", bucket):
            accepted = f"nothing, or {bucket}, since KVBM_OBJECT_URL is {self.object_url}"
            raise ConfigError("DYN_KVBM_OBJECT_BUCKET", self.object_bucket, accepted)
        object.__setattr__(self, "object_bucket", bucket)

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> Settings:
        """Read the command line's overrides (by attribute name), variables, file and defaults.

        An empty variable counts as unset. Raises ConfigError for a value that does not parse and
        for a file that cannot be read.
        """
        texts, origins, warnings = _texts_of_file(environ.get(FILE_VARIABLE, ""))
        for declared in all_settings():
            if environ.get(declared.variable):
                texts[declared.name] = environ[declared.variable]
                origins[declared.name] = f"environment {declared.variable}"
        for name, value in (overrides or {}).items():
            assert name in settings_by_name(), f"no setting is called {name}"
            texts[name] = text_of(value)
            origins[name] = "command line"
        values: dict[str, Any] = {
            name: _parse(settings_by_name()[name], text, origins[name])
            for name, text in texts.items()
            if text
        }
        warnings += _warnings_of_names(environ)
        return cls(**values, origins=origins, warnings=tuple(warnings))

    def provenance(self, name: str) -> str:
        """Return a value's origin: `environment NAME`, `file PATH`, `command line`, `default`."""
        assert name in settings_by_name(), f"no setting is called {name}"
        return self.origins.get(name, "default")

    def as_environ(self, kind: str | None = None) -> dict[str, str]:
        """Return every value that is not a default, as variables: what a child process needs.

        With a kind: what a service of this kind needs, without the secrets of others.
        """
        return {
            settings_by_name()[name].variable: text_of(getattr(self, name))
            for name in self.origins
            if getattr(self, name) is not None and is_for(settings_by_name()[name], kind)
        }

    @property
    def etcd_servers(self) -> tuple[str, ...]:
        """The addresses of the registry's etcd, as `HOST:PORT`; empty when NATS is the registry."""
        if self.registry_url == "nats":
            return ()
        in_url = self.registry_url != "etcd"
        return schema.etcd_servers(self.registry_url if in_url else self.etcd_endpoints)

    @property
    def etcd_wants_tls(self) -> bool:
        """Tell whether an address of etcd says that only TLS will do."""
        return self.registry_url == "etcd" and "https://" in self.etcd_endpoints

    @property
    def cpu_cache_bytes(self) -> int:
        """Return `cpu_cache_gb` in bytes."""
        return int(self.cpu_cache_gb * 1e9)

    @property
    def disk_cache_bytes(self) -> int:
        """Return `disk_cache_gb` in bytes."""
        return int(self.disk_cache_gb * 1e9)

    @property
    def disk_cache_dir(self) -> Path:
        """The only directory, or the first."""
        return self.disk_cache_dirs[0]

    def store_name(self, instance: str) -> str:
        """Return the name of the directory in which a disk tier of this host keeps its blocks."""
        return f"kvbm-{self.host}-{instance}"

    def disk_store(self, directory: Path, instance: str) -> Path:
        """Return where a disk tier of this host keeps its blocks, below a directory for a disk."""
        return directory / self.store_name(instance)

    @property
    def object_directory(self) -> Path | None:
        """The directory of the object tier; None: it uses a bucket."""
        path = self.object_url.removeprefix("file://")
        return Path(path) if path != self.object_url else None

    @property
    def staging_bytes(self) -> int:
        """Return `staging_gb` in bytes."""
        return int(self.staging_gb * 1e9)


def is_for(declared: Setting, kind: str | None) -> bool:
    """Tell whether a kind of service gets a setting; without a kind everything is wanted."""
    return kind is None or not declared.only_for or kind in declared.only_for


def _parse(declared: Setting, text: str, origin: str) -> object:
    try:
        return declared.parser.parse(text)
    except ValueError:
        where = declared.variable
        if origin.startswith("file"):
            where = f"{declared.section}.{declared.name} in {origin} ({declared.variable})"
        # Where the password ends is not sure in a URL that cannot be read.
        shown = schema.HIDDEN if declared.secret or "@" in text else text
        raise ConfigError(where, shown, declared.parser.accepts) from None


def _texts_of_file(path: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Read a TOML file: its values as texts by attribute name, their origins, and warnings."""
    if not path:
        return {}, {}, []
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(FILE_VARIABLE, path, f"a readable TOML file ({error})") from error
    texts: dict[str, str] = {}
    warnings: list[str] = []
    known = {f"{declared.section}.{declared.name}": declared.name for declared in all_settings()}
    for section, table in tables.items():
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            dotted = f"{section}.{key}".rstrip(".")
            if dotted in known and not isinstance(value, dict | list):
                texts[known[dotted]] = text_of(value)
            else:
                warnings.append(f"{path}: {dotted} is not a setting{_guess(dotted, known)}")
    return texts, dict.fromkeys(texts, f"file {path}"), warnings


def _warnings_of_names(environ: Mapping[str, str]) -> list[str]:
    known = {declared.variable for declared in all_settings()} | {FILE_VARIABLE}
    warnings = []
    for name in sorted(environ):
        if not name.startswith(("DYN_KVBM_", "KVBM_")) or name in known:
            continue
        reason = schema.NO_EFFECT.get(name) or next(
            (why for prefix, why in schema.NO_EFFECT_PREFIXES.items() if name.startswith(prefix)),
            "",
        )
        if reason:
            warnings.append(f"{name} has no effect here: {reason}")
        else:
            warnings.append(f"{name} is not a setting{_guess(name, known)}")
    return warnings


def _guess(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
