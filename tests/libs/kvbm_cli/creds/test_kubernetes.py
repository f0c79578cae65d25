"""`kvbm kube-secrets`: a Secret for each role, run after run, and what it refuses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from kvbm_cli.creds import kubernetes
from kvbm_cli.creds.kubernetes import FILE, SECRET_BYTES_MAX, Release, hosts_of, write_secrets
from kvbm_common.access import nkeys
from kvbm_common.access.roles import ADMIN, ROLES
from kvbm_common.errors import ConfigError
from kvbm_common.nats.streams import STREAMS

NODES = ("a", "ip-10-0-0-1.internal")


def written(
    out: Path, *nodes: str, rotate: bool = False, drop_old: bool = False
) -> dict[str, dict[str, str]]:
    """Run the command; returns key and text of each Secret, by the role."""
    path = write_secrets(
        out, nodes=nodes, prefix="kv" if nodes else "", namespace="cache" if nodes else "",
        rotate=rotate, drop_old=drop_old,
    )  # fmt: skip
    assert path == out / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    items = json.loads(path.read_text())["items"]
    assert {item["metadata"]["namespace"] for item in items} == {"cache"}
    return {
        item["metadata"]["name"].removeprefix("kv-").removesuffix("-creds"): {
            key: base64.b64decode(text).decode() for key, text in item["data"].items()
        }
        for item in items
    }


def taken(secrets: dict[str, dict[str, str]]) -> set[str]:
    """Return the public keys that NATS takes."""
    text = secrets["nats"]["nats-server.conf"]
    return {user["nkey"] for user in json.loads(text)["accounts"]["kvbm"]["users"]}


def test_each_secret_has_the_keys_of_its_role_only(tmp_path: Path) -> None:
    """Goal: no seed is in two Secrets, the operator's token in one, the authority's key in none."""
    secrets = written(tmp_path / "out", *NODES)
    assert secrets.keys() == {
        *(role.name for role in ROLES if role.name != ADMIN), "nats", "scrape", "streams",
    }  # fmt: skip
    seeds = [
        (name, text)
        for name, files in secrets.items()
        for key, text in files.items()
        if key.endswith(".creds")
    ]
    assert len({text for _, text in seeds}) == len(seeds)
    for role in ROLES:
        if role.per_host:
            keys = {key for key in secrets[role.name] if key.endswith(".creds")}
            assert keys == {f"{node}.creds" for node in NODES}
    assert {name for name, files in secrets.items() if "admin.token" in files} == {"metrics"}
    assert {name for name, files in secrets.items() if "admin.creds" in files} == {"streams"}
    authority = (tmp_path / "out/authority/ca.key").read_text()
    assert all(authority not in files.values() for files in secrets.values())
    assert {nkeys.public_of(text.strip()) for _, text in seeds} <= taken(secrets)


def test_the_certificate_has_the_names_of_the_chart(tmp_path: Path) -> None:
    """Goal: clients and routes find the name that they ask for, from any namespace."""
    [pem] = [written(tmp_path / "out", "a")["nats"]["server.pem"]]
    names = x509.load_pem_x509_certificate(pem.encode()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    found = set(names.value.get_values_for_type(x509.DNSName))
    assert {"kv-nats", "kv-nats-2.kv-nats", "kv-nats-0.kv-nats.cache.svc"} <= found


def test_streams_may_be_kept_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the account has room for the replicas that the chart asks for; a setting changes it."""
    rooms = []
    for replicas in ("1", ""):
        monkeypatch.setenv("KVBM_STREAM_REPLICAS", replicas)
        if not replicas:
            monkeypatch.delenv("KVBM_STREAM_REPLICAS")
        text = written(tmp_path / f"out{replicas}", "a")["nats"]["nats-server.conf"]
        account = json.loads(text)["accounts"]["kvbm"]["jetstream"]
        assert account["max_streams"] == len(STREAMS)
        rooms.append(account["max_file"])
    assert rooms[1] == 3 * rooms[0]


