"""Events that are read and applied together: the index knows what it would know one by one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import Event, Run, Stored, event_codec, event_subject
from kvbm_index.core import event_batch, event_decoder
from kvbm_index.core.core import IndexCore
from kvbm_index.core.event_decoder import DecodedRemoved, DecodedStored
from kvbm_index.core.messages import AnyEvent, EventsReceived

from tests.services.index.core.test_core import NAMESPACE, block, cleared, removed, stored

OTHER_NAMESPACE = "1" * 64
RUN = st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True).map(sorted)
KIND = st.sampled_from(["stored"] * 8 + ["removed"] * 6 + ["cleared", "rank cleared"])
STEP = st.sampled_from([1] * 30 + [0, 2])
"""How far seq goes: sometimes an event comes twice, or is missing."""
ODD = st.sampled_from([b""] * 60 + [b"no JSON", b'{"kind":"stored"}', b"g" * 32, b"0" * 30])
"""Replaces a payload, or a name in it."""


@st.composite
def histories(draw: st.DrawFn) -> list[EventMessage]:
    """What two sources say, in batches of neighbours."""
    seqs, messages = Counter[str](), list[EventMessage]()
    for _ in range(draw(st.integers(1, 6))):
        source, rank = draw(st.sampled_from("st")), draw(st.sampled_from([0, 0, 0, 1]))
        kind, epoch = draw(KIND), draw(st.sampled_from([1] * 20 + [2]))
        namespace = draw(st.sampled_from([NAMESPACE] * 5 + [OTHER_NAMESPACE]))
        for _ in range(draw(st.integers(1, 5))):
            seqs[source] += draw(STEP)
            seq, numbers = max(1, seqs[source]), draw(RUN)
            said: Event
            if kind == "stored":
                said = stored(seq, *numbers, epoch=epoch, source=source, rank=rank)
                said = msgspec.structs.replace(said, namespace=namespace)
            elif kind == "removed":
                said = removed(seq, *reversed(numbers), epoch=epoch, source=source, rank=rank)
            else:
                said = cleared(
                    seq, epoch=epoch, source=source, rank=rank, rank_only=kind != "cleared"
                )
            payload, odd = event_codec.encode(said), draw(ODD)
            if odd:
                name = block(numbers[0]).hex().encode()
                payload = payload.replace(name, odd) if len(odd) > 20 else odd
            messages.append(EventMessage(event_subject(said), payload, len(messages) + 1))
    return messages


class OneByOne(IndexCore):
    """Applies each event for itself."""

    def _apply_together(self, events: list[AnyEvent], now_ms: int) -> bool:
        return False


@settings(max_examples=600, deadline=None)
@given(histories())
def test_together_and_one_by_one_the_index_knows_the_same(messages: list[EventMessage]) -> None:
    refused: list[list[EventMessage]] = [[], []]
    cores = [IndexCore(), OneByOne()]

    events = event_batch.read(messages, lambda message, _: refused[0].append(message))
    cores[0].step(EventsReceived(tuple(events)), 7)
    cores[0].check()

    events = []
    for message in messages:
        try:
            events.append(event_decoder.read(message.subject, message.payload))
        except WireError:
            refused[1].append(message)
    cores[1].step(EventsReceived(tuple(events)), 7)

    seen(f"something is held: {bool(cores[0].dump().holders)}")
    assert refused[0] == refused[1]
    assert cores[0].dump() == cores[1].dump()
    assert cores[0].statistics() == cores[1].statistics()
    assert cores[0].positions() == cores[1].positions()
    assert cores[0].behind() == cores[1].behind()
    assert [cores[0].story(block(n)) for n in range(4)] == [
        cores[1].story(block(n)) for n in range(4)
    ]


def read(*events: Event) -> list[event_decoder.LeanEvent]:
    """As they come from the stream."""
    return [event_decoder.read(event_subject(one), event_codec.encode(one)) for one in events]


def stored_by(*events: Stored) -> list[tuple[int, int]] | None:
    """Parent and number of blocks of each run."""
    lean_events = [one for one in read(*events) if isinstance(one, DecodedStored)]
    found = event_batch.stored_by(lean_events)
    if found is None:
        return None
    return [(int.from_bytes(run[0], "big") - 1, len(run[1]) // 16) for run in found]


def test_what_continues_its_neighbour_is_one_run() -> None:
    assert stored_by(stored(1, 0), stored(2, 1), stored(3, 2, 3)) == [(-1, 4)]
    assert stored_by(stored(1, 0), stored(2, 1), stored(3, 5), stored(4, 6)) == [(-1, 2), (4, 2)]
    assert stored_by(stored(1, 3), stored(2, 2)) == [(2, 1), (1, 1)]


@pytest.mark.parametrize(
    "odd",
    [
        stored(2, 1, 5),
        stored(2),
        msgspec.structs.replace(stored(2, 1), namespace=OTHER_NAMESPACE),
        msgspec.structs.replace(stored(2), runs=[Run(parent="g" * 32, hashes=[block(1).hex()])]),
        msgspec.structs.replace(stored(2), runs=[Run(parent=block(0).hex(), hashes=["g" * 32])]),
        msgspec.structs.replace(stored(2), runs=[Run(parent=block(0).hex(), hashes=[])]),
    ],
    ids=["two runs", "no run", "another namespace", "a parent that is none", "no name", "no block"],
)
def test_what_is_odd_is_read_one_by_one(odd: Stored) -> None:
    assert stored_by(stored(1, 0), odd, stored(3, 7)) is None


def test_runs_of_one_length_but_another_form_are_read_one_by_one() -> None:
    """1. Twice as it is written. 2. The second one's fields the other way round: as long."""
    texts = [event_codec.encode(stored(seq, seq - 1, seq)) for seq in (1, 3)]
    parent, hashes = (f'"{name}":{value}'.encode() for name, value in _fields(texts[1]))
    turned = texts[1].replace(parent + b"," + hashes, hashes + b"," + parent)
    assert len(turned) == len(texts[1])
    assert turned != texts[1]
    subject = event_subject(stored(1, 0))
    for second, together_too in ((texts[1], True), (turned, False)):
        events = [event_decoder.read(subject, text) for text in (texts[0], second)]
        found = event_batch.stored_by([one for one in events if isinstance(one, DecodedStored)])
        assert (found is not None) == together_too


