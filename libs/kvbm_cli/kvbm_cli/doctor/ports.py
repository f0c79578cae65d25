"""Ports that this host's services open: whether each is free, this stack's own, or another's."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from kvbm_common.config.schema import default_runtime_dir
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.processes import LockTaken, take_lock

from kvbm_cli.doctor.facts import ListenerFacts, PortFacts

ANY = "0.0.0.0"


def ports_of(settings: Settings, listeners: Sequence[ListenerFacts]) -> tuple[PortFacts, ...]:
    """Return each port with whether it is free, or held by a service of this very stack.

    `listeners` are the sockets of KVBM's processes: an answer over HTTP would not tell whose it is.
    """
    port = settings.metrics_port
    ours = any(
        one.port == port and one.process == "metrics" and _is_of_stack(one, settings)
        for one in listeners
    )
    is_free = _is_free(settings.metrics_bind, port)
    found = [PortFacts(port, "DYN_KVBM_METRICS_PORT", is_free, ours)]
    serving = _consolidator_serves(settings)
    for endpoint, variable in (
        (settings.router_endpoint, "KVBM_ROUTER_ENDPOINT"),
        (settings.router_replay_endpoint, "KVBM_ROUTER_REPLAY_ENDPOINT"),
    ):
        if endpoint.startswith("tcp://"):
            address, _, number = endpoint.removeprefix("tcp://").rpartition(":")
            is_free = _is_free(_address_of(address), int(number))
            found.append(PortFacts(int(number), variable, is_free, serving))
    return tuple(found)


def _is_of_stack(listener: ListenerFacts, settings: Settings) -> bool:
    """Tell whether a process has the runtime directory of these settings."""
    return Path(listener.runtime_dir or default_runtime_dir()) == settings.runtime_dir


def _address_of(name: str) -> str:
    """Return the address that an endpoint names; all of them for `*` or the name of a device."""
    name = name.strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "127.0.0.1" if name == "localhost" else ANY
    return name


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def _consolidator_serves(settings: Settings) -> bool:
    """Tell whether a process holds the consolidator's lock of this stack."""
    if not settings.consolidator_endpoint.startswith("ipc://"):
        return False
    lock = Path(settings.consolidator_endpoint.removeprefix("ipc://") + ".lock")
    if not lock.exists():
        return False
    try:
        take_lock(lock).close()
    except LockTaken:
        return True
    except OSError:
        pass
    return False