def test_a_later_run_adds_a_node_and_leaves_the_rest(tmp_path: Path) -> None:
    """Goal: pods that run keep their credentials when the cluster grows."""
    before = written(tmp_path / "out", "a")
    assert written(tmp_path / "out") == before
    after = written(tmp_path / "out", *NODES)
    for name, files in before.items():
        if name != "nats":
            assert files.items() <= after[name].items()
    assert taken(before) < taken(after)


def test_a_rotation_has_two_steps(tmp_path: Path) -> None:
    """Goal: NATS takes old and new keys until the second step, as docs/kubernetes.md says."""
    first = written(tmp_path / "out", *NODES)
    second = written(tmp_path / "out", rotate=True)
    third = written(tmp_path / "out", drop_old=True)
    assert second["index"]["index.creds"] == third["index"]["index.creds"]
    assert taken(first) | taken(third) == taken(second)
    assert not taken(first) & taken(third)


@pytest.mark.parametrize("nodes", [(), ("a.b", "a-b"), ("x" * 64 + "1", "x" * 64 + "2")])
def test_nodes_that_are_no_hosts_are_refused(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    """Goal: no two nodes share a name on NATS; without nodes there is nothing to make."""
    with pytest.raises(ConfigError, match="--nodes"):
        hosts_of(nodes)
    with pytest.raises(ConfigError, match="--nodes"):
        write_secrets(tmp_path / "out", nodes=nodes, prefix="kv", namespace="cache")
    assert not (tmp_path / "out").exists()


def test_a_rotation_with_sixty_nodes_fits(tmp_path: Path) -> None:
    """Goal: docs/kubernetes.md says so; during a rotation NATS knows two keys for each node."""
    names = [f"ip-10-0-100-{number}.compute.internal" for number in range(4)]
    sizes = [
        len(written(tmp_path / str(count), *names[:count])["nats"]["nats-server.conf"])
        for count in (2, 4)
    ]
    of_a_node = (sizes[1] - sizes[0]) / 2
    assert 2 * 60 * of_a_node + sizes[0] < SECRET_BYTES_MAX


def test_a_secret_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: kubectl is given nothing that Kubernetes would refuse for its size."""
    monkeypatch.setattr(kubernetes, "SECRET_BYTES_MAX", 15_000)
    written(tmp_path / "out", "a")
    with pytest.raises(ConfigError, match="fewer"):
        written(tmp_path / "out", *NODES)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("prefix", "A"), ("prefix", "-n"), ("prefix", "x" * 40), ("namespace", "a b"),
     ("namespace", "a.b"), ("nodes", ("gpu-a", "a_b")), ("nodes", (".a",)), ("nodes", ("é",))],
)  # fmt: skip
def test_a_name_that_kubernetes_would_refuse_is_refused_before(field: str, wrong: object) -> None:
    given: dict[str, Any] = {"nodes": ("ip-10-0-0-1.internal",), field: wrong}
    with pytest.raises(ConfigError, match=f"--{field}"):
        Release(**given).check()


@pytest.mark.parametrize("text", [b"\xff", b"{", b"[]", b'{"nodes": "a"}', b'{"prefix": "\xff"}'])
def test_a_garbled_file_of_an_earlier_run_is_named(tmp_path: Path, text: bytes) -> None:
    written(tmp_path / "out", "a")
    (tmp_path / "out" / "kube-release.json").write_bytes(text)
    with pytest.raises(ConfigError, match="--out"):
        written(tmp_path / "out", "a")


@pytest.mark.parametrize("name", ["shared/nats/foreign", "a/host-tier/foreign"])
def test_a_foreign_file_among_the_sets_is_named(tmp_path: Path, name: str) -> None:
    """Goal: the error says which file is in the way."""
    written(tmp_path / "out", "a")
    (tmp_path / "out/sets" / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{name} is no text"):
        written(tmp_path / "out", "a")


@pytest.mark.parametrize("here", [".", "./", "", "./."])
def test_the_current_directory_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    """Neither its mode nor what is in it changes."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--out"):
        write_secrets(Path(here), nodes=("a",))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert list(tmp_path.iterdir()) == []
