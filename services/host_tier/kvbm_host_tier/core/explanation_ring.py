"""Explanation ring: the explanations of the last lookups, packed, in a ring.

    number    0 1 2 3 4 5 6 7 8 …        an explanation has the next number, always
    place     number modulo `count_max`  the newest overwrites the oldest
    request → bucket → newest number     each has the number before it in its bucket

A number below the oldest ends a bucket, so nothing is removed from there. The ring has a bound in
bytes, too: where lookups have many segments or long names, fewer are kept. Times inside are those
of the core; their reader adds what makes them wall-clock times.
"""

from __future__ import annotations

from array import array
from binascii import crc32, unhexlify
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import msgspec
from kvbm_common.identity import HASH_BYTES
from kvbm_common.tier.reasons import MEANINGS
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.explain import (
    REQUEST_CHARS_MAX,
    ExplainListRequest,
    Explanation,
    Place,
    Segment,
)

ENTRY_BYTES = 384
"""Bytes of an explanation on average, at most; measured: 180 with two segments, 300 with four."""
PLACE_BYTES = 96
"""Bytes of these that are not the packed explanation: its object, and its places in lists."""
LOOKUPS_MAX = 64
"""Lookups of one request in one answer: an engine may ask again and again."""
BUCKET_MAX = 4_096
"""Explanations of one bucket that one question looks at: names may be alike by intent."""
SCAN_MAX = 131_072
"""Places that one question looks at: a few ms."""
ENGINES_MAX = 4_096
"""Names of engines and reasons kept as one object each, however many explanations name them."""

Packed = list[Any]
"""A packed explanation: its fields without names, but the engine and reason at its place."""
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Packed)
_WORDS = ["", "host", "disk", "object", "remote", "device", "lru", *sorted(MEANINGS)]
"""Words that are packed as a number; others are packed as they are."""
_NUMBERS = {word: number for number, word in enumerate(_WORDS)}
_HIT_REST = ["", "", "", 0, ""]
"""The fields of a hit's segment after blocks and tier, which are not packed."""


class ExplanationRing:
    """The last `count_max` explanations; 0 keeps none."""

    def __init__(self, count_max: int) -> None:
        assert count_max >= 0
        self._count_max = count_max
        self._bytes_max = count_max * (ENTRY_BYTES - PLACE_BYTES)
        self._bytes = 0
        """Bytes of all that are packed."""
        self._next = self.oldest = 0
        """The number of the next one, and of the oldest that is kept."""
        self._packed: list[bytes] = []
        self._reasons: list[str] = []
        self._engines: list[str] = []
        """The engine at each place, the same object for the same text: a scan needs no decoding."""
        self._newest = array("q", [-1]) * (1 << count_max.bit_length())
        """Bucket → the number of its newest."""
        self._before = array("q")
        """The number at each place that came before in the same bucket."""
        self._shared: dict[str, str] = {}

    def __len__(self) -> int:
        assert self.oldest <= self._next, f"{self.oldest} is the oldest of {self._next}"
        return self._next - self.oldest

    def usage(self, now_ms: int) -> Usage:
        """Return how full the ring is, and how far back it reaches."""
        reach_s = (now_ms - self.oldest_ms()) / 1000 if self.oldest and len(self) else None
        return Usage(len(self), self._count_max, self.oldest, reach_s)

    def add(self, one: Explanation) -> None:
        """Keep an explanation, and let the oldest go."""
        assert one.hit_blocks <= one.blocks, one.request
        if not self._count_max:
            return
        number = self._next
        place = number % self._count_max
        if len(self) == self._count_max:
            self._drop_oldest()
        if place == len(self._packed):
            self._packed.append(b"")
            self._reasons.append("")
            self._engines.append("")
            self._before.append(-1)
        bucket = self._bucket(one.request)
        self._before[place], self._newest[bucket] = self._newest[bucket], number
        self._packed[place] = packed = _pack(one)
        self._reasons[place] = self._shared.setdefault(one.reason, one.reason)
        self._engines[place] = self._one_of(one.engine)
        self._next += 1
        self._bytes += len(packed)
        while self._bytes > self._bytes_max and len(self) > 1:
            self._drop_oldest()

    def _one_of(self, engine: str) -> str:
        if len(self._shared) > ENGINES_MAX:
            self._shared.clear()  # Engines that come and go; those that are kept stay as they are.
        return self._shared.setdefault(engine, engine)

    def _drop_oldest(self) -> None:
        place = self.oldest % self._count_max
        packed, self._packed[place] = self._packed[place], b""
        assert packed, f"place {place} is empty"
        self._bytes -= len(packed)
        self.oldest += 1

    def _bucket(self, request: str) -> int:
        bucket = crc32(request.encode()) & len(self._newest) - 1
        assert 0 <= bucket < len(self._newest), f"bucket {bucket}"
        return bucket

    def _of(self, request: str) -> Iterator[int]:
        """Yield the numbers of a request, the newest first; those that are easily found."""
        begin = _begin_of(request)
        number = self._newest[self._bucket(request)]
        for _ in range(BUCKET_MAX):
            if number < self.oldest:
                return
            place = number % self._count_max
            if self._packed[place].startswith(begin):
                yield number
            number = self._before[place]

    def find(self, request: str) -> list[Explanation]:
        """Return the lookups of a request, the newest first."""
        assert len(request) <= REQUEST_CHARS_MAX
        return [self._at(number) for number in islice(self._of(request), LOOKUPS_MAX)]

    def amend(self, request: str, engine: str, outcome: str, blocks: int) -> bool:
        """Add its connector's outcome to the newest lookup of a request; False: it is gone."""
        assert blocks >= 0
        number = next(self._of(request), None)
        if number is None or self._engines[number % self._count_max] != engine:
            return False
        one = self._at(number)
        packed = _pack(msgspec.structs.replace(one, outcome=outcome, lost_blocks=blocks))
        place = number % self._count_max
        self._bytes += len(packed) - len(self._packed[place])
        self._packed[place] = packed
        return True

    def latest(self, asked: ExplainListRequest) -> tuple[list[Explanation], int]:
        """Return the newest that fit, and the number to go on before (0: all were seen)."""
        assert asked.limit > 0, asked
        found: list[Explanation] = []
        first = min(self._next, asked.before or self._next) - 1
        last = max(self.oldest, first - SCAN_MAX + 1)
        for number in self._matching(first, last, asked):
            found.append(self._at(number))
            if len(found) == asked.limit:
                return found, number if number > self.oldest else 0
        return found, last if last > self.oldest else 0

    def _matching(self, first: int, last: int, asked: ExplainListRequest) -> Iterator[int]:
        assert first < self._next, f"number {first} of {self._next}"
        reasons, engines, count_max = self._reasons, self._engines, self._count_max
        reason, engine, missed = asked.reason, asked.engine, asked.missed
        for number in range(first, last - 1, -1):
            place = number % count_max
            had = reasons[place]
            fits = (not reason or had == reason) and (had or not missed)
            if fits and (not engine or engines[place] == engine):
                yield number

    def oldest_ms(self) -> int:
        """Return when the oldest was asked; 0: no explanation is kept."""
        return self._at(self.oldest).ts_ms if len(self) else 0

    def _at(self, number: int) -> Explanation:
        assert self.oldest <= number < self._next
        place = number % self._count_max
        return _unpack(self._packed[place], self._engines[place], self._reasons[place])

    def check(self) -> None:
        """Assert every invariant; O(kept)."""
        assert len(self._packed) == len(self._reasons) == len(self._engines) <= self._count_max
        assert len(self._before) == len(self._packed) >= len(self)
        assert self._bytes == sum(map(len, self._packed))
        for number in range(max(self.oldest, self._next - BUCKET_MAX), self._next):
            assert number in self._of(self._at(number).request), f"{number} is not found"


