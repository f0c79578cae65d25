"""Disk stores: each disk tier of a stack has the directory that holds its store.

A store is named after its host and instance. So directories may be listed in another order, or one
of them may be left out, and each disk tier finds its blocks. Where a disk is not mounted, what was
noted in its last life counts. A directory without a store gets the lowest number that is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from kvbm_common.config.settings import Settings
from kvbm_common.runtime.mounts import last_noted, missing_mount

JOURNAL, HEADER = "journal", "header"
"""A directory with a journal is a disk tier's store; its header says whose."""
HEADER_BYTES_MAX = 64 * 1024
NUMBERS = range(64)
"""These numbers are looked for among the notes on mounts, whose names are hashes."""
LOOK_S = 2.0
"""How long a look at the directories may take; behind it they have the numbers of their places."""


def directories_by_number(settings: Settings) -> dict[int, Path]:
    """Return the directory of each disk tier, by the tier's number."""
    directories = settings.disk_cache_dirs
    held: dict[int, set[int]] = {}

    def look() -> None:
        for place, directory in enumerate(directories):
            held[place] = numbers_in(directory, settings)

    # A disk that hangs must not delay the others: the thread is left behind.
    looking = threading.Thread(target=look, name="disk-stores", daemon=True)
    looking.start()
    looking.join(LOOK_S)
    numbers = numbers_of([held.get(place, set()) for place in range(len(directories))])
    return dict(sorted(zip(numbers, directories, strict=True)))


def numbers_of(held: Sequence[set[int]]) -> list[int]:
    """Return a number for each directory, from the numbers of the stores that it holds.

    >>> numbers_of([{1}, {0}])
    [1, 0]
    >>> numbers_of([set(), {0}, {1}])
    [2, 0, 1]
    >>> numbers_of([{0, 1}, {0, 1}])
    [0, 1]
    """
    chosen = {place: place for place, numbers in enumerate(held) if place in numbers}
    for place, numbers in enumerate(held):
        if place not in chosen and numbers - set(chosen.values()):
            chosen[place] = min(numbers - set(chosen.values()))
    for place in range(len(held)):
        if place not in chosen:
            chosen[place] = min(set(range(len(held))) - set(chosen.values()))
    return [chosen[place] for place in range(len(held))]


def numbers_in(directory: Path, settings: Settings) -> set[int]:
    """Return the numbers of the disk tiers of these settings whose stores a directory holds.

    Or that of the store which it held when its disk was mounted.
    """
    first = re.escape(f"kvbm-{settings.host}-{settings.instance}")
    name = re.compile(rf"{first}(-[1-9]\d*)?")
    matches: list[re.Match[str]] = []
    with contextlib.suppress(OSError):
        matches = [match for one in os.listdir(directory) if (match := name.fullmatch(one))]
    held = {
        int((match[1] or "-0")[1:])
        for match in matches
        if is_store_of(directory / match.string, settings)
    }
    return held or noted_number(directory, settings, only_missing=True)


def noted_number(directory: Path, settings: Settings, *, only_missing: bool) -> set[int]:
    """Return the number of the store that a directory had last, from the notes on mounts.

    `only_missing`: only if its disk is not mounted now.
    """
    stores = {
        settings.disk_store(directory, f"{settings.instance}-{number}".removesuffix("-0")): number
        for number in NUMBERS
    }
    last = last_noted(stores, settings.state_dir)
    if last is None or (only_missing and missing_mount(last, settings.state_dir) is None):
        return set()
    return {stores[last]}


def is_store_of(store: Path, settings: Settings) -> bool:
    """Tell whether a path is a store of this host's disk tiers, whatever their number.

    A name alone may be of two hosts: `kvbm-a-2-1` of `a-2` or of `a`. The header decides, unless
    an earlier release has written it.
    """
    if not os.path.lexists(store / JOURNAL):
        return False
    host = _host_in(store / HEADER)
    if host:
        return host == settings.host
    own = rf"(\d+|{re.escape(settings.instance)})(-[1-9]\d*)?"
    return bool(re.fullmatch(rf"kvbm-{re.escape(settings.host)}-{own}", store.name))


def _host_in(header: Path) -> str:
    """Return the host that a header names; empty where it names none, or cannot be read."""
    try:
        fd = os.open(header, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            said = json.loads(file.read(HEADER_BYTES_MAX))
        return str(said.get("host", ""))
    except (OSError, ValueError, AttributeError):
        return ""
