"""What is open on a host, as the doctor lists it: each port and socket with who may use it."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import pytest
from kvbm_cli.doctor.access_checks import access_checks
from kvbm_cli.doctor.facts import Facts, ListenerFacts, NatsFacts, SecretFacts
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.doctor.gather import gather, refusals_of
from kvbm_cli.doctor.listeners import listeners_of
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.processes import free_port

NATS = "access: nats://127.0.0.1:4222"
API = "access: 127.0.0.1:6880"
GUARDED = NatsFacts(version="2", wants_credentials=True)
UCX = ListenerFacts("host-tier", "0.0.0.0", 40_000)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """This host, with a guarded NATS and nothing else that listens."""
    directory = tmp_path_factory.mktemp("state")
    found = gather(Settings.load({}, {"state_dir": directory, "runtime_dir": directory / "run"}))
    return dataclasses.replace(found, nats=GUARDED, listeners=(), secrets=(), refusals=())


def findings(facts: Facts, **chosen: object) -> dict[str, Finding]:
    """Return what is found with these settings, by its name."""
    return {one.check: one for one in access_checks(facts, Settings.load({}, chosen))}


def test_by_default_every_socket_is_listed_and_well(facts: Facts) -> None:
    """NATS, the HTTP API, two sockets of engines, two of routers."""
    found = findings(facts)
    assert {one.level for one in found.values()} == {"ok"}
    assert {NATS, API} < found.keys()
    assert len([name for name in found if name.startswith("access: ipc://")]) == 4
    assert "credentials of a role" in found[NATS].found
    assert "needs a token" in found[API].found


@pytest.mark.parametrize(
    ("chosen", "name", "level", "who"),
    [
        ({"admin_open": "admin"}, API, "better", "may ask and change"),
        ({"admin_open": "read"}, API, "better", "changes need a token"),
        (
            {"router_endpoint": "tcp://0.0.0.0:57001", "router_open": True},
            "access: tcp://0.0.0.0:57001", "better", "routers: every process",
        ),
        (
            {"host_tier_endpoint": "tcp://0.0.0.0:5500", "curve_server_file": Path("/keys")},
            "access: tcp://0.0.0.0:5500", "ok", "need a key",
        ),
        (
            {"service_port": 6881, "service_bind": "0.0.0.0", "metrics_open": True},
            "access: 0.0.0.0:6881 and above", "better", "every process",
        ),
        (
            {"nats_url": "nats://u:secret@127.0.0.1:4222"},
            "access: nats://***@127.0.0.1:4222", "ok", "credentials",
        ),
    ],
)  # fmt: skip
def test_what_is_open_says_who_may_use_it(
    facts: Facts, chosen: dict[str, object], name: str, level: str, who: str
) -> None:
    """Goal: an operator reads in one list what to close. No line has a password."""
    found = findings(facts, **chosen)
    assert not [one for one in found.values() if "secret" in f"{one}"]
    assert found[name].level == level
    assert who in found[name].found


def test_an_open_nats_and_a_readable_secret_are_named(facts: Facts) -> None:
    """So is a port that no setting names, which is one of UCX."""
    changed = dataclasses.replace(
        facts, nats=NatsFacts(version="2"), secrets=(SecretFacts("admin.creds", is_private=False),),
        listeners=(UCX, dataclasses.replace(UCX, address="127.0.0.1")),
    )  # fmt: skip
    found = findings(changed)
    assert found[NATS].level == "better"
    assert "KVBM_NATS_CREDS_FILE" in found[NATS].advice
    assert "chmod 600" in found["credentials"].advice
    assert found["open: 0.0.0.0:40000"].level == "better"
    assert found["open: 127.0.0.1:40000"].level == "ok"


def test_a_port_of_another_stack_is_named_so(facts: Facts) -> None:
    """Goal: its HTTP API is no UCX of ours; whose stack it is stands in the line."""
    own = str(Settings.load().runtime_dir)
    other = ListenerFacts("metrics", "127.0.0.1", 26_880, "/run/other")
    listeners = (other, dataclasses.replace(other, address="0.0.0.0"),
                 dataclasses.replace(UCX, runtime_dir=own))  # fmt: skip
    found = findings(dataclasses.replace(facts, listeners=listeners))
    line = "metrics of the stack in /run/other"
    assert found["open: 127.0.0.1:26880"].found == f"{line}: processes of this machine"
    assert found["open: 0.0.0.0:26880"].found == f"{line}: every process that reaches it"
    assert "UCX" in found["open: 0.0.0.0:40000"].found


@pytest.mark.parametrize("given", ["/run/kvbm", "/run/kvbm/", "/run//kvbm/."])
def test_a_port_of_the_own_stack_is_no_other_ones(facts: Facts, given: str) -> None:
    """Goal: however its directory is written, what UCX opens is named so, with what to do."""
    own = dataclasses.replace(facts, listeners=(dataclasses.replace(UCX, runtime_dir=given),))
    found = findings(own, runtime_dir="/run/kvbm")["open: 0.0.0.0:40000"]
    assert "UCX" in found.found
    assert "KVBM_PEER_DEVICES" in found.advice


def test_settings_that_services_refuse_are_wrong(facts: Facts) -> None:
    """Goal: the doctor says beforehand what would end the start."""
    chosen: dict[str, object] = {"nats_url": "nats://192.0.2.1:4222", "metrics_bind": "0.0.0.0"}
    refusals = refusals_of(Settings.load({}, chosen))
    assert len(refusals) == 2
    found = list(access_checks(dataclasses.replace(facts, refusals=refusals),
                               Settings.load({}, chosen)))  # fmt: skip
    assert [one.level for one in found[:2]] == ["wrong", "wrong"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_listeners_are_read_from_the_kernel(address: str) -> None:
    """A socket of this process, with its address as people write it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} is not there")
        listener.listen()
        port = listener.getsockname()[1]
        assert (address, port) in listeners_of(Path(f"/proc/{os.getpid()}"))
    assert (address, free_port()) not in listeners_of(Path(f"/proc/{os.getpid()}"))
