"""Which addresses are this machine's alone, and whose process listens at a port."""

from __future__ import annotations

import os
import socket

import pytest
from kvbm_common.access import addresses
from kvbm_common.access.addresses import is_held_by_a_stranger, is_loopback, listeners_of
from kvbm_common.config.schema import redacted
from kvbm_common.runtime.processes import free_port

NOBODY = 65_534


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
        ("nats", False), ("", False), ("localhost.example", False), ("127.0.0.1.example", False),
    ],
)  # fmt: skip
def test_loopback(address: str, expected: bool) -> None:
    """A name may resolve to anything, so but for `localhost` none is loopback."""
    assert is_loopback(address) is expected


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_listeners_are_known_by_their_user(family: socket.AddressFamily) -> None:
    """A socket that listens is ours; a port that is free has no listener."""
    with socket.socket(family) as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert listeners_of(port) == {os.getuid()}
        assert not is_held_by_a_stranger(port, os.getuid())
    assert listeners_of(free_port()) == set()


def test_a_stranger_is_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may listen, as may the owner of the secret."""
    monkeypatch.setattr(addresses, "listeners_of", lambda port: {NOBODY})
    assert is_held_by_a_stranger(1, os.getuid())
    assert not is_held_by_a_stranger(1, NOBODY)
    monkeypatch.setattr(addresses, "listeners_of", lambda port: {0})
    assert not is_held_by_a_stranger(1, NOBODY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://u:p@h:1,nats://u:p@i:2", "nats://***@h:1,nats://***@i:2"),
        ("nats://u:p@ss/w@h:1,nats://u:secret@i", "nats://***@h:1,nats://***@i"),
        ("nats://u:MY SECRET@127.0.0.1:4222", "nats://***@127.0.0.1:4222"),
        ("nats://u:a,b\n@h:1, nats://u:c@i", "nats://***@h:1, nats://***@i"),
        ("no answer from tls://a:b@h", "no answer from tls://***@h"),
        ("mail@example.com", "mail@example.com"),
    ],
)
def test_passwords_in_urls_are_not_shown(text: str, expected: str) -> None:
    """Whatever is printed goes through this."""
    assert redacted(text) == expected
