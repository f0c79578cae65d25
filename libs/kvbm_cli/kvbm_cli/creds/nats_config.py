"""Output of `kvbm nats-config`: nats-server's configuration, and a file for each credential.

    OUT/layout.json          hosts, tenants, …: what the next run takes where nothing is given
    OUT/server/              for nats-server: nats-server.conf, ca.pem, server.pem, server.key
    OUT/etcd/                for etcd, if it is wanted: ca.pem, server.pem, server.key
    OUT/TENANT/HOST/         for one host: a file for each of its roles, ca.pem
    OUT/TENANT/shared/       the same for index, metrics, admin and consumer
    OUT/authority/           the key that signs certificates: keep it away from servers
    OUT/zones/ZONE/          the keys with which zones of a fleet come: see `zone_config.py`

A tenant is an account of NATS: its own streams, registry and subjects, and no way to another's. A
directory of a host, or `shared`, is what `KVBM_CREDS_DIR` names there. A run makes what is missing
and leaves what is there. The server's configuration has public keys only, but for a zone's link.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvbm_common.access import nkeys
from kvbm_common.access.nats_access import SUFFIX
from kvbm_common.access.nats_credentials import Credentials
from kvbm_common.access.roles import ROLES, Role
from kvbm_common.access.secret_files import SecretFile, write_secret
from kvbm_common.config.schema import TOKEN
from kvbm_common.errors import ConfigError
from kvbm_common.nats.embedded_server import PAYLOAD_BYTES_MAX, configuration_text
from kvbm_common.nats.streams import (
    AS_THEY_COME,
    CONSUMERS_MAX,
    Partitions,
    StreamLimits,
    StreamSpec,
)

from kvbm_cli.creds import zone_config
from kvbm_cli.creds.server_users import user_of

SHARED = "shared"
SYSTEM = "SYS"
RESERVED = frozenset({SHARED, "server", "etcd", "authority", "zones", SYSTEM, "$G"})
PREVIOUS = "previous.json"
PLAN_FILE = "layout.json"
CONFIGURATION = "nats-server.conf"
MEMORY_BYTES = 64 * 1024 * 1024
SERVER_STORE_BYTES = 1 << 50
"""More than all accounts have, whose own bounds count. nats-server refuses to reload a
configuration in which this number is smaller, and all that came with it."""


class CredentialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet that the files are written for."""

    hosts: tuple[str, ...]
    tenants: tuple[str, ...] = ("kvbm",)
    instances: int = 8
    """Instances of each tier on each host, numbered from 0."""
    listen: str = "0.0.0.0:4222"
    store_dir: str = "/data"
    server_dir: str = ""
    """The directory in which the server finds its files; empty: where they are written."""
    names: tuple[str, ...] = ()
    """Names and addresses of NATS in its certificate; empty: no TLS."""
    etcd_names: tuple[str, ...] = ()
    streams: StreamLimits = AS_THEY_COME
    """Limits of a tenant's streams, as the settings say, for the room that they may take. Its zones
    are those that may come."""
    partitions_before: int = 0
    """The number of partitions that the fleet leaves, with room until `--drop-old`; 0: none."""
    leaf_listen: str = zone_config.LEAF_LISTEN
    """The address on which a fleet's server waits for its zones."""
    zone: str = ""
    """The name of this zone of a fleet; empty: no zone."""
    fleet: tuple[str, ...] = ()
    """The addresses on which the fleet's server waits for this zone."""

    def check(self) -> CredentialPlan:
        """Return the plan; raises ConfigError for a name that cannot be one."""
        for option, names in (("--hosts", self.hosts), ("--tenants", self.tenants)):
            if not names:
                raise ConfigError(option, "", "a name, or several with commas between")
            for name in names:
                _check_name(option, name)
        for option, listen in (("--listen", self.listen), ("--leaf-listen", self.leaf_listen)):
            if not LISTEN.fullmatch(listen):
                raise ConfigError(option, listen, "ADDRESS:PORT, as 0.0.0.0:4222")
        self._check_zone()
        for option, names in (("--names", self.names), ("--etcd-names", self.etcd_names)):
            for name in names:
                _check_server_name(option, name)
        return self

    def _check_zone(self) -> None:
        if not (self.zone or self.fleet):
            return
        _check_name("--zone", self.zone)
        if self.streams.zones:
            raise ConfigError("KVBM_ZONES", ",".join(self.streams.zones), "none: a zone has none")
        if not self.fleet or not all(map(LEAF_URL.fullmatch, self.fleet)):
            accepted = "nats://HOST:PORT or tls://HOST:PORT, several with commas between"
            raise ConfigError("--fleet", ",".join(self.fleet), accepted)

    def after(self, before: CredentialPlan) -> CredentialPlan:
        """Return the plan with the number of partitions that an earlier run was for.

        Raises ConfigError for a third number.
        """
        now, earlier = self.partitions[0], before.partitions
        if not before.hosts or now == earlier[0]:
            return self
        if len(earlier) > 1 and now not in earlier:
            accepted = f"{earlier[0]} or {earlier[1]}: --drop-old with one of them ends the change"
            raise ConfigError("KVBM_INDEX_PARTITIONS", now, accepted)
        return msgspec.structs.replace(self, partitions_before=earlier[0])

    @property
    def partitions(self) -> tuple[int, ...]:
        """Return the number of partitions, and after it the one that the fleet leaves."""
        before = (self.partitions_before,) if self.partitions_before else ()
        return (self.streams.partitioned.count, *before)

    @property
    def all_streams(self) -> list[StreamSpec]:
        """Return the streams of a tenant, with those of the number of partitions before."""
        every = [spec for count in self.partitions for spec in Partitions(count).streams]
        return list({spec.name: spec for spec in every}.values())

    @property
    def instance_names(self) -> list[str]:
        """Names that instances may have: those of containers, and of `kvbm up` with many disks."""
        several = [f"0-{number}" for number in range(1, self.instances)]
        return [*(str(number) for number in range(self.instances)), *several]


