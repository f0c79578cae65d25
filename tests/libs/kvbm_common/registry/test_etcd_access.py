"""The registry on an etcd that wants to know who writes: TLS, certificates, a password."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kvbm_cli.creds.certificates import Authority
from kvbm_common.access.etcd_access import EtcdAccess, etcd_access
from kvbm_common.access.secret_files import SecretFile, write_secret
from kvbm_common.access.tls import TlsFiles
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, RegistryUnavailable
from kvbm_common.registry.etcd import PREFIX, EtcdRegistry

from tests.etcd_server import EtcdServer

PATIENCE_S = 5.0
USER, PASSWORD = "kvbm", "first-password"


@pytest.fixture
def etcd_directory() -> Iterator[Path]:
    """A directory in memory, where there is such a place."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvbm-etcd-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority with a server and a client; another authority with a client of its own."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    ours.give(tmp_path / "ours", "server", "etcd", ["localhost", "127.0.0.1"])
    ours.give(tmp_path / "ours", "client", "kvbm.a")
    theirs.give(tmp_path / "theirs", "client", "kvbm.a")
    return tmp_path


@pytest.fixture
async def tls_server(etcd_directory: Path, certificates: Path) -> AsyncIterator[EtcdServer]:
    """An etcd that serves who has a certificate of our authority."""
    server = EtcdServer(etcd_directory, tls=certificates / "ours")
    await server.start()
    yield server
    server.kill()


def tls_of(certificates: Path, *, ca: str = "ours", client: str = "ours") -> EtcdAccess:
    """Return an access with these files; an empty client shows no certificate."""
    own = certificates / client
    shown = (own / "client.pem", own / "client.key") if client else (None, None)
    return EtcdAccess(tls=TlsFiles(certificates / ca / "ca.pem", *shown))


async def enters(server: EtcdServer, access: EtcdAccess) -> str:
    """Register a service and see it in a listing; returns why that was not possible."""
    registry = EtcdRegistry((server.server,), ttl_s=2.0, deadline_s=PATIENCE_S, access=access)
    try:
        entry = await registry.register("index", "h", "0")
        assert [one.key for one in await registry.list()] == [entry.record.key]
        await entry.revoke()
    except RegistryUnavailable as error:
        return str(error)
    finally:
        await registry.close()
    return ""


async def test_with_a_certificate_of_the_authority(
    tls_server: EtcdServer, certificates: Path
) -> None:
    """Goal: entries, heartbeats and the watch all go over TLS."""
    assert await enters(tls_server, tls_of(certificates)) == ""


@pytest.mark.parametrize(
    ("ca", "client"), [("ours", ""), ("ours", "theirs"), ("theirs", "ours")],
    ids=["no certificate", "another authority's", "a server that is not trusted"],
)  # fmt: skip
async def test_other_certificates_are_refused(
    tls_server: EtcdServer, certificates: Path, ca: str, client: str
) -> None:
    """Neither side talks to a stranger."""
    assert await enters(tls_server, tls_of(certificates, ca=ca, client=client))


async def test_plaintext_is_refused_on_either_side(
    tls_server: EtcdServer, etcd_server: EtcdServer, certificates: Path
) -> None:
    """1. A server with TLS serves no plaintext. 2. A client with TLS takes no plaintext server."""
    assert await enters(tls_server, EtcdAccess())
    assert await enters(etcd_server, tls_of(certificates))


async def set_up_users(server: EtcdServer) -> None:
    """Have etcd want a password: of root, and of a user who may use the registry's keys only."""
    key = base64.b64encode(PREFIX.encode()).decode()
    end = base64.b64encode(PREFIX[:-1].encode() + b"0").decode()
    await server.administer("auth/user/add", {"name": "root", "password": "root-password"})
    await server.administer("auth/role/add", {"name": "root"})
    await server.administer("auth/user/grant", {"user": "root", "role": "root"})
    await server.administer("auth/user/add", {"name": USER, "password": PASSWORD})
    await server.administer("auth/role/add", {"name": "registry"})
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    await server.administer("auth/role/grant", {"name": "registry", "perm": permission})
    await server.administer("auth/user/grant", {"user": USER, "role": "registry"})
    await server.administer("auth/enable", {})
    told = await server.administer(
        "auth/authenticate", {"name": "root", "password": "root-password"}
    )
    server.headers["Authorization"] = told["token"]


