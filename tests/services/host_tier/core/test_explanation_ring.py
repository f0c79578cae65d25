"""The kept requests: a bounded ring that finds by id, by reason and by engine."""

from __future__ import annotations

import tracemalloc
from binascii import crc32
from collections import defaultdict
from time import perf_counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.explain import ExplainListRequest, Explanation, Segment
from kvbm_host_tier.core.explanation_ring import (
    BUCKET_MAX,
    ENTRY_BYTES,
    LOOKUPS_MAX,
    ExplanationRing,
)

KEPT = 100_000


def explanation(number: int, *, request: str = "", engine: str = "ada") -> Explanation:
    """One with a hit and a miss; even ones were evicted, odd ones are new, each fifth is whole."""
    reason = "" if number % 5 == 0 else ("never_stored", "evicted")[number % 2 == 0]
    segments = [Segment(blocks=3, tier="host")]
    if reason:
        segments.append(
            Segment(blocks=2, reason=reason, tier="host", hash=f"{number:032x}", at_ms=number)
        )
    return Explanation(
        request=request or f"cmpl-{number:032x}", engine=engine, ts_ms=number, blocks=5,
        hit_blocks=3 if reason else 5, reason=reason, segments=segments,
    )  # fmt: skip


def filled(count: int, *, count_max: int = KEPT) -> ExplanationRing:
    """So many, one after the other."""
    kept = ExplanationRing(count_max)
    for number in range(count):
        kept.add(explanation(number))
    return kept


def latest(kept: ExplanationRing, limit: int, **query: Any) -> tuple[list[int], int]:
    """Times, which are numbers here, and where to go on."""
    found, before = kept.latest(ExplainListRequest(limit=limit, **query))
    return [one.ts_ms for one in found], before


def test_what_is_kept_comes_back_as_it_was() -> None:
    kept = filled(3)
    assert kept.find(explanation(2).request) == [explanation(2)]
    assert kept.find("another") == []
    assert kept.oldest_ms() == 0
    kept.check()


def test_the_oldest_goes_and_is_found_no_more() -> None:
    kept = filled(7, count_max=4)
    assert len(kept) == 4
    assert [bool(kept.find(explanation(n).request)) for n in range(7)] == [False] * 3 + [True] * 4
    assert latest(kept, 10) == ([6, 5, 4, 3], 0)
    assert kept.oldest_ms() == 3
    kept.check()


def test_a_request_that_asks_again_has_several_lookups() -> None:
    """The newest first; those that have gone are gone; the list has a limit."""
    kept = ExplanationRing(100)
    for number in range(90):
        kept.add(explanation(number, request="r"))
    found = [one.ts_ms for one in kept.find("r")]
    assert found == list(range(89, 89 - LOOKUPS_MAX, -1))
    for number in range(90, 180):
        kept.add(explanation(number))
    assert [one.ts_ms for one in kept.find("r")] == list(range(89, 79, -1))
    kept.check()


def test_filters_and_going_on() -> None:
    kept = ExplanationRing(100)
    for number in range(20):
        kept.add(explanation(number, engine=("ada", "ben")[number % 3 == 0]))
    assert latest(kept, 3, reason="evicted") == ([18, 16, 14], 14)
    assert latest(kept, 3, reason="evicted", before=14) == ([12, 8, 6], 6)
    assert latest(kept, 9, reason="evicted", before=6) == ([4, 2], 0)
    assert latest(kept, 9, missed=True, engine="ben") == ([18, 12, 9, 6, 3], 0)
    assert latest(kept, 2, engine="nobody") == ([], 0)


def test_an_outcome_is_added_to_the_newest_lookup() -> None:
    kept = filled(3)
    assert kept.amend(explanation(1).request, "ada", "corrupt", 2)
    [found] = kept.find(explanation(1).request)
    assert (found.outcome, found.lost_blocks) == ("corrupt", 2)
    assert not kept.amend(explanation(1).request, "ben", "corrupt", 2)
    assert not kept.amend("another", "ada", "corrupt", 2)