SERVER_NAME = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+")
"""A name of DNS as a certificate has it, perhaps of all in a domain."""
SERVER_NAME_CHARS = 253
LISTEN = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-f:.]+\]):\d{1,5}")
LEAF_URL = re.compile(rf"(nats|tls)://{LISTEN.pattern}")


@dataclass(frozen=True, slots=True)
class Place:
    """One credential: whose, and where its file is below the directory that is written."""

    tenant: str
    host: str
    role: Role

    @property
    def path(self) -> str:
        """The file, relative to the folder of all credentials."""
        folder = self.host if self.role.per_host else SHARED
        return f"{self.tenant}/{folder}/{self.role.name}{SUFFIX}"


def places_of(plan: CredentialPlan) -> Iterator[Place]:
    """Yield every credential of a plan."""
    for tenant in plan.tenants:
        for role in ROLES:
            for host in plan.hosts if role.per_host else ("",):
                yield Place(tenant, host, role)


def read_plan(directory: Path) -> CredentialPlan | None:
    """Return what an earlier run was for; None: there was none. Raises ConfigError."""
    path = directory / PLAN_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CredentialPlan)
    except (OSError, msgspec.MsgspecError) as error:
        accepted = f"a file that kvbm nats-config has written ({error})"
        raise ConfigError("--out", path, accepted) from error


def write_credentials(
    directory: Path, plan: CredentialPlan, *, rotate: bool = False, drop_old: bool = False
) -> Path:
    """Write everything but certificates; returns the server's configuration. Raises ConfigError.

    With `rotate` every credential is replaced; the server takes the old ones as well, until a run
    with `drop_old`. That ends a change of the number of partitions, too.
    """
    previous = {} if drop_old else _previous(directory)
    if drop_old:
        plan = msgspec.structs.replace(plan, partitions_before=0)
    if rotate and previous:
        raise ConfigError("--rotate", directory, "no rotation that is open: --drop-old ends it")
    seeds: dict[Place, str] = {}
    for place in places_of(plan):
        path = directory / place.path
        seed = _seed_in(path) if path.exists() else ""
        if seed and rotate:
            previous[place.path] = nkeys.public_of(seed)
            seed = ""
        seeds[place] = seed or nkeys.make_seed()
    # In this order a run that was interrupted is completed by the next one.
    write_secret(directory / "server" / PREVIOUS, json.dumps(previous, indent=1))
    for place, seed in seeds.items():
        write_secret(directory / place.path, f"{seed}\n")
    zone_config.write_zone_keys(directory, plan.streams.zones, plan.tenants)
    configuration = directory / "server" / CONFIGURATION
    text = configuration_text(configuration_of(plan, seeds, previous, directory))
    write_secret(configuration, f"{text}\n")
    write_secret(directory / PLAN_FILE, msgspec.json.format(msgspec.json.encode(plan)).decode())
    return configuration


