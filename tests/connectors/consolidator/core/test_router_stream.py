"""What the router streams keep of engines that have come and gone."""

from __future__ import annotations

from kvbm_common.wire.engine_events import AllBlocksCleared, decode_batch
from kvbm_common.wire.events import Cleared
from kvbm_connectors.consolidator.core.ended_engines import ENDED_MAX, ENDED_MS
from kvbm_connectors.consolidator.core.router_stream import RouterStreams
from kvbm_connectors.consolidator.core.token_names import TokenNames


def come_and_go(streams: RouterStreams, name: str, now_ms: int) -> int:
    """Have an engine of one rank come and go; returns the number of its last batch."""
    streams.engine_known(name, [0])
    cleared = Cleared(host="h", source=name, tier="device", epoch=1, seq=1, ts_ms=0, reason="x")
    streams.take_event(cleared)
    streams.engine_left(name, now_ms)
    streams.take_event(cleared)
    streams.forget_ended(now_ms)
    streams.check()
    return streams.take()[-1].seq


def test_engines_that_left_are_bounded() -> None:
    streams = RouterStreams(TokenNames())
    for number in range(ENDED_MAX + 10):
        come_and_go(streams, f"engine-{number}", number)
    engines = {frame.stream.engine for frame in streams.replay(0, 0)}
    assert engines == {f"engine-{number}" for number in range(10, ENDED_MAX + 10)}


def test_engines_that_left_are_forgotten_after_a_while() -> None:
    streams = RouterStreams(TokenNames())
    come_and_go(streams, "engine", 0)
    streams.forget_ended(ENDED_MS - 1)
    [frame] = streams.replay(0, 0)
    assert decode_batch(frame.payload).events == (AllBlocksCleared(),)
    streams.forget_ended(ENDED_MS)
    assert streams.replay(0, 0) == []


def test_numbers_of_a_forgotten_engine_are_not_used_again() -> None:
    streams = RouterStreams(TokenNames())
    last = come_and_go(streams, "engine", 0)
    streams.forget_ended(ENDED_MS)
    assert come_and_go(streams, "engine", ENDED_MS) > last + 1


def test_an_engine_that_is_back_keeps_its_stream() -> None:
    streams = RouterStreams(TokenNames())
    come_and_go(streams, "engine", 0)
    streams.engine_known("engine", [0])
    streams.forget_ended(2 * ENDED_MS)
    assert [frame.stream.engine for frame in streams.replay(0, 0)] == ["engine"]
