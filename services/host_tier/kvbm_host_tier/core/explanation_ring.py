"""Explanation ring: the explanations of the last lookups, packed, in a ring.

    number    0 1 2 3 4 5 6 7 8 …        an explanation has the next number, always
    place     number modulo `count_max`  the newest overwrites the oldest
    request → its newest number          each explanation has the number of the one before

Times inside are those of the core; their reader adds what makes them wall-clock times.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import msgspec
from kvbm_common.wire.bounds import Fill
from kvbm_common.wire.explain import REQUEST_CHARS_MAX, ExplainListRequest, Explanation, Segment

LOOKUPS_MAX = 64
"""Lookups of one request in one answer: an engine may ask again and again."""
SCAN_MAX = 131_072
"""Places that one question looks at: a few ms."""
ENGINES_MAX = 4_096
"""Names of engines and reasons kept as one object each, however many explanations name them."""

_NAMES = sorted(Explanation.__struct_fields__, key="segments".__eq__)
"""The fields of an explanation: the request first, the segments last."""
_values = attrgetter(*_NAMES[:-1])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, list[Any]])
"""An explanation, packed: the number of the explanation of its request before (-1: first one),
and the fields without their names, since 100,000 are kept."""


class ExplanationRing:
    """The last `count_max` explanations; 0 keeps none."""

    def __init__(self, count_max: int) -> None:
        assert count_max >= 0
        self._count_max = count_max
        self._next = 0
        self._packed: list[bytes] = []
        self._reasons: list[str] = []
        self._engines: list[str] = []
        """The engine at each place, the same object for the same text: a scan needs no decoding."""
        self._newest: dict[str, int] = {}
        self._shared: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def oldest(self) -> int:
        """Return the number of the oldest that is kept."""
        assert len(self._packed) <= self._next, f"{len(self._packed)} are kept of {self._next}"
        return self._next - len(self._packed)

    def fill(self, now_ms: int) -> Fill:
        """Return how full the ring is, and how far back it reaches."""
        reach_s = (now_ms - self.oldest_ms()) / 1000 if self.oldest and self._packed else None
        return Fill(len(self), self._count_max, self.oldest, reach_s)

    def add(self, one: Explanation) -> None:
        """Keep an explanation, and let the oldest go."""
        assert one.hit_blocks <= one.blocks, one.request
        if not self._count_max:
            return
        number = self._next
        place = number % self._count_max
        if len(self._packed) == self._count_max:
            self._drop(self._packed[place])
        else:
            self._packed.append(b"")
            self._reasons.append("")
            self._engines.append("")
        self._packed[place] = _pack(one, self._newest.get(one.request, -1))
        self._reasons[place] = self._shared.setdefault(one.reason, one.reason)
        self._engines[place] = self._one_of(one.engine)
        self._newest[one.request] = number
        self._next += 1

    def _one_of(self, engine: str) -> str:
        if len(self._shared) > ENGINES_MAX:
            self._shared.clear()  # Engines that come and go; those that are kept stay as they are.
        return self._shared.setdefault(engine, engine)

    def _drop(self, packed: bytes) -> None:
        assert packed, "a place that was never used is dropped"
        _, (request, *_) = _decoder.decode(packed)
        if self._newest.get(request) == self.oldest:
            del self._newest[request]

    def find(self, request: str) -> list[Explanation]:
        """Return the lookups of a request, the newest first."""
        assert len(request) <= REQUEST_CHARS_MAX
        found: list[Explanation] = []
        number = self._newest.get(request, -1)
        while number >= self.oldest and number >= 0 and len(found) < LOOKUPS_MAX:
            one, number = self._at(number)
            found.append(one)
        return found

    def amend(self, request: str, engine: str, outcome: str, blocks: int) -> bool:
        """Add its connector's outcome to the newest lookup of a request; False: it is gone."""
        assert blocks >= 0
        number = self._newest.get(request, -1)
        if number < 0:
            return False
        one, previous = self._at(number)
        if one.engine != engine:
            return False
        amended = msgspec.structs.replace(one, outcome=outcome, lost_blocks=blocks)
        self._packed[number % self._count_max] = _pack(amended, previous)
        return True

    def latest(self, asked: ExplainListRequest) -> tuple[list[Explanation], int]:
        """Return the newest that fit, and the number to go on before (0: all were seen)."""
        assert asked.limit > 0, asked
        found: list[Explanation] = []
        first = min(self._next, asked.before or self._next) - 1
        last = max(self.oldest, first - SCAN_MAX + 1)
        for number in self._matching(first, last, asked):
            found.append(self._at(number)[0])
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
        return self._at(self.oldest)[0].ts_ms if self._packed else 0

    def _at(self, number: int) -> tuple[Explanation, int]:
        assert self.oldest <= number < self._next
        return _unpack(self._packed[number % self._count_max])

    def check(self) -> None:
        """Assert every invariant; O(kept)."""
        assert len(self._packed) == len(self._reasons) == len(self._engines) <= self._count_max
        assert len(self._newest) <= len(self._packed)
        for request, number in self._newest.items():
            assert self.oldest <= number < self._next, request
            assert self._at(number)[0].request == request


def _pack(one: Explanation, previous: int) -> bytes:
    values = [msgspec.structs.astuple(segment) for segment in one.segments]
    return _encoder.encode((previous, [*_values(one), values]))


def _unpack(packed: bytes) -> tuple[Explanation, int]:
    previous, values = _decoder.decode(packed)
    *rest, rows = values
    segments = [Segment(**dict(zip(Segment.__struct_fields__, row, strict=True))) for row in rows]
    return Explanation(**dict(zip(_NAMES, [*rest, segments], strict=True))), previous
