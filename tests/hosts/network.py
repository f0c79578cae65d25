"""Hosts made of network namespaces: each has one wire to a bridge, and the wire can be cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import wait_until

PREFIX = "10.213.7"
"""Of the addresses; the bridge has .1, the hosts follow."""
WIRE_DEADLINE_S = 10.0
RATE = "40mbit"
"""Of a slow wire: a batch of a MiB takes 200 ms, long enough to be cut in its middle."""


def reason_not_here() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need ip and tc (Debian: iproute2)"
    probe = subprocess.run(["ip", "netns", "add", "kvbm-probe"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "kvbm-probe"], check=True)
    return ""


class Network:
    """A namespace for each host, one for the bridge between them, and a wire from there to us.

    The bridge is not in our own namespace: a firewall there, as Docker makes one, would see what
    the hosts say to each other.
    """

    def __init__(self, hosts: list[str], directory: Path) -> None:
        self.hosts, self._directory = hosts, directory
        self._name = f"kvbm{os.getpid() % 100_000}"
        self._hub = f"{self._name}-hub"
        self.address = f"{PREFIX}.1"

    def __enter__(self) -> Self:
        try:
            _run(f"ip netns add {self._hub}")
            _run(f"ip -n {self._hub} link add bridge type bridge")
            _run(f"ip -n {self._hub} link set bridge up")
            _run(f"ip link add {self._name} type veth peer name ours netns {self._hub}")
            _run(f"ip -n {self._hub} link set ours master bridge up")
            _run(f"ip addr add {self.address}/24 dev {self._name}")
            _run(f"ip link set {self._name} up")
            for number, host in enumerate(self.hosts):
                self._add(host, f"{PREFIX}.{10 + number}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._remove()

    def _add(self, host: str, address: str) -> None:
        space = self.namespace(host)
        _run(f"ip netns add {space}")
        _run(f"ip -n {self._hub} link add {host} type veth peer name wire netns {space}")
        _run(f"ip -n {space} addr add {address}/24 dev wire")
        _run(f"ip -n {space} link set lo up")
        _run(f"ip -n {space} link set wire up")
        _run(f"ip -n {self._hub} link set {host} master bridge up")

    def _remove(self) -> None:
        for space in (self._hub, *map(self.namespace, self.hosts)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)

    def namespace(self, host: str) -> str:
        """The namespace of a host."""
        return f"{self._name}-{host}"

    async def wait_wires(self) -> None:
        """Until every wire has its carrier: UCX takes no interface that has none."""
        await wait_until(
            lambda: all(map(self._has_carrier, self.hosts)),
            deadline_s=WIRE_DEADLINE_S, poll_s=0.05,
        )  # fmt: skip

    def _has_carrier(self, host: str) -> bool:
        return "state UP" in _run(f"ip -n {self.namespace(host)} link show dev wire")

    def python(self, host: str) -> Path:
        """An interpreter that runs on a host. NIXL has nothing but its wire there: UCX sees that
        it is one machine, and would take shared memory, or the loopback that it is not."""
        path = self._directory / f"python-{host}"
        space = self.namespace(host)
        path.write_text(
            "#!/bin/sh\nexport UCX_TLS=tcp UCX_NET_DEVICES=wire\n"
            f'exec ip netns exec {space} {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def cut(self, host: str) -> None:
        """The host is alone."""
        _run(f"ip -n {self._hub} link set {host} down")

    def heal(self, host: str) -> None:
        """It is not any more."""
        _run(f"ip -n {self._hub} link set {host} up")

    def slow_down(self, host: str) -> None:
        """What the host sends has little room."""
        space = self.namespace(host)
        _run(f"tc -n {space} qdisc add dev wire root tbf rate {RATE} burst 64kb latency 100ms")

    def speed_up(self, host: str) -> None:
        """It has room again."""
        _run(f"tc -n {self.namespace(host)} qdisc del dev wire root")

    def sent_bytes(self, host: str) -> int:
        """What has come out of the host."""
        [link] = json.loads(_run(f"ip -n {self._hub} -s -j link show dev {host}"))
        return int(link["stats64"]["rx"]["bytes"])


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
