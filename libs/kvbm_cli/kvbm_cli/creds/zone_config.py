"""Output of `kvbm nats-config` for zones: the leaf link, its keys, and what may cross it.

    OUT/zones/ZONE/          for the zone: a key for each tenant, and ca.pem where there is TLS
    OUT/server/leaf/         the same in the zone's own directory, from where `--leaf` said

The first is written for a fleet (`KVBM_ZONES`), the second for a zone (`--zone`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbm_common.access import nkeys
from kvbm_common.access.secret_files import SecretFile, write_secret
from kvbm_common.errors import ConfigError
from kvbm_common.nats.zones import NEVER_CROSS, SENT_BY_ZONES, sent_to_zone

ZONES = "zones"
LEAF = Path("server", "leaf")
LEAF_LISTEN = "0.0.0.0:7422"
SUFFIX = ".seed"
CA = "ca.pem"
PING_INTERVAL = "15s"
"""A link that drops every packet is found dead after three of them."""


def write_zone_keys(directory: Path, zones: Sequence[str], tenants: Sequence[str]) -> None:
    """Write the keys with which zones come, unless they are there; raises OSError."""
    for zone in zones:
        for tenant in tenants:
            path = directory / ZONES / zone / f"{tenant}{SUFFIX}"
            if not path.exists():
                write_secret(path, f"{nkeys.make_seed()}\n")
        authority = directory / "server" / CA
        if authority.exists():
            write_secret(directory / ZONES / zone / CA, authority.read_text())


def take_leaf(directory: Path, source: Path) -> None:
    """Copy what a fleet has written for a zone into the zone's own directory.

    Raises ConfigError.
    """
    found = [*source.glob(f"*{SUFFIX}"), *source.glob(CA)]
    try:
        for path in found:
            write_secret(directory / LEAF / path.name, path.read_text())
    except OSError as error:
        raise ConfigError("--leaf", source, f"a readable directory ({error})") from error


def leaf_users(directory: Path, zones: Sequence[str], tenant: str) -> Iterator[dict[str, Any]]:
    """Yield the users as which the zones of a fleet come, and what may cross their links."""
    for zone in zones:
        seed = SecretFile(directory / ZONES / zone / f"{tenant}{SUFFIX}", "--out").text()
        yield {
            "nkey": nkeys.public_of(seed),
            "allowed_connection_types": ["LEAFNODE"],
            "permissions": {
                "publish": {"allow": list(SENT_BY_ZONES), "deny": list(NEVER_CROSS)},
                "subscribe": {"allow": list(sent_to_zone(zone)), "deny": list(NEVER_CROSS)},
            },
        }


def remotes(
    directory: Path, fleet: Sequence[str], tenants: Sequence[str], server_dir: str
) -> list[dict[str, Any]]:
    """Return a zone's links to its fleet, one for each tenant; raises ConfigError.

    nats-server takes the seed of a link in its configuration only, so this file is a secret.
    """
    found = []
    for tenant in tenants:
        path = directory / LEAF / f"{tenant}{SUFFIX}"
        if not path.exists():
            accepted = f"the directory {ZONES}/ZONE of the fleet, with {tenant}{SUFFIX} in it"
            raise ConfigError("--leaf", path.parent, accepted)
        found.append(
            {
                "urls": list(fleet),
                "account": tenant,
                "nkey": SecretFile(path, "--leaf").text(),
                **denied(),
                **_tls(directory, fleet, server_dir),
            }
        )
    return found


def denied() -> Mapping[str, list[str]]:
    """Return what the link of a zone carries in neither direction."""
    return {"deny_exports": list(NEVER_CROSS), "deny_imports": list(NEVER_CROSS)}


def _tls(directory: Path, fleet: Sequence[str], server_dir: str) -> dict[str, Any]:
    if not any(urlsplit(url).scheme == "tls" for url in fleet):
        return {}
    authority = directory / LEAF / CA
    if not authority.exists():
        return {"tls": {}}
    text, place = authority.read_text(), directory / "server" / "fleet-ca.pem"
    write_secret(place, text)
    return {"tls": {"ca_file": f"{server_dir or place.parent.absolute()}/{place.name}"}}
