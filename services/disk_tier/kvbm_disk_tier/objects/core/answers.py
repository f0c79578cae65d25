"""Answers of a store: whether one is a listing to be believed, and how old an object is.

A proxy's maintenance page is a 200, too, and a gateway may answer another question. An answer that
is not a listing of the requested names is not used at all: all blocks would seem to be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EARLIEST_MS = 1_142_294_400_000
"""March 2006, when S3 began. A store with an earlier date has no clock."""
CLOCKS_APART_MAX_MS = 15 * 60 * 1000
"""S3 refuses requests whose clock is off by more, so a date farther off is not believed."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing."""

    name: str
    bytes: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing, in the order of the names; `more`: there may be names after it."""

    objects: Sequence[Listed]
    more: bool
    last_name: str = ""
    """The name after which the next page begins; empty: there is no name on this one."""
    unread: str = ""
    """The reason why a part of the names was left out; empty: none was."""


@dataclass(frozen=True, slots=True)
class FolderList:
    """The folders below a prefix, each as the prefix of the names in it."""

    prefixes: Sequence[str]
    unread: str = ""
    """The reason why folders may have been left out; empty: none was."""


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """A store's answer to a list, as far as it could be read."""

    is_listing: bool
    """True: the answer has the marks of a listing, at least the one of a listing's end."""
    prefix: str | None
    """The prefix that the answer repeats; None: it repeats none."""
    is_truncated: bool
    names: Sequence[str]


def refusal_of(answer: ListAnswer, *, prefix: str, after: str) -> str:
    """Return why an answer is not a page of these names; empty: it is one."""
    if not answer.is_listing:
        return "an answer that is no listing"
    if answer.prefix is not None and answer.prefix != prefix:
        return f"a listing of {answer.prefix!r}, not of {prefix!r}"
    last = after
    for name in answer.names:
        if not name.startswith(prefix):
            return f"a listing of {prefix!r} that names {name!r}"
        if name <= last:
            return f"a listing whose names do not ascend: {name!r}"
        last = name
    if answer.is_truncated and not answer.names:
        return "a listing that is cut off before its first name"
    return ""


def store_now_ms(answered_ms: int | None, own_ms: int) -> int:
    """Return the time from which ages are counted: the store's, if it is near ours."""
    assert own_ms >= 0
    if answered_ms is None or abs(answered_ms - own_ms) > CLOCKS_APART_MAX_MS:
        return own_ms
    return answered_ms


def file_server_now_ms(stamped_ms: int, own_ms: int) -> int:
    """Return the time by which the ages of files are told: the earlier one, if it is much earlier.

    Files that look too young stay. By a server's clock that jumps ahead all of them would expire.
    """
    assert own_ms >= 0, f"it is {own_ms} ms here"
    return own_ms if stamped_ms - own_ms > CLOCKS_APART_MAX_MS else stamped_ms


def age_ms(stored_ms: int, now_ms: int) -> int:
    """Return an object's age; one with an impossible date counts as new, and is not deleted."""
    return max(0, now_ms - stored_ms) if stored_ms >= EARLIEST_MS else 0