def _begin_of(request: str) -> bytes:
    """Return what the packed explanations of a request begin with."""
    return b"\x98" + _encode(request)  # An array of 8 values.


def _pack(one: Explanation) -> bytes:
    number_of = _NUMBERS.get
    rows: list[list[Any]] = []
    for segment in one.segments:
        blocks, tier, *rest = msgspec.structs.astuple(segment)
        row = [blocks, number_of(tier, tier)]
        if rest != _HIT_REST:
            reason, name, policy, at_ms, detail = rest
            row += (number_of(reason, reason), _raw_of(name), number_of(policy, policy), at_ms)
            row.append(number_of(detail, detail))
        rows.append(row)
    packed = _encode([
        one.request, one.ts_ms, one.blocks, one.hit_blocks, one.outcome, one.lost_blocks,
        _raw_of(one.trace), rows,
    ])  # fmt: skip
    return bytes(memoryview(packed))  # A copy, without the encoder's spare room: a fifth.


def _unpack(packed: bytes, engine: str, reason: str) -> Explanation:
    assert packed, "a place without an explanation is read"
    request, ts_ms, blocks, hit_blocks, outcome, lost_blocks, trace, rows = _decoder.decode(packed)
    return Explanation(
        request=request,
        engine=engine,
        ts_ms=ts_ms,
        blocks=blocks,
        hit_blocks=hit_blocks,
        reason=reason,
        segments=[_segment_of(*row) for row in rows],
        outcome=outcome,
        lost_blocks=lost_blocks,
        trace=_digits_of(trace),
    )


def _segment_of(
    blocks: int,
    tier: int,
    reason: int | str = 0,
    name: bytes | str = "",
    policy: int | str = 0,
    at_ms: int = 0,
    detail: int | str = 0,
) -> Segment:
    """Return a segment from the values that are packed of it."""
    return Segment(
        blocks=blocks,
        tier=cast("Place", _WORDS[tier]),
        reason=_word_of(reason),
        hash=_digits_of(name),
        policy=_word_of(policy),
        at_ms=at_ms,
        detail=_word_of(detail),
    )


def _word_of(packed: int | str) -> str:
    if isinstance(packed, str):
        return packed
    assert packed < len(_WORDS), f"word {packed}"
    return _WORDS[packed]


def _raw_of(digits: str) -> bytes | str:
    """Return 16 bytes for 32 hex digits; any other text as it is."""
    if len(digits) != 2 * HASH_BYTES:
        return digits
    try:
        raw = unhexlify(digits)
    except ValueError:
        return digits
    return raw if raw.hex() == digits else digits


def _digits_of(packed: bytes | str) -> str:
    if isinstance(packed, str):
        return packed
    assert len(packed) == HASH_BYTES, f"{len(packed)} bytes"
    return packed.hex()
