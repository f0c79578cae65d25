"""Looks at the same time: late ones are left out, and errors are raised."""

from __future__ import annotations

import threading

import pytest
from kvbm_cli.looks import look_at_once


@pytest.mark.slow
def test_a_look_that_hangs_is_left_out() -> None:
    def hang() -> str:
        threading.Event().wait()
        return "late"

    assert look_at_once([lambda: "a", hang, lambda: "c"], within_s=3.0) == {0: "a", 2: "c"}


def test_an_error_of_a_look_is_raised() -> None:
    def fail() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        look_at_once([lambda: None, fail], within_s=30.0)


def test_what_finds_nothing_has_ended() -> None:
    assert look_at_once([lambda: None], within_s=30.0) == {0: None}
    assert look_at_once([], within_s=30.0) == {}
