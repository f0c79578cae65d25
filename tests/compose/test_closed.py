"""Closed by default: without credentials nothing answers, and no container has another's secret.

Neighbours are processes of the host, another container of the same network, and a service in
foreign hands: the host tier, which is in the process namespace of the host.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine import docker
from tests.compose.project import CREDS_DIR, SERVICES, Demo, Project, wait_until

WITH_VOLUME = (*SERVICES, "streams")
SHARED = ("ca.pem", "scrape.token")
"""Every service has the authority's certificate, and compares the token of scrapes."""
SERVER = ("ca.pem", "nats-server.conf", "server.key", "server.pem")

STRANGER = """
import json, socket, ssl, sys

def say(connection, text):
    connection.sendall(text.encode())
    connection.settimeout(5)
    heard = b""
    while b"PONG" not in heard and (chunk := connection.recv(4096)):
        heard += chunk
    return heard.decode(errors="replace")

def over_tls(connection):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)

def attempt(work):
    try:
        return work()
    except OSError as error:
        return f"refused: {error}"

def nats(encrypted, shown=""):
    with socket.create_connection((host, int(nats_port)), 5) as plain:
        plain.recv(4096)
        connection = over_tls(plain) if encrypted else plain
        lines = ["CONNECT {" + shown + "}", "SUB kvbm.> 1", "PUB kvbm.v1.x 1", "x", "PING", ""]
        return say(connection, "\\r\\n".join(lines))

def etcd(encrypted):
    with socket.create_connection((host, int(etcd_port)), 5) as plain:
        connection = over_tls(plain) if encrypted else plain
        return say(connection, "GET /version HTTP/1.0\\r\\n\\r\\n")

host, nats_port, etcd_host, etcd_port = sys.argv[1:5]
heard = {
    "nats in plaintext": attempt(lambda: nats(False)),
    "nats over TLS": attempt(lambda: nats(True)),
    "nats with a password": attempt(lambda: nats(True, '"user": "admin", "pass": "admin"')),
}
host = etcd_host
heard |= {
    "etcd in plaintext": attempt(lambda: etcd(False)),
    "etcd over TLS": attempt(lambda: etcd(True)),
}
for port in sys.argv[5:]:
    heard[port] = attempt(lambda: str(socket.create_connection((sys.argv[1], int(port)), 5)))
print(json.dumps(heard))
"""
"""Says to NATS and etcd what needs credentials, and prints what it hears."""


def tools(project: Project) -> list[str]:
    """Return the options of `docker run` for a stranger in the project's network."""
    image = f"kvbm/tools:{project.environ['KVBM_VERSION']}"
    return ["run", "--rm", "--network", f"{project.name}_default", "--entrypoint", "python3", image]


def files_of(project: Project, service: str) -> dict[str, str]:
    """Return what a container has in its directory of credentials."""
    [container] = project.containers(service)
    names = docker("exec", container, "ls", CREDS_DIR).split()
    return {name: docker("exec", container, "cat", f"{CREDS_DIR}/{name}") for name in names}


def check_refused(heard: dict[str, str]) -> None:
    """Fail if a stranger was served: each connection ends, with a reason or without one."""
    for what in ("nats over TLS", "nats with a password"):
        assert "Authorization Violation" in heard.pop(what), what
    assert "certificate" in heard["etcd over TLS"].lower()
    assert set(heard) >= {"nats in plaintext", "etcd in plaintext"}
    for what, text in heard.items():
        assert text == "" or text.startswith("refused"), f"{what}: {text}"


