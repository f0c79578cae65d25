"""The volumes of a compose project: who gets what, run after run, on one host and on two."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from kvbm_cli.creds import containers
from kvbm_cli.creds.containers import run
from kvbm_common.access import nkeys
from kvbm_common.access.roles import ROLES
from kvbm_common.errors import ConfigError

VARIABLES = {"KVBM_HOST": "a", "KVBM_CREDS_HOSTS": "a,b", "KVBM_BIND": "127.0.0.1"}
OTHERS = {"nats", "etcd", "scrape", "streams"}
"""Volumes of what has no role of its own."""


class Host:
    """The volumes of one host."""

    def __init__(self, directory: Path, *, roles: set[str] | None = None) -> None:
        self.home = directory / "home"
        self.volumes = directory / "volumes"
        self.home.mkdir(parents=True)
        for role in roles or {role.name for role in ROLES} | OTHERS:
            (self.volumes / role).mkdir(parents=True)

    def run(self, *arguments: str, archive: bytes = b"", **variables: str) -> str:
        """Do what the container does."""
        return run(
            arguments, VARIABLES | variables, io.BytesIO(archive),
            home=self.home, volumes=self.volumes,
        )  # fmt: skip

    def files(self) -> dict[str, str]:
        """Return every file of the volumes, by ROLE/NAME."""
        found = [path for path in self.volumes.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.volumes)): path.read_text() for path in found}

    def public_keys(self) -> set[str]:
        """Return the public keys that NATS takes."""
        text = self.files()["nats/nats-server.conf"]
        return {user["nkey"] for user in json.loads(text)["accounts"]["kvbm"]["users"]}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """One host, whose volumes were filled."""
    host = Host(tmp_path / "a")
    host.run()
    return host


def archive_of(folder: Path) -> bytes:
    """Return a tar archive of a directory, as `docker cp` writes it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        opened.add(folder, folder.name)
    return made.getvalue()


def test_a_volume_has_the_secrets_of_its_role_only(host: Host) -> None:
    """Goal: no secret but tokens is in two volumes, and no authority's key in any.

    What makes the streams has the credential of the role admin, and nothing else.
    """
    files = host.files()
    assert files.pop("streams/admin.creds") == files["admin/admin.creds"]
    assert files.pop("streams/ca.pem") == files["admin/ca.pem"]
    assert not [path for path in files if path.startswith("streams/")]
    for role in ROLES:
        mine = {path for path in files if path.startswith(f"{role.name}/")}
        assert f"{role.name}/{role.name}.creds" in mine
        assert (f"{role.name}/etcd.key" in mine) == (role.name != "consumer")
        assert (f"{role.name}/admin.token" in mine) == (role.name in ("admin", "metrics"))
    public = ("ca.pem", "scrape.token", "admin.token")
    secrets = [text for path, text in files.items() if Path(path).name not in public]
    assert len(secrets) == len(set(secrets))
    assert (host.home / "authority/ca.key").read_text() not in secrets


def test_what_may_read_a_volume(host: Host) -> None:
    """Goal: the owner and the group; Prometheus, whose user is its own, only the scrapes' token."""
    for path in host.volumes.rglob("*"):
        if path.is_file():
            expected = 0o644 if path.parent.name == "scrape" else 0o640
            assert path.stat().st_mode & 0o777 == expected, path
    kept = [path for path in host.home.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}


def test_a_second_run_changes_nothing(host: Host) -> None:
    """Goal: `up` again costs no service its connection."""
    before = host.files()
    host.run()
    assert host.files() == before


def test_another_address_makes_another_certificate(host: Host) -> None:
    """Goal: NATS and etcd that are published elsewhere are trusted there; credentials stay."""
    before = host.files()
    host.run(KVBM_BIND="10.0.0.1", KVBM_CREDS_NAMES="nats.example")
    after = host.files()
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {
        "nats/server.pem", "nats/server.key", "etcd/server.pem", "etcd/server.key",
    }  # fmt: skip