@pytest.mark.slow
async def test_a_password_is_read_again(etcd_server: EtcdServer, tmp_path: Path) -> None:
    """Goal: a service follows its password without a restart.

    1. Without a password, or with a wrong one, nothing is read or written. 2. The right one will
    do, for a watch as well. 3. The password is changed, in etcd and in the file: the next call
    asks for a token with the new one.
    """
    await set_up_users(etcd_server)
    path = tmp_path / "password"
    write_secret(path, "a-wrong-password\n")
    access = EtcdAccess(user=USER, password=SecretFile(path, "KVBM_ETCD_PASSWORD_FILE"))
    assert await enters(etcd_server, EtcdAccess())
    refused = await enters(etcd_server, access)
    assert "refuses" in refused
    assert "wrong-password" not in refused
    write_secret(path, f"{PASSWORD}\n")
    registry = EtcdRegistry((etcd_server.server,), ttl_s=2.0, deadline_s=PATIENCE_S, access=access)
    try:
        entry = await registry.register("index", "h", "0")
        assert len(await registry.list()) == 1
        await etcd_server.administer(
            "auth/user/changepw", {"name": USER, "password": "second-password"}
        )
        write_secret(path, "second-password\n")
        await entry.update({"said": "again"})
        second = EtcdRegistry(
            (etcd_server.server,), ttl_s=2.0, deadline_s=PATIENCE_S, access=access
        )
        assert [one.info for one in await second.list()] == [{"said": "again"}]
        await second.close()
    finally:
        await registry.close()


@pytest.mark.slow
async def test_a_lost_token_is_asked_for_again(etcd_server: EtcdServer, tmp_path: Path) -> None:
    """etcd forgets the tokens that it gave when it is started again."""
    await set_up_users(etcd_server)
    path = tmp_path / "password"
    write_secret(path, PASSWORD)
    access = EtcdAccess(user=USER, password=SecretFile(path, "KVBM_ETCD_PASSWORD_FILE"))
    registry = EtcdRegistry((etcd_server.server,), ttl_s=2.0, deadline_s=PATIENCE_S, access=access)
    try:
        entry = await registry.register("index", "h", "0")
        etcd_server.kill()
        await etcd_server.start()
        await entry.update({"said": "again"})
    finally:
        await registry.close()


def settings(**more: object) -> Settings:
    """Settings whose registry is an etcd elsewhere, unless they say more."""
    return Settings.load({}, {"registry_url": "etcd://etcd.example:2379", **more})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, "KVBM_ETCD_CA_FILE"),
        ({"etcd_ca_file": "/ca"}, "KVBM_ETCD_CERT_FILE"),
        ({"etcd_user": "u", "etcd_password_file": "/p"}, "KVBM_ETCD_CA_FILE"),
        ({"etcd_user": "u"}, "KVBM_ETCD_PASSWORD_FILE"),
        ({"etcd_ca_file": "/ca", "etcd_cert_file": "/c"}, "KVBM_ETCD_KEY_FILE"),
        ({"registry_url": "etcd", "etcd_endpoints": "https://localhost:2379"},
         "KVBM_ETCD_CA_FILE"),
    ],
)  # fmt: skip
def test_an_etcd_elsewhere_is_refused_in_the_open(more: dict[str, object], named: str) -> None:
    """The text says what to set."""
    with pytest.raises(ConfigError, match=named):
        etcd_access(settings(**more))


@pytest.mark.parametrize(
    "more",
    [
        {"etcd_open": True},
        {"registry_url": "etcd://localhost:2379"},
        {"registry_url": "etcd://[::1]:2379,127.0.0.1"},
        {"registry_url": "nats"},
        {"etcd_ca_file": "/ca", "etcd_user": "u", "etcd_password_file": "/p"},
        {"etcd_ca_file": "/ca", "etcd_cert_file": "/c", "etcd_key_file": "/k"},
    ],
)
def test_an_etcd_that_is_here_or_protected_is_accepted(more: dict[str, object]) -> None:
    """On this machine, with credentials over TLS, or where the operator says so."""
    etcd_access(settings(**more))
