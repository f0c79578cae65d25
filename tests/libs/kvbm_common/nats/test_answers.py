"""Errors that a peer answers with: whatever it writes, there is a reason."""

from __future__ import annotations

import pytest
from kvbm_common.errors import RequestFailed
from kvbm_common.nats.answers import NO_CODE, request_failed


def reply(code: str) -> bytes:
    """The payload of an error."""
    return b'{"error":{"code":"%s","message":"no"}}' % code.encode()


@pytest.mark.parametrize(
    ("header", "payload", "code"),
    [
        ("busy", reply("stale_arena"), "stale_arena"),
        ("busy", reply(""), "busy"),
        ("", reply(""), NO_CODE),
        ("", b"garbage", NO_CODE),
        ("busy", b"", "busy"),
        ("busy", b'{"error":{"code":"\xff"}}', "busy"),
        ("", b'{"x":' + b"[" * 5_000, NO_CODE),
    ],
    ids=["typed", "header", "empty", "garbage", "no payload", "no text", "deep"],
)
def test_an_error_of_a_peer_has_a_code(header: str, payload: bytes, code: str) -> None:
    """A failure without a reason would be no failure to the core that waits for it."""
    error = request_failed(header, payload)
    assert isinstance(error, RequestFailed)
    assert error.code == code
