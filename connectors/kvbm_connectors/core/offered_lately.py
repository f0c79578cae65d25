"""Names offered lately: the filter may not have them yet when a lookup would find them.

The engine confirms an offer and asks on one socket, in order; the filter it reads beside that. So
of what it has offered itself within some seconds, it asks.

A name is six bits of one word, as in a blocked Bloom filter (Putze et al. 2007):

    mix of the name   high 14 bits: the word      six times 6 bits: bits of the word
    table             16,384 words, 128 KiB       FULL_NAMES names; then another one begins

A name that was offered is found, always. One that was not is found by chance, and asked for in
vain: once in 10,000 questions for each table, which is less than 1 % with 80,000 names a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from struct import Struct

import numpy as np
from kvbm_common.identity import SequenceHash

WORD_BITS = 14
TABLE_BYTES = 8 << WORD_BITS
FULL_NAMES = 24_576
"""Names of a table: 5.3 bytes each."""
NAMES_PER_S_MAX = 250_000
"""New names a second that an engine offers at most: 62 GB/s with blocks of 250 KB. With more, the
last table takes them all, and more names are found by chance."""
WAITING_MAX = 512
"""Names that are marked at once, in some 45 µs; until then, a question compares them all."""
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_BITS_64 = (1 << 64) - 1
_SHIFTS = range(14, 50, 6)
"""Where in a mix the six bits are told: between its lowest bits and the word."""
_SHIFTS_OF_ALL = np.array(_SHIFTS, np.uint64)[:, None]
_halves_of = Struct("<QQ").unpack


def tables_for(lately_ms: int) -> int:
    """Return how many tables the names of so long a time take at most."""
    assert lately_ms > 0, f"names of {lately_ms} ms"
    return -(-lately_ms * NAMES_PER_S_MAX // (1_000 * FULL_NAMES))


class OfferedLately:
    """The names of the last `lately_ms`, and of at most as long before that.

    They take twice `tables_for` tables at most: 14 MiB for 5.5 s. With 80,000 names a second it
    is 5 MiB.
    """

    def __init__(self, lately_ms: int) -> None:
        self._lately_ms = lately_ms
        self._tables_max = tables_for(lately_ms)
        self._waiting: list[SequenceHash] = []
        """The last names, which are in no table yet."""
        self._newer: list[memoryview] = []
        self._older: list[memoryview] = []
        self._left = 0
        """Names for which the last table has room."""
        self._turn_at_ms = 0

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all tables."""
        return TABLE_BYTES * (len(self._newer) + len(self._older))

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Remember names that are on offer now."""
        self._waiting += names
        if len(self._waiting) >= WAITING_MAX:
            self._mark()

    def has_any(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether some of these names were offered lately."""
        return any(name in self._waiting or self._is_marked(name) for name in names)

    def _is_marked(self, name: SequenceHash) -> bool:
        low, high = _halves_of(name)
        mix = (low + high * _FIRST) * _SECOND & _BITS_64
        mix = (mix ^ mix >> 32) * _FIRST & _BITS_64
        word, bits = mix >> 64 - WORD_BITS, 0
        for shift in _SHIFTS:
            bits |= 1 << (mix >> shift & 63)
        return any(table[word] & bits == bits for table in chain(self._newer, self._older))

    def tick(self, now_ms: int) -> None:
        """Forget what was offered long ago."""
        if now_ms >= self._turn_at_ms:
            if self._waiting:
                self._mark()
            self._older, self._newer, self._left = self._newer, [], 0
            self._turn_at_ms = now_ms + self._lately_ms

    def _mark(self) -> None:
        """Mark the names that wait; a table takes a few more than it has room for."""
        names, self._waiting = self._waiting, []
        if self._left <= 0 and len(self._newer) < self._tables_max:
            self._newer.append(memoryview(bytearray(TABLE_BYTES)).cast("Q"))
            self._left = FULL_NAMES
        self._left -= len(names)
        halves = np.frombuffer(b"".join(names), "<u8").reshape(-1, 2)
        assert len(halves) == len(names), f"{len(halves)} of {len(names)} names"
        mix = (halves[:, 0] + halves[:, 1] * np.uint64(_FIRST)) * np.uint64(_SECOND)
        mix = (mix ^ mix >> np.uint64(32)) * np.uint64(_FIRST)
        bits = np.uint64(1) << (mix >> _SHIFTS_OF_ALL & np.uint64(63))
        words = (mix >> np.uint64(64 - WORD_BITS)).astype(np.intp)
        table = np.frombuffer(self._newer[-1], np.uint64)
        np.bitwise_or.at(table, words, np.bitwise_or.reduce(bits, axis=0))
