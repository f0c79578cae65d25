"""What `kvbm nats-config` writes for a fleet with zones, and for a zone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvbm_cli.creds.commands import plan_of, write_all
from kvbm_cli.creds.zone_config import take_leaf
from kvbm_common.access import nkeys
from kvbm_common.errors import ConfigError
from kvbm_common.nats.streams import StreamLimits

FLEET: dict[str, Any] = {
    "hosts": ("ctl",), "tenants": ("x", "y"), "names": ("localhost",),
    "streams": StreamLimits(zones=("east", "west")),
}  # fmt: skip
ZONE: dict[str, Any] = {
    "hosts": ("e0",), "tenants": ("x", "y"), "zone": "east", "fleet": ("tls://localhost:7422",),
}  # fmt: skip


def written(directory: Path, **given: Any) -> dict[str, Any]:
    """Run it; return the server's configuration."""
    path = write_all(directory, plan_of(directory, given))
    configuration: dict[str, Any] = json.loads(path.read_text())
    return configuration


def test_a_zone_comes_with_the_key_that_its_fleet_has_made(tmp_path: Path) -> None:
    """1. A fleet, run twice: nothing changes. 2. A zone takes its directory, and later knows it."""
    fleet = written(tmp_path / "fleet", **FLEET)
    assert written(tmp_path / "fleet") == fleet
    assert fleet["leafnodes"]["listen"] == "0.0.0.0:7422"
    assert fleet["leafnodes"]["tls"] == fleet["tls"]
    take_leaf(tmp_path / "east", tmp_path / "fleet/zones/east")
    zone = written(tmp_path / "east", **ZONE)
    assert written(tmp_path / "east") == zone
    assert zone["jetstream"]["domain"] == "east"
    assert [one["account"] for one in zone["leafnodes"]["remotes"]] == ["x", "y"]
    for remote in zone["leafnodes"]["remotes"]:
        users = fleet["accounts"][remote["account"]]["users"]
        public = nkeys.public_of(remote["nkey"])
        [user] = [user for user in users if user["nkey"] == public]
        assert user["allowed_connection_types"] == ["LEAFNODE"]
        assert "$JS.east.API.>" in user["permissions"]["subscribe"]["allow"]
        assert "kvbm.v1.events.>" in remote["deny_exports"]
        authority = Path(remote["tls"]["ca_file"]).read_text()
        assert authority == (tmp_path / "fleet/server/ca.pem").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_configuration_without_zones_is_that_of_before(tmp_path: Path) -> None:
    """No port, no domain, no user more."""
    configuration = written(tmp_path, hosts=("a",))
    assert "leafnodes" not in configuration
    assert "domain" not in configuration["jetstream"]
    assert not (tmp_path / "zones").exists()


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--leaf", {}),
        ("--zone", {"zone": "a.b"}),
        ("--zone", {"zone": ""}),
        ("--fleet", {"fleet": ()}),
        ("--fleet", {"fleet": ("http://localhost:7422",)}),
        ("--leaf-listen", {"leaf_listen": "7422"}),
        ("KVBM_ZONES", {"streams": StreamLimits(zones=("b",))}),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(
    tmp_path: Path, option: str, given: dict[str, Any]
) -> None:
    """Goal: a zone is named, has a fleet and a key, and no zones of its own."""
    with pytest.raises(ConfigError, match=option):
        written(tmp_path, **ZONE | given)
