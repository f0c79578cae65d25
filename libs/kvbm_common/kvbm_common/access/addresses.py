"""Addresses: which ones only this machine reaches, and whose process listens at a port."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from kvbm_common.errors import KvbmError

_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


class StrangerAtPort(KvbmError):
    """Another user's process listens where a service of this user should: it gets no secret."""

    code = "stranger_at_port"


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address.

    >>> is_loopback("localhost"), is_loopback("[::1]"), is_loopback("0.0.0.0"), is_loopback("nats")
    (True, True, False, False)
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def listeners_of(port: int) -> set[int]:
    """Return the users whose processes listen at a TCP port of this machine."""
    found: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found.add(int(rest[3]))
    return found


def is_held_by_a_stranger(port: int, owner: int) -> bool:
    """Tell whether another user than root, this one or `owner` listens at a port.

    A secret for a service of this machine is not sent to a process that took the port in its place.
    """
    return bool(listeners_of(port) - {0, os.getuid(), owner})
