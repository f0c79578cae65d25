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
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path

from kvbm_common.config.settings import Settings
from kvbm_common.runtime.mounts import last_noted, missing_mount

from kvbm_cli.looks import look_at_once

JOURNAL, HEADER = "journal", "header"
"""A directory with a journal is a disk tier's store; its header says whose."""
HEADER_BYTES_MAX = 64 * 1024
NUMBERS = range(64)
"""These numbers are looked for among the notes on mounts, whose names are hashes."""
LOOK_S = 2.0
"""The time that a look at the directories may take; one that hangs has the number that was
noted."""
DECIDED_MAX = 64
"""The most lists of directories that a process remembers."""
_decided: dict[tuple[tuple[Path, ...], str, str, Path], list[int]] = {}
"""Directories and settings → the numbers that were decided. They hold for the process: its tiers
run, and a look at a disk that hangs costs."""
_deciding = threading.Lock()


def directories_by_number(settings: Settings) -> dict[int, Path]:
    """Return the directory of each disk tier, by the tier's number: the same one at each call."""
    directories = settings.disk_cache_dirs
    key = (directories, settings.host, settings.instance, settings.state_dir)
    with _deciding:
        if key not in _decided:
            if len(_decided) >= DECIDED_MAX:
                _decided.clear()
            _decided[key] = _decide(settings)
        return dict(sorted(zip(_decided[key], directories, strict=True)))


def _decide(settings: Settings) -> list[int]:
    """Look at all directories at once: one that hangs must not delay or hide the others."""
    directories = settings.disk_cache_dirs
    looks = [partial(numbers_in, directory, settings) for directory in directories]
    answered = look_at_once(looks, within_s=LOOK_S)
    held = [
        answered[place]
        if place in answered
        else noted_number(directory, settings, only_missing=False)
        for place, directory in enumerate(directories)
    ]
    return numbers_of(held, set(range(len(directories))) - set(answered))


def numbers_of(held: Sequence[set[int]], silent: Set[int] = frozenset()) -> list[int]:
    """Return a number for each directory, from the numbers of the stores that it holds.

    Those in `silent` did not answer: where nothing is noted, they keep the numbers of their places.

    >>> numbers_of([{1}, {0}])
    [1, 0]
    >>> numbers_of([set(), {0}, {1}])
    [2, 0, 1]
    >>> numbers_of([{0, 1}, {0, 1}])
    [0, 1]
    >>> numbers_of([{0, 2}, {0}, {1}])
    [2, 0, 1]
    >>> numbers_of([set(), set(), {0}], {1})
    [2, 1, 0]
    """
    chosen = {place: place for place, numbers in enumerate(held) if place in numbers}
    for place in range(len(held)):
        if place not in chosen:
            _choose(place, held, chosen, set())
    for place in sorted(range(len(held)), key=lambda place: place not in silent):
        if place not in chosen:
            free = set(range(len(held))) - set(chosen.values())
            chosen[place] = place if place in silent & free else min(free)
    return [chosen[place] for place in range(len(held))]


def _choose(place: int, held: Sequence[set[int]], chosen: dict[int, int], tried: set[int]) -> bool:
    """Give a directory the number of a store that it holds, if there is one for it.

    A directory that has that number moves to another that it holds: so the most directories keep a
    store. Each number is `tried` once.
    """
    for number in sorted(held[place] - tried):
        tried.add(number)
        owner = next((one for one, taken in chosen.items() if taken == number), None)
        if owner is None or _choose(owner, held, chosen, tried):
            chosen[place] = number
            return True
    return False


def numbers_in(directory: Path, settings: Settings) -> set[int]:
    """Return the numbers of the disk tiers of these settings whose stores a directory holds.

    Or that of the store which it held when its disk was mounted.
    """
    first = re.escape(settings.store_name(settings.instance))
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
