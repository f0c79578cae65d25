"""Described streams: what an engine says of its streams, and what the consolidator confirms."""

from __future__ import annotations

import pytest
from kvbm_common.identity import Namespace
from kvbm_common.wire.consolidator import Attach
from kvbm_connectors.client.described_streams import DescribedStreams

NAMESPACE = Namespace(model="m", block_tokens=16)
NEW = "0123456789abcdef"


def stream(rank: int, endpoint: str) -> Attach:
    """A stream of one engine."""
    return Attach(engine="e", incarnation=NEW, endpoint=endpoint, rank=rank, namespace=NAMESPACE)


def test_a_description_changes_what_is_said_in_every_stream() -> None:
    streams = DescribedStreams([stream(0, "ipc://a"), stream(1, "ipc://b")])
    streams.describe(generation=NEW, passes_through=None)
    assert [(streams[rank].generation, streams[rank].passes_through) for rank in (0, 1)] == [
        (NEW, ""), (NEW, ""),
    ]  # fmt: skip


def test_a_generation_is_waited_for_where_there_are_events() -> None:
    """1. Rank 1 has no events. 2. Rank 0's generation is not taken in. 3. It is."""
    streams = DescribedStreams([stream(0, "ipc://a"), stream(1, "")])
    streams.describe(generation=NEW)
    assert not streams.wait_taken(0)
    streams.taken(1, NEW)
    assert not streams.wait_taken(0)
    streams.taken(0, NEW)
    assert streams.wait_taken(0)


@pytest.mark.parametrize("endpoint", ["", "ipc://a"])
def test_streams_know_whether_they_have_events(endpoint: str) -> None:
    assert DescribedStreams([stream(0, endpoint)]).has_events is bool(endpoint)
