"""The limiter of repeated log lines."""

from __future__ import annotations

import logging

import pytest
from kvbm_common.logs import REPEAT_S, OncePerKind


def test_a_kind_is_logged_once_a_minute_with_what_was_withheld(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    limiter = OncePerKind(logging.getLogger("test"), clock_s=lambda: now_s)
    for _ in range(3):
        limiter.warning("oversized", "9 MB")
    limiter.warning("malformed", "not JSON")
    now_s = REPEAT_S + 1
    limiter.warning("oversized", "8 MB")
    assert [record.getMessage() for record in caplog.records] == [
        "oversized: 9 MB",
        "malformed: not JSON",
        "oversized: 8 MB (and 2 more of this kind)",
    ]