def test_explanations_that_are_large_take_no_more_than_is_declared() -> None:
    """Goal: long names and many segments; the oldest go sooner, and the newest is kept."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept = ExplanationRing(1_000)
    for number in range(1_000):
        kept.add(large(number))
        assert kept.amend(large(number).request, "ada", f"outcome {number}", 1)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size - before < 1_000 * ENTRY_BYTES
    assert 100 < len(kept) < 1_000
    assert kept.usage(0)[:3] == (len(kept), 1_000, 1_000 - len(kept))
    [newest] = kept.find(large(999).request)
    assert (newest.outcome, newest.segments) == ("outcome 999", large(999).segments)
    assert kept.find(large(0).request) == []
    kept.check()
    for number in range(1_000):
        kept.add(explanation(number))
    assert len(kept) == 1_000
    kept.check()


def large(number: int) -> Explanation:
    """One with the longest name and the most segments, all different."""
    segments = [
        Segment(blocks=1, tier="disk", reason="not_written", hash=f"{number:032x}", at_ms=number,
                detail=f"the write waits; left host memory by policy {place}")
        for place in range(24)
    ]  # fmt: skip
    return Explanation(
        request=f"{number:256}", engine="ada", ts_ms=number, blocks=24, hit_blocks=0,
        reason="not_written", segments=segments, trace=f"{number:032x}",
    )  # fmt: skip


WORDS = st.sampled_from(["", "host", "lru", "evicted", "ab" * 16, "AB" * 16, "g" * 32]) | st.text()
SEGMENTS = st.builds(
    Segment,
    blocks=st.integers(0, 2**40),
    tier=st.sampled_from(["", "device", "host", "disk", "object", "remote"]),
    reason=WORDS,
    hash=WORDS,
    policy=WORDS,
    at_ms=st.integers(0, 2**53),
    detail=WORDS,
)


@given(
    st.builds(
        Explanation,
        request=WORDS,
        engine=WORDS,
        ts_ms=st.integers(0, 2**53),
        blocks=st.just(9),
        hit_blocks=st.integers(0, 9),
        reason=WORDS,
        segments=st.lists(SEGMENTS, max_size=3),
        outcome=WORDS,
        lost_blocks=st.integers(0, 2**40),
        trace=WORDS,
    )
)
def test_whatever_is_packed_comes_back(one: Explanation) -> None:
    kept = ExplanationRing(2)
    kept.add(one)
    assert kept.find(one.request) == [one]


def test_a_question_ends_where_a_bucket_is_crowded() -> None:
    """Goal: ids that were chosen to fall into one bucket hold the tier for a moment at most."""
    kept = ExplanationRing(2 * BUCKET_MAX)
    buckets = defaultdict[int, list[str]](list)
    while len(alike := buckets[crc32(b"0") % (4 * BUCKET_MAX)]) < 2:
        for number in range(10 * BUCKET_MAX):
            buckets[crc32(str(number).encode()) % (4 * BUCKET_MAX)].append(str(number))
    rare, crowd = alike[:2]
    kept.add(explanation(0, request=rare))
    for number in range(1, BUCKET_MAX):
        kept.add(explanation(number, request=crowd))
    assert [one.ts_ms for one in kept.find(rare)] == [0]
    kept.add(explanation(BUCKET_MAX, request=crowd))
    assert kept.find(rare) == []
    assert not kept.amend(rare, "ada", "corrupt", 1)
    assert kept.find(crowd)[0].ts_ms == BUCKET_MAX


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "evicted"])), max_size=40),
)
def test_it_is_a_list_that_forgets(count_max: int, asked: list[tuple[str, str]]) -> None:
    """Whatever comes in which order: the same as the last so many of a list."""
    kept = ExplanationRing(count_max)
    for number, (request, reason) in enumerate(asked):
        segments = [Segment(blocks=1, reason=reason)]
        kept.add(
            Explanation(request=request, engine="e", ts_ms=number, blocks=1, hit_blocks=0,
                        reason=reason, segments=segments)
        )  # fmt: skip
        kept.check()
    last = list(enumerate(asked))[-count_max:]
    assert latest(kept, 100)[0] == [number for number, _ in reversed(last)]
    for name in "abcd":
        expected = [number for number, (request, _) in reversed(last) if request == name]
        assert [one.ts_ms for one in kept.find(name)] == expected
    expected = [number for number, (_, reason) in reversed(last) if reason]
    assert latest(kept, 100, missed=True)[0] == expected


def test_a_hundred_thousand_are_searched_in_time_and_take_little() -> None:
    """By id, by a reason that many have, and by an engine that nobody has: all of them are seen."""
    tracemalloc.start()
    few = filled(KEPT // 10, count_max=KEPT // 10)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(few) < 200
    started_s = perf_counter()
    kept = filled(KEPT)
    filled_s = perf_counter() - started_s
    started_s = perf_counter()
    assert kept.find(explanation(KEPT // 2).request)
    assert len(latest(kept, 100, reason="evicted")[0]) == 100
    assert latest(kept, 100, reason="corrupt") == ([], 0)
    assert latest(kept, 100, engine="nobody") == ([], 0)
    found_s = perf_counter() - started_s
    assert found_s < filled_s / 5, "a twentieth on a quiet machine"
