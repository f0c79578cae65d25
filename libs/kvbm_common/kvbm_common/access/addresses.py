"""Addresses: which ones only this machine reaches, and whose process listens at a port."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

from kvbm_common.errors import KvbmError

PRIVATE_DOMAINS = ("localhost", "local", "internal", "svc")
"""Ends of names that the Internet's DNS does not have: of Kubernetes, of a cloud, of a machine."""
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


def host_of(url: str) -> str:
    """Return the host of a URL, or of a header Host after `//`; or nothing.

    >>> host_of("http://[::1]:80/x"), host_of("//Kvbm:6880"), host_of("http://[")
    ('::1', 'kvbm', '')
    """
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def may_be_rebound(name: str) -> bool:
    """Tell whether this may be a name of another site, which its DNS can point at a port of ours.

    No address can be rebound, no name of one word, and none below a domain that is not for sale.

    >>> [one for one in ("10.0.0.1", "::1", "kvbm", "a.svc", "a.example.") if may_be_rebound(one)]
    ['a.example.']
    """
    name = name.rstrip(".").lower()
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." in name and name.rpartition(".")[2] not in PRIVATE_DOMAINS
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
