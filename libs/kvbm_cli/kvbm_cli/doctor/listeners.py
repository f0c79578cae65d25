"""Listeners: the TCP sockets that processes of KVBM have open now, as /proc lists them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from kvbm_cli.doctor.facts import ListenerFacts

_LISTENS = "0A"
_PROCESSES = (
    (re.compile(r"(?:kvbm_cli\.main|/kvbm) serve ([\w-]+)"), r"\1"),
    (re.compile(r"kvbm_host_tier\.shell\.peer_reader_process"), "host-tier (peers)"),
    (re.compile(r"nats-server .*kvbm|nats-server --config \S+nats-server\.conf"), "nats"),
    (re.compile(r"kvbm_connectors\."), "engine"),
)


def listeners() -> tuple[ListenerFacts, ...]:
    """Return every socket of every process of KVBM that this user may look at."""
    found = {
        ListenerFacts(name, address, port, _runtime_dir_of(process))
        for name, process in _processes()
        for address, port in listeners_of(process)
    }
    return tuple(sorted(found, key=lambda one: (one.process, one.address, one.port)))


def _runtime_dir_of(process: Path) -> str:
    """Return the directory that a process was given for its stack's sockets, if any."""
    with contextlib.suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"KVBM_RUNTIME_DIR":
                return os.fsdecode(value)
    return ""


def listeners_of(process: Path) -> list[tuple[str, int]]:
    """Return address and port of each socket on which a process listens, by its /proc entry."""
    sockets = _listening()
    return [sockets[inode] for inode in _inodes(process) if inode in sockets]


def _processes() -> Iterator[tuple[str, Path]]:
    """Yield the processes of KVBM with what they are."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            for pattern, name in _PROCESSES:
                if found := pattern.search(command):
                    yield found.expand(name), process
                    break


def _inodes(process: Path) -> Iterator[int]:
    """Yield the sockets that a process has open."""
    with contextlib.suppress(OSError):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    yield int(found[1])


def _listening() -> dict[int, tuple[str, int]]:
    """Return address and port of each listening TCP socket, by its inode."""
    found: dict[int, tuple[str, int]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    address, port = words[1].split(":")
                    found[int(words[9])] = (_address(address, family), int(port, 16))
    return found


def _address(text: str, family: socket.AddressFamily) -> str:
    """Return an address as people write it; the kernel's has words in this machine's order.

    >>> _address("0100007F", socket.AF_INET)
    '127.0.0.1'
    """
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
