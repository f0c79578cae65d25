"""The doctor's ports: whether each is free, this stack's own, or another process's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvbm_cli.doctor.facts import PortFacts
from kvbm_cli.doctor.listeners import listeners
from kvbm_cli.doctor.ports import ports_of
from kvbm_common.config.schema import default_runtime_dir
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.processes import free_port

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
ANSWER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')
with http.server.ThreadingHTTPServer((sys.argv[1], 0), Handler) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
"""
METRICS = ("kvbm_cli.main", "serve", "metrics")


@contextmanager
def listening(
    code: str, address: str, *words: str, runtime_dir: Path | None = None
) -> Iterator[int]:
    """Run a process that listens at an address; yield its port."""
    environ = {name: value for name, value in os.environ.items() if name != "KVBM_RUNTIME_DIR"}
    if runtime_dir is not None:
        environ["KVBM_RUNTIME_DIR"] = str(runtime_dir)
    with subprocess.Popen(
        [sys.executable, "-c", code, address, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def ports(runtime_dir: Path, **chosen: object) -> list[PortFacts]:
    """Return the ports as the doctor finds them; those of routers are off."""
    off = {"router_endpoint": "off", "router_replay_endpoint": "off"}
    settings = Settings.load({}, {**off, "runtime_dir": runtime_dir, **chosen})
    return list(ports_of(settings, listeners()))


@pytest.mark.parametrize("program", ["kvbm_cli.main", "/opt/venv/bin/kvbm"])
def test_a_service_is_known_however_it_was_started(tmp_path: Path, program: str) -> None:
    """Goal: `kvbm up` runs the module, an operator the command."""
    words = (program, "serve", "metrics")
    with listening(LISTEN, "127.0.0.1", *words, runtime_dir=tmp_path) as port:
        [found] = ports(tmp_path, metrics_port=port)
    assert found.is_ours


def test_a_foreign_http_server_is_not_ours(tmp_path: Path) -> None:
    """Goal: what answers as our service does is not ours: the process at the port decides."""
    with listening(ANSWER, "127.0.0.1") as port:
        [found] = ports(tmp_path, metrics_port=port)
    assert (found.is_free, found.is_ours) == (False, False)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_the_metrics_service_of_this_stack_is_ours_at_any_address(
    tmp_path: Path, address: str
) -> None:
    """Goal: no service is called another process because it listens at an address of its own."""
    with listening(LISTEN, address, *METRICS, runtime_dir=tmp_path) as port:
        [found] = ports(tmp_path, metrics_port=port, metrics_bind=address)
    assert (found.is_free, found.is_ours) == (False, True)


def test_the_metrics_service_of_another_stack_is_not_ours(tmp_path: Path) -> None:
    """Goal: stacks differ in their runtime directory; without the variable it is the default."""
    with listening(LISTEN, "127.0.0.1", *METRICS, runtime_dir=tmp_path / "other") as port:
        [found] = ports(tmp_path, metrics_port=port)
    assert (found.is_free, found.is_ours) == (False, False)
    with listening(LISTEN, "127.0.0.1", *METRICS) as port:
        [found] = ports(tmp_path, metrics_port=port)
        [own] = ports(default_runtime_dir(), metrics_port=port)
    assert (found.is_ours, own.is_ours) == (False, True)


def test_another_service_at_the_port_is_not_ours(tmp_path: Path) -> None:
    """Goal: only the metrics service may hold the port of the HTTP API."""
    with listening(LISTEN, "127.0.0.1", *METRICS[:2], "index", runtime_dir=tmp_path) as port:
        [found] = ports(tmp_path, metrics_port=port)
    assert (found.is_free, found.is_ours) == (False, False)


@pytest.mark.parametrize(
    ("named", "is_free"), [("127.0.0.2", True), ("127.0.0.1", False), ("*", False)]
)
def test_a_routers_port_is_tried_at_the_address_of_its_endpoint(
    tmp_path: Path, named: str, *, is_free: bool
) -> None:
    """Goal: what listens at another address of this machine is not in the way."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://{named}:{taken.getsockname()[1]}"
        _, router = ports(tmp_path, metrics_port=free_port(), router_endpoint=endpoint)
    assert (router.is_free, router.is_ours) == (is_free, False)
