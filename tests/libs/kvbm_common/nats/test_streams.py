"""What a stream keeps: an operator's limits over our own, and how far back it reaches."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from kvbm_common.nats.jetstream import StreamInfo, StreamSizes, StreamState
from kvbm_common.nats.streams import (
    AS_THEY_COME,
    AUDIT,
    CONSOLIDATED,
    EVENTS,
    IMAGES,
    STREAMS,
    StreamLimits,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_without_a_word_streams_are_as_they_come() -> None:
    assert [AS_THEY_COME.fit(spec) for spec in STREAMS] == list(STREAMS)
    assert [AS_THEY_COME.set_for(spec) for spec in STREAMS] == [()] * len(STREAMS)


def test_each_limit_is_for_the_streams_that_it_names() -> None:
    limits = StreamLimits(replicas=3, events_gb=4, duplicate_window_s=10, images_gb=2)
    assert {limits.fit(spec).replicas for spec in STREAMS} == {3}
    events, consolidated = limits.fit(EVENTS), limits.fit(CONSOLIDATED)
    assert (events.bytes_max, consolidated.bytes_max) == (4_000_000_000, 2_000_000_000)
    assert events.duplicate_window_s == consolidated.duplicate_window_s == 10
    assert limits.fit(IMAGES).bytes_max == 2_000_000_000
    assert limits.fit(AUDIT).bytes_max == AUDIT.bytes_max
    assert limits.set_for(EVENTS) == ("duplicate_window", "max_bytes", "num_replicas")
    assert limits.set_for(AUDIT) == ("num_replicas",)
    assert limits.store_bytes > 8_000_000_000


def test_what_is_said_later_leaves_the_rest() -> None:
    before = StreamLimits(events_gb=20, replicas=3)
    after = before.with_more(StreamLimits(duplicate_window_s=10))
    assert after == StreamLimits(events_gb=20, replicas=3, duplicate_window_s=10)
    assert after.with_more(AS_THEY_COME) == after


def test_a_short_age_shortens_the_memory_for_duplicates() -> None:
    """The server refuses a stream that knows duplicates for longer than it keeps them."""
    limits = StreamLimits(events_age_s=60)
    assert limits.fit(EVENTS).as_config()["duplicate_window"] == 60 * 10**9
    assert limits.set_for(EVENTS) == ("duplicate_window", "max_age")


@pytest.mark.parametrize(
    ("held", "most", "age_s", "horizon_s"),
    [
        (10, 100, 3600, math.inf),
        (10, 100, 310, 310),
        (95, 100, 3600, 300),
        (95, 100, 310, 300),
        (95, -1, 3600, math.inf),
        (95, -1, 310, 310),
        (10, 100, 0, math.inf),
    ],
)
def test_the_horizon_is_the_oldest_message_where_size_ends_messages(
    held: int, most: int, age_s: int, horizon_s: float
) -> None:
    state = StreamState(1, 9, bytes=held, first_ts=NOW - timedelta(seconds=300))
    sizes = StreamSizes(max_bytes=most, max_age=age_s * 10**9)
    assert StreamInfo(NOW, state, sizes).horizon_s(NOW) == horizon_s


def test_a_stream_that_never_held_a_message_has_forgotten_nothing() -> None:
    """NATS dates the first message of an empty stream to the year 1."""
    state = StreamState(1, 0, first_ts=datetime(1, 1, 1, tzinfo=UTC))
    sizes = StreamSizes(max_bytes=100, max_age=6 * 3600 * 10**9)
    assert StreamInfo(NOW, state, sizes).horizon_s(NOW) == math.inf


def test_the_horizon_does_not_jump_when_the_size_begins_to_end_messages() -> None:
    """Goal: no false alert by slope. A steady source fills the stream in three of its six hours."""
    sizes, found = StreamSizes(max_bytes=10_800, max_age=6 * 3600 * 10**9), []
    for age_s in range(0, 6 * 3600, 60):
        held = min(age_s, 10_800)
        state = StreamState(1, 9, bytes=held, first_ts=NOW - timedelta(seconds=held))
        found.append(StreamInfo(NOW, state, sizes).horizon_s(NOW))
    known = [horizon_s for horizon_s in found if horizon_s < math.inf]
    assert known == sorted(known)
    assert known[-1] == 10_800
