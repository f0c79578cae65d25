"""How a process reaches NATS: what the settings give, and what they must not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvbm_common.access import nats_access as module
from kvbm_common.access.addresses import StrangerAtPort
from kvbm_common.access.nats_access import nats_access, of_url
from kvbm_common.access.nats_credentials import Credentials
from kvbm_common.access.roles import ADMIN
from kvbm_common.access.secret_files import write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError


def settings(directory: Path, **more: object) -> Settings:
    """Settings of a host `a`, with a directory of credentials of the test's own."""
    return Settings.load({}, {"host": "a", "creds_dir": directory, **more})


def test_a_url_gives_user_and_password_and_is_shown_without() -> None:
    """Percent signs are decoded, as in any URL."""
    access = of_url("nats://us%40er:pa%3Ass@h:1,nats://i")
    assert access.servers == ("nats://h:1", "nats://i")
    assert access.shown == "nats://h:1,nats://i"
    assert access.credentials() == Credentials(user="us@er", password="pa:ss")
    assert access.guarded
    assert "pa:ss" not in repr(access)
    assert not of_url("nats://h").guarded


@pytest.mark.parametrize(
    "url", ["nats://user@h", "nats://:p@h", "nats://", "nats://u:p@", "nats://h:x"]
)
def test_half_a_url_is_refused(url: str) -> None:
    """Half of a pair of credentials would be no credentials at all."""
    with pytest.raises(ConfigError, match="KVBM_NATS_URL"):
        of_url(url)


@pytest.mark.parametrize(
    "password",
    [
        "MY SECRET",
        "MY/SECRET",
        "MY?SECRET",
        "MY#SECRET",
        "MY,SECRET",
        "MY@SECRET",
        "MY\tSECRET",
        "MY,nats://SECRET",
    ],
)
def test_a_password_that_is_not_escaped_is_refused_and_not_shown(
    tmp_path: Path, password: str
) -> None:
    """Goal: half a password is taken for no host. By the variable, and by an option."""
    url = f"nats://u:{password}@nats.example:4222"
    for load in (
        lambda: Settings.load({"KVBM_NATS_URL": url}),
        lambda: nats_access(settings(tmp_path, nats_url=url), "index"),
    ):
        with pytest.raises(ConfigError, match="KVBM_NATS_URL") as caught:
            load()
        for word in ("MY", "SECRET"):
            assert word not in str(caught.value)


def test_a_role_finds_its_own_file(tmp_path: Path) -> None:
    """1. Without a file there are no credentials. 2. Its own file is taken. 3. A file that is named
    goes before. 4. A password in the URL goes before that."""
    own = settings(tmp_path)
    assert not nats_access(own, "index").guarded
    write_secret(tmp_path / "index.creds", "index:own")
    assert nats_access(own, "index").credentials() == Credentials("index", "own")
    assert not nats_access(own, "metrics").guarded
    write_secret(tmp_path / "named", "x:named")
    named = settings(tmp_path, nats_creds_file=tmp_path / "named")
    assert nats_access(named, "index").credentials() == Credentials("x", "named")
    in_url = settings(tmp_path, nats_url="nats://u:p@127.0.0.1")
    assert nats_access(in_url, "index").credentials() == Credentials("u", "p")


def test_inboxes_are_those_of_the_role(tmp_path: Path) -> None:
    """A host's role has the host in it; an operator with another role's file uses its inboxes."""
    write_secret(tmp_path / "consumer.creds", "consumer:p")
    own = settings(tmp_path)
    assert nats_access(own, "host-tier").inbox == "_INBOX.host-tier.a"
    assert nats_access(own, "index").inbox == "_INBOX.index"
    assert nats_access(own, ADMIN).inbox == "_INBOX.admin"
    as_consumer = settings(tmp_path, nats_creds_file=tmp_path / "consumer.creds")
    assert nats_access(as_consumer, ADMIN).inbox == "_INBOX.consumer"


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({}, "credentials .* and TLS"),
        ({"nats_creds_file": "/f"}, "only with TLS"),
        ({"nats_ca_file": "/ca"}, "only with credentials"),
        ({"nats_url": "tls://nats.example"}, "only with credentials"),
        ({"nats_url": "nats://u:p@nats.example"}, "only with TLS"),
        ({"nats_url": "nats://127.0.0.1,nats://nats.example"}, "credentials .* and TLS"),
        ({"nats_cert_file": "/c"}, "KVBM_NATS_KEY_FILE"),
        ({"nats_key_file": "/c"}, "KVBM_NATS_CERT_FILE"),
    ],
)
def test_a_server_elsewhere_is_refused_in_the_open(
    tmp_path: Path, more: dict[str, object], missing: str
) -> None:
    """The text says what is missing and how to set it; it never has the password."""
    with pytest.raises(ConfigError, match=missing) as caught:
        nats_access(settings(tmp_path, **({"nats_url": "nats://nats.example"} | more)), "index")
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"nats_open": True},
        {"nats_url": "nats://127.0.0.1:1"},
        {"nats_url": "nats://localhost,nats://[::1]"},
        {"nats_url": "tls://nats.example", "nats_creds_file": "/f"},
        {"nats_url": "tls://u:p@nats.example"},
        {"nats_ca_file": "/ca", "nats_cert_file": "/c", "nats_key_file": "/k"},
    ],
)
def test_a_server_that_is_here_or_protected_is_accepted(
    tmp_path: Path, more: dict[str, object]
) -> None:
    """On this machine, with credentials over TLS, or where the operator says so."""
    nats_access(settings(tmp_path, **({"nats_url": "nats://nats.example"} | more)), "index")


def test_no_password_goes_to_another_users_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: to take the port while NATS is away is not to learn the password."""
    write_secret(tmp_path / "index.creds", "index:p")
    access = nats_access(settings(tmp_path, nats_url="nats://127.0.0.1:4555"), "index")
    asked: list[tuple[int, int]] = []

    def is_strange(port: int, owner: int) -> bool:
        asked.append((port, owner))
        return True

    monkeypatch.setattr(module, "is_held_by_a_stranger", is_strange)
    with pytest.raises(StrangerAtPort):
        access.credentials()
    assert asked == [(4555, os.getuid())]


def test_settings_are_printed_without_passwords(tmp_path: Path) -> None:
    """An error of the parser, too, which repeats what it was given."""
    with pytest.raises(ConfigError) as caught:
        Settings.load({"KVBM_NATS_URL": "http://user:secret@h"})
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS") as caught:
        Settings.load({"KVBM_REGISTRY_URL": "etcd", "ETCD_ENDPOINTS": "http://user:secret@h"})
    assert "secret" not in str(caught.value)