def test_larger_streams_have_room(host: Host) -> None:
    """Goal: what kvbm.env says of the streams is what NATS lets the account store."""

    def room() -> int:
        text = host.files()["nats/nats-server.conf"]
        return int(json.loads(text)["accounts"]["kvbm"]["jetstream"]["max_file"])

    before = room()
    host.run(KVBM_EVENTS_GB="10")
    assert room() > 10_000_000_000 > before


def test_a_rotation_takes_old_and_new(host: Host) -> None:
    """Goal: 1. with `--rotate` NATS takes both keys of each role; 2. then only the new ones."""
    old = host.files()["index/index.creds"]
    first = host.public_keys()
    host.run("--rotate")
    new = host.files()["index/index.creds"]
    assert new != old
    assert first < host.public_keys()
    host.run("--drop-old")
    assert nkeys.public_of(new.strip()) in host.public_keys()
    assert not first & host.public_keys()


def test_another_host_imports_its_sets(host: Host, tmp_path: Path) -> None:
    """Goal: host b has credentials that the NATS of host a takes, and makes none of its own."""
    b = Host(tmp_path / "b", roles={"consolidator", "host-tier", "disk-tier", "admin"})
    assert "disk-tier" in b.run("--import", archive=archive_of(host.home / "sets/b"))
    assert not [path for path in b.files() if path.startswith("admin/")]
    b.run("--import", archive=archive_of(host.home / "sets/shared/admin"))
    found = b.files()
    assert "imported" in b.run(KVBM_HOST="b")
    assert b.files() == found
    seeds = [text.strip() for path, text in found.items() if path.endswith(".creds")]
    assert len(seeds) == 4
    assert {nkeys.public_of(seed) for seed in seeds} <= host.public_keys()


@pytest.mark.parametrize("name", ["b/other/x", "host-tier", "../b/host-tier/.."])
def test_an_archive_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    """Goal: nothing is written outside the volumes of roles."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        member = tarfile.TarInfo(name)
        member.size = 1
        opened.addfile(member, io.BytesIO(b"x"))
    b = Host(tmp_path / "b")
    with pytest.raises(ConfigError, match="docker cp"):
        b.run("--import", archive=made.getvalue())
    assert b.files() == {}


def test_an_archive_of_two_hosts_is_refused(host: Host, tmp_path: Path) -> None:
    """Goal: host b does not take the files of host a by chance; nothing is written."""
    b = Host(tmp_path / "b")
    with pytest.raises(ConfigError, match="of one host"):
        b.run("--import", archive=archive_of(host.home / "sets"))
    assert b.files() == {}
    both = archive_of(host.home / "sets/shared")
    assert "admin" in b.run("--import", archive=both)


def test_a_rotation_renews_the_tokens_at_once(host: Host) -> None:
    """Goal: a token that leaked is good no more after `--rotate`, and does not come back."""
    tokens = (
        "admin/admin.token",
        "metrics/admin.token",
        "scrape/scrape.token",
        "index/scrape.token",
    )

    def found() -> list[str]:
        files = host.files()
        return [files[path] for path in tokens]

    leaked = found()
    host.run("--rotate")
    renewed = found()
    assert not set(leaked) & set(renewed)
    assert renewed[0] == renewed[1]
    assert renewed[2] == renewed[3]
    host.run()
    host.run("--drop-old")
    assert found() == renewed


def test_errors_name_what_to_change(tmp_path: Path) -> None:
    """Goal: an option that is none, and an archive that is none, say so."""
    b = Host(tmp_path / "b")
    with pytest.raises(ConfigError, match="--rotate"):
        b.run("--rotat")
    with pytest.raises(ConfigError, match="archive"):
        b.run("--import", archive=b"no archive")
    assert containers.MOUNTED_AT == "/etc/kvbm/creds"