def configuration_of(
    plan: CredentialPlan, seeds: Mapping[Place, str], previous: Mapping[str, str], directory: Path
) -> dict[str, Any]:
    """Return the server's configuration, which nats-server reads as JSON."""
    store_bytes = plan.streams.store_bytes_of(plan.all_streams)
    accounts: dict[str, Any] = {
        tenant: {
            "jetstream": {
                "max_file": store_bytes * (plan.streams.replicas or 1),
                "max_mem": MEMORY_BYTES,
                "max_streams": len(plan.all_streams),
                "max_consumers": CONSUMERS_MAX,
            },
            "users": [
                *_users(plan, seeds, previous, tenant),
                *zone_config.leaf_users(directory, plan.streams.zones, tenant),
            ],
        }
        for tenant in plan.tenants
    }
    configuration: dict[str, Any] = {
        "listen": plan.listen,
        "max_payload": PAYLOAD_BYTES_MAX,
        "jetstream": {
            "store_dir": plan.store_dir,
            "max_file_store": SERVER_STORE_BYTES,
        },
        "accounts": accounts | {SYSTEM: {}},
        "system_account": SYSTEM,
    }
    if plan.names:
        place = plan.server_dir or str((directory / "server").absolute())
        configuration["tls"] = {
            "cert_file": f"{place}/server.pem",
            "key_file": f"{place}/server.key",
            "ca_file": f"{place}/ca.pem",
        }
    if plan.streams.zones:
        configuration["leafnodes"] = {"listen": plan.leaf_listen}
        if "tls" in configuration:
            configuration["leafnodes"]["tls"] = configuration["tls"]
    if plan.zone:
        links = zone_config.remotes(directory, plan.fleet, plan.tenants, plan.server_dir)
        configuration["jetstream"]["domain"] = plan.zone
        configuration["leafnodes"] = {"remotes": links}
        configuration["ping_interval"] = zone_config.PING_INTERVAL
    return configuration


def _users(
    plan: CredentialPlan, seeds: Mapping[Place, str], previous: Mapping[str, str], tenant: str
) -> Iterator[dict[str, Any]]:
    for place, seed in seeds.items():
        if place.tenant != tenant:
            continue
        user = user_of(
            place.role,
            Credentials(seed=seed),
            host=place.host or "*",
            instances=plan.instance_names,
            partitions=plan.partitions,
        )
        yield user
        if (old := previous.get(place.path)) not in (None, user["nkey"]):
            yield user | {"nkey": old}


def _previous(directory: Path) -> dict[str, str]:
    """Return the public keys that are still taken, by the file that had them."""
    path = directory / "server" / PREVIOUS
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, str])


def _seed_in(path: Path) -> str:
    seed = SecretFile(path, "--out").text()
    nkeys.public_of(seed)  # Raises BadKey for what is no seed.
    return seed


def _check_name(option: str, name: str) -> None:
    try:
        TOKEN.parse(name)
    except ValueError:
        raise ConfigError(option, name, TOKEN.accepts) from None
    if name in RESERVED:
        raise ConfigError(option, name, f"another name than {', '.join(sorted(RESERVED))}")


def names_of(text: str) -> tuple[str, ...]:
    """Return names with commas between, each once.

    >>> names_of("a, b,a")
    ('a', 'b')
    """
    parts: Iterable[str] = (part.strip() for part in text.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _check_server_name(option: str, name: str) -> None:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if len(name) > SERVER_NAME_CHARS or not SERVER_NAME.fullmatch(name):
            raise ConfigError(option, name, "names of DNS, or addresses") from None