def test_a_process_of_the_host_is_refused(stack: Project) -> None:
    """Goal: what is published on loopback serves no user of the host without credentials."""
    ports = [stack.environ["KVBM_NATS_PORT"], stack.environ["KVBM_ETCD_PORT"]]
    done = subprocess.run(
        ["python3", "-c", STRANGER, "127.0.0.1", ports[0], "127.0.0.1", ports[1]],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    check_refused(json.loads(done.stdout))


def test_another_container_is_refused(stack: Project) -> None:
    """Goal: neither the buses nor their monitors serve the network; figures need a token."""
    words = ["nats", "4222", "etcd", "2379", "8222"]
    check_refused(json.loads(docker(*tools(stack), "-c", STRANGER, *words)))
    words = ["etcd", "4222", "etcd", "2379", "2381"]
    assert "refused" in json.loads(docker(*tools(stack), "-c", STRANGER, *words))["2381"]
    asked = "import sys, urllib.request as u; u.urlopen(sys.argv[1])"
    for url in ("http://index:6881/metrics", "http://metrics:6880/metrics"):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            docker(*tools(stack), "-c", asked, url)
        assert "401" in refused.value.stderr, url


def test_the_api_wants_a_token(stack: Project) -> None:
    """Goal: questions and changes on the published port; probes need none."""
    for path in ("/v1/status", "/metrics"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{stack.api_port}{path}", timeout=5)
        assert refused.value.code == 401, path
        refused.value.close()
    assert stack.get("/v1/status") is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.api_port}/readyz", timeout=5) as answer:
        assert answer.status == 200


def test_a_container_has_the_secrets_of_its_role_only(stack: Project) -> None:
    """Goal: what each directory has, by name and by content; none of it can be changed."""
    seen: dict[str, str] = {}
    for service in WITH_VOLUME:
        found = files_of(stack, service)
        if service in ("nats", "etcd"):
            assert set(found) <= set(SERVER)
        elif service == "streams":
            assert set(found) == {"admin.creds", "ca.pem"}
        else:
            own = {f"{service}.creds", "etcd.key", "etcd.pem", *SHARED}
            assert set(found) == own | ({"admin.token"} if service == "metrics" else set())
        for name, text in found.items():
            if name not in (*SHARED, "admin.token"):
                assert seen.setdefault(text, service) == service, f"{name} of {service}"
        [container] = stack.containers(service)
        with pytest.raises(subprocess.CalledProcessError, match=r"."):
            docker("exec", container, "touch", f"{CREDS_DIR}/new")


def test_the_host_tier_cannot_look_into_other_services(stack: Project) -> None:
    """Goal: in the process namespace of the host, another user's files and variables are closed."""
    [spy] = stack.containers("host-tier")
    for service in ("nats", "etcd", "index", "metrics", "streams"):
        [container] = stack.containers(service)
        pid = docker("inspect", "-f", "{{.State.Pid}}", container)
        assert docker("exec", spy, "ls", "-d", f"/proc/{pid}") == f"/proc/{pid}"
        for path in ("environ", f"root{CREDS_DIR}"):
            with pytest.raises(subprocess.CalledProcessError) as refused:
                docker("exec", spy, "ls", f"/proc/{pid}/{path}/")
            assert "ermission denied" in refused.value.stderr or "Not a dir" in refused.value.stderr
        with pytest.raises(subprocess.CalledProcessError) as refused:
            docker("exec", spy, "cat", f"/proc/{pid}/environ")
        assert "ermission denied" in refused.value.stderr


def test_nothing_prints_a_secret(stack: Project) -> None:
    """Goal: neither logs nor `docker inspect` of any container, the one that made them included."""
    secrets: set[str] = set()
    for service in WITH_VOLUME:
        for name, text in files_of(stack, service).items():
            if name not in ("ca.pem", "nats-server.conf") and not name.endswith(".pem"):
                secrets |= {line for line in text.splitlines() if not line.startswith("---")}
    assert len(secrets) > 20
    everything = docker(
        "ps", "-aq", "--filter", f"label=com.docker.compose.project={stack.name}"
    ).split()  # fmt: skip
    assert len(everything) > len(WITH_VOLUME)
    for container in everything:
        logs = subprocess.run(
            ["docker", "logs", container], capture_output=True, text=True, check=True, timeout=60
        )
        printed = logs.stdout + logs.stderr + docker("inspect", container)
        assert not [one for one in secrets if one in printed], docker("inspect", container)[:200]


def test_roots_are_read_only_and_nothing_has_a_capability(stack: Project) -> None:
    """Goal: for every service that runs, what the kernel says of it, not what the file says."""
    for service in WITH_VOLUME:
        [container] = stack.containers(service)
        for path in ("/new", "/usr/new", "/etc/new", "/opt/kvbm/new"):
            with pytest.raises(subprocess.CalledProcessError):
                docker("exec", container, "touch", path)
        mounts = docker("exec", container, "cat", "/proc/mounts").splitlines()
        [root] = [line.split()[3] for line in mounts if line.split()[1] == "/"]
        assert "ro" in root.split(","), service
        status = docker("exec", container, "cat", "/proc/self/status")
        assert "CapEff:\t0000000000000000" in status, service
        assert "NoNewPrivs:\t1" in status, service
        settings = json.loads(docker("inspect", "-f", "{{json .HostConfig}}", container))
        assert settings["Memory"] > 0, service
        assert settings["PidsLimit"] > 0, service
        assert settings["Privileged"] is False, service


def test_a_consumer_reads_events_and_changes_nothing(stack: Project) -> None:
    """Goal: the service for readers works, and its credential asks for no change."""
    Demo(stack, requests=50).wait_passed()
    words = ["--profile", "consumer", "run", "--rm", "-T", "consumer"]
    printed = stack.compose(*words, "events", "tail", "--since", "all", "--no-follow")
    assert "stored" in printed
    done = subprocess.run(
        stack.command(*words, "nats-streams"), env=stack.environ, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0, "only the role admin makes streams"


def test_credentials_are_rotated_without_a_restart(stack: Project) -> None:
    """Goal: 1. new credentials, and NATS takes both; 2. the old ones end; 3. the demo passes.

    The API's token changes with the first step.
    """
    before = files_of(stack, "index")["index.creds"]
    token = stack.token()
    for option in ("--rotate", "--drop-old"):
        stack.compose("run", "--rm", "-T", "creds", option)
        [nats] = stack.containers("nats")
        docker("kill", "--signal", "HUP", nats)
    assert files_of(stack, "index")["index.creds"] != before
    assert stack.get("/v1/status") is None, "the old token"
    stack.forget_token()
    assert stack.token() != token
    started = {
        service: docker("inspect", "-f", "{{.State.StartedAt}}", *stack.containers(service))
        for service in SERVICES
    }
    wait_until(stack.is_ready, "services are connected with new credentials")
    Demo(stack, requests=50).wait_passed()
    for service in SERVICES:
        now = docker("inspect", "-f", "{{.State.StartedAt}}", *stack.containers(service))
        assert now == started[service], service


@pytest.fixture
def small(images: dict[str, str]) -> Iterator[Project]:
    """A project whose host tier may use less memory than its arena takes."""
    more = {"KVBM_HOST_TIER_MEMORY": "512m", "DYN_KVBM_CPU_CACHE_GB": "0.4"}
    project = Project("kvbm-small", {**images, **more})
    try:
        yield project
    finally:
        project.down()


def test_an_arena_beyond_the_limit_says_so(small: Project) -> None:
    """Goal: the log names the variables to change; nothing is killed for want of memory."""
    small.compose("up", "-d", "host-tier")

    def is_said() -> bool:
        found = docker(
            "ps", "-aq", "--filter", f"label=com.docker.compose.project={small.name}",
            "--filter", "label=com.docker.compose.service=host-tier",
        )  # fmt: skip
        done = subprocess.run(
            ["docker", "logs", found], capture_output=True, text=True, check=True, timeout=60
        )
        return "KVBM_HOST_TIER_MEMORY" in done.stdout + done.stderr

    wait_until(is_said, "the host tier says what to change")
