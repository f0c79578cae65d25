"""What the index benchmark feeds both sides: chains of several lengths, held by 64 sources.

Only the standard library: this also runs in the environment of the other side. Everything comes
from one seed, a few thousand events at a time, so that neither side's memory is the workload's.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator

BLOCKS = 1_000_000
SOURCES = 64
CHAIN_BLOCKS = (64, 256, 512)
BATCHES = (1, 4, 16, 64)
CHUNK_EVENTS = 4096
MATCHES = 2_000
MATCH_BLOCKS = 512
SUMMED = range(400)
NO_PARENT = bytes(16)
"""The root of the namespace."""

Encode = Callable[[int, bytes, list[bytes]], object]
"""Source, parent and blocks → an event as it arrives."""


def chains(blocks: int) -> Iterator[tuple[int, list[bytes]]]:
    """(source, names of the blocks), as many of each length."""
    rng = random.Random(1)
    made = number = 0
    while made < blocks:
        length = CHAIN_BLOCKS[number % len(CHAIN_BLOCKS)]
        packed = rng.randbytes(16 * length)
        yield number % SOURCES, [packed[at : at + 16] for at in range(0, 16 * length, 16)]
        made += length
        number += 1


def long_chains() -> list[list[bytes]]:
    """The chains that are asked for."""
    found = (names for _, names in chains(BLOCKS) if len(names) == MATCH_BLOCKS)
    return [names for _, names in zip(range(MATCHES), found, strict=False)]


def chunks(batch: int, encode: Encode, *, leaves_first: bool) -> Iterator[list[object]]:
    """All events in chunks: from the root on, or, as engines evict, from the leaf."""
    chunk: list[object] = []
    for source, names in chains(BLOCKS):
        offsets = range(0, len(names), batch)
        for at in reversed(offsets) if leaves_first else offsets:
            parent = names[at - 1] if at else NO_PARENT
            chunk.append(encode(source, parent, names[at : at + batch]))
            if len(chunk) == CHUNK_EVENTS:
                yield chunk
                chunk = []
    yield chunk


def feed(chunked: Iterator[list[object]], apply: Callable[[list[object]], None]) -> float:
    """CPU seconds of applying everything, all threads; making the events does not count."""
    seconds = 0.0
    for chunk in chunked:
        started = time.process_time()
        apply(chunk)
        seconds += time.process_time() - started
    return seconds


def match_seconds(match: Callable[[list[object]], object], make: Callable[[bytes], object],
                  asked: list[list[bytes]]) -> list[float]:  # fmt: skip
    """CPU seconds of each question; the names are made anew for each, as from a request."""
    seconds = []
    for names in asked:
        question = [make(name) for name in names]
        started = time.process_time()
        match(question)
        seconds.append(time.process_time() - started)
    return seconds


def machine_seconds(asked: list[list[bytes]]) -> list[float]:
    """The same of a sum that takes a few µs and touches no memory: the machine's own share.

    It is asked as often, with as much between, so that its slow ones have come from outside.
    """
    return match_seconds(lambda _: sum(SUMMED), bytes, asked)


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pin() -> None:
    """One core, the last one that we have."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def say(figures: dict[str, object]) -> None:
    """Hand the figures to the benchmark."""
    json.dump(figures, sys.stdout)
