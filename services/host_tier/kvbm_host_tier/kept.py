"""The kept requests: the explanations of the last lookups, packed, in a ring.

    number    0 1 2 3 4 5 6 7 8 …        an explanation has the next number, for ever
    place     number modulo `count_max`  the newest overwrites the oldest
    request → its newest number          each explanation has the number of the one before

Times inside are those of the core; whoever reads them out adds what makes them wall-clock times.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from kvbm_common.wire.explain import Explanation, Place, Segment

LOOKUPS_MAX = 64
"""Of one request in one answer; an engine that asks again and again is not listed for ever."""
SCAN_MAX = 131_072
"""Places that one question looks at: a few ms."""
ENGINES_MAX = 4_096
"""Names of engines and reasons that are shared."""


class _Segment(msgspec.Struct, frozen=True, array_like=True):
    blocks: int
    tier: Place
    reason: str
    hash: bytes
    policy: str
    at_ms: int
    detail: str


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    request: str
    engine: str
    ts_ms: int
    blocks: int
    hit_blocks: int
    reason: str
    segments: list[_Segment]
    outcome: str
    lost_blocks: int
    trace: str
    previous: int
    """Number of the request's lookup before; -1: there is none."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


class KeptRequests:
    """The last `count_max` explanations; 0 keeps none."""

    def __init__(self, count_max: int) -> None:
        assert count_max >= 0
        self._count_max = count_max
        self._next = 0
        self._packed: list[bytes] = []
        self._reasons: list[str] = []
        self._engines: list[str] = []
        """Of each place, the same object for the same text: a scan needs no decoding."""
        self._newest: dict[str, int] = {}
        self._shared: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def oldest(self) -> int:
        """The number of the oldest that is kept."""
        return self._next - len(self._packed)

    def add(self, one: Explanation) -> None:
        """Keep it, and let the oldest go."""
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
        request = _decoder.decode(packed).request
        if self._newest.get(request) == self.oldest:
            del self._newest[request]

    def find(self, request: str) -> list[Explanation]:
        """The lookups of a request, the newest first."""
        found: list[Explanation] = []
        number = self._newest.get(request, -1)
        while number >= self.oldest and number >= 0 and len(found) < LOOKUPS_MAX:
            packed = self._at(number)
            found.append(_unpack(packed))
            number = packed.previous
        return found

    def amend(self, request: str, engine: str, outcome: str, blocks: int) -> bool:
        """Add to the newest lookup of a request what its connector tells; False: it is gone."""
        number = self._newest.get(request, -1)
        if number < 0:
            return False
        packed = self._at(number)
        if packed.engine != engine:
            return False
        amended = msgspec.structs.replace(packed, outcome=outcome, lost_blocks=blocks)
        self._packed[number % self._count_max] = _encoder.encode(amended)
        return True

    def latest(
        self, *, limit: int, reason: str, engine: str, missed: bool, before: int
    ) -> tuple[list[Explanation], int]:
        """The newest that fit, and the number before which to go on (0: all were seen)."""
        found: list[Explanation] = []
        first = min(self._next, before) - 1 if before else self._next - 1
        last = max(self.oldest, first - SCAN_MAX + 1)
        for number in self._matching(first, last, reason, engine, missed=missed):
            found.append(_unpack(self._at(number)))
            if len(found) == limit:
                return found, number if number > self.oldest else 0
        return found, last if last > self.oldest else 0

    def _matching(
        self, first: int, last: int, reason: str, engine: str, *, missed: bool
    ) -> Iterator[int]:
        reasons, engines, count_max = self._reasons, self._engines, self._count_max
        for number in range(first, last - 1, -1):
            place = number % count_max
            had = reasons[place]
            fits = (not reason or had == reason) and (had or not missed)
            if fits and (not engine or engines[place] == engine):
                yield number

    def oldest_ms(self) -> int:
        """When the oldest was asked; 0: none is kept."""
        return self._at(self.oldest).ts_ms if self._packed else 0

    def _at(self, number: int) -> _Packed:
        return _decoder.decode(self._packed[number % self._count_max])

    def check(self) -> None:
        """Assert every invariant; O(kept)."""
        assert len(self._packed) == len(self._reasons) == len(self._engines) <= self._count_max
        assert len(self._newest) <= len(self._packed)
        for request, number in self._newest.items():
            assert self.oldest <= number < self._next, request
            assert self._at(number).request == request


def _pack(one: Explanation, previous: int) -> bytes:
    segments = [
        _Segment(s.blocks, s.tier, s.reason, bytes.fromhex(s.hash), s.policy, s.at_ms, s.detail)
        for s in one.segments
    ]
    return _encoder.encode(
        _Packed(
            one.request, one.engine, one.ts_ms, one.blocks, one.hit_blocks, one.reason, segments,
            one.outcome, one.lost_blocks, one.trace, previous,
        )
    )  # fmt: skip


def _unpack(one: _Packed) -> Explanation:
    return Explanation(
        request=one.request,
        engine=one.engine,
        ts_ms=one.ts_ms,
        blocks=one.blocks,
        hit_blocks=one.hit_blocks,
        reason=one.reason,
        segments=[
            Segment(
                blocks=s.blocks,
                tier=s.tier,
                reason=s.reason,
                hash=s.hash.hex(),
                policy=s.policy,
                at_ms=s.at_ms,
                detail=s.detail,
            )
            for s in one.segments
        ],
        outcome=one.outcome,
        lost_blocks=one.lost_blocks,
        trace=one.trace,
    )