def _fields(text: bytes) -> list[tuple[str, str]]:
    (run,) = msgspec.json.decode(text)["runs"]
    return [(name, msgspec.json.encode(run[name]).decode()) for name in ("parent", "hashes")]


def test_blocks_that_are_gone_are_gone_at_once() -> None:
    events = [
        one for one in read(removed(1, 2), removed(2, 0, 1)) if isinstance(one, DecodedRemoved)
    ]
    assert event_batch.removed_by(events) == block(0) + block(1) + block(2)
    nothing = [one for one in read(removed(1, 2), removed(2)) if isinstance(one, DecodedRemoved)]
    assert event_batch.removed_by(nothing) is None


@pytest.mark.parametrize("odd", [b'{"kind":"stored","x":' + b"[" * 100_000, b'{"host":"\xff"}'])
def test_bytes_that_no_decoder_reads_hold_up_no_neighbour(odd: bytes) -> None:
    """Deeper than any decoder goes, or no text: refused alone, beside others of its source."""
    good = stored(2, 1)
    refused: list[EventMessage] = []
    messages = [
        EventMessage(event_subject(good), payload, number)
        for number, payload in enumerate([event_codec.encode(good), odd], 1)
    ]
    events = event_batch.read(messages, lambda message, _: refused.append(message))
    assert [event.seq for event in events] == [2]
    assert refused == messages[1:]


def test_a_message_that_has_two_events_in_it_is_none() -> None:
    """1. Two messages, the text of both is two events. 2. Only the first has them. 3. Neither is
    taken for an event."""
    payloads = [event_codec.encode(stored(seq, seq)) for seq in (1, 2)]
    subject = event_subject(stored(1, 1))
    messages = [EventMessage(subject, b",".join(payloads), 1), EventMessage(subject, b"", 2)]
    refused: list[EventMessage] = []
    assert event_batch.read(messages, lambda message, _: refused.append(message)) == []
    assert refused == messages
