"""Events that are read and applied together: the index knows what it would know one by one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import IdentityError, packed_from_hex
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import (
    SUBJECT_PREFIX,
    Event,
    Removed,
    Run,
    Stored,
    event_codec,
    event_subject,
)
from kvbm_common.wire.packed_events import Packable, can_pack, events_on, pack, packed_subject
from kvbm_index.core import event_batch, event_decoder
from kvbm_index.core.core import IndexCore
from kvbm_index.core.event_decoder import DecodedRemoved, DecodedStored
from kvbm_index.core.messages import EventsReceived, Received, RequestSnapshot

from tests.services.index.core.test_core import KEY, NAMESPACE, block, cleared, removed, stored

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

    def _apply_together(self, events: list[Received], now_ms: int) -> bool:
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


@st.composite
def packings(draw: st.DrawFn, messages: list[EventMessage]) -> list[EventMessage]:
    """The same messages, of which some that follow each other in one source are packed."""
    found, waiting = list[EventMessage](), list[Packable]()

    def end() -> None:
        if waiting:
            subject = packed_subject(SUBJECT_PREFIX, waiting[0])
            found.append(EventMessage(subject, pack(waiting), len(found) + 1))
            waiting.clear()

    for message in messages:
        event = whole(message)
        if waiting and (event is None or place(event) != place(waiting[-1], 1)):
            end()
        if event is not None and can_pack(event) and draw(st.sampled_from([True] * 4 + [False])):
            waiting.append(event)
        else:
            end()
            found.append(message)
    end()
    return found


def whole(message: EventMessage) -> Event | None:
    """The event of a message that can be read, hashes included."""
    try:
        (event,) = events_on(message.subject, message.payload)
        hashes = event.hashes if isinstance(event, Removed) else []
        runs = event.runs if isinstance(event, Stored) else []
        packed_from_hex([*hashes, *(name for run in runs for name in [run.parent, *run.hashes])])
    except (WireError, IdentityError):
        return None
    return event


def place(event: Event | Packable, behind: int = 0) -> tuple[str, int, int]:
    """Where an event is in its source, or the one after it."""
    return event.source, event.epoch, event.seq + behind


@settings(max_examples=400, deadline=None)
@given(histories(), st.data())
def test_packed_or_not_the_index_knows_the_same(
    messages: list[EventMessage], data: st.DataObject
) -> None:
    """Goal: old and new publishers side by side: duplicates, holes, lives and odd events included.

    Some events are packed; they are applied together where all is in order. JSON is applied one by
    one.
    """
    packed = data.draw(packings(messages))
    cores, counts = [IndexCore(), OneByOne()], [0, 0]
    for number, (core, read) in enumerate(zip(cores, (packed, messages), strict=True)):

        def refuse(_: EventMessage, error: WireError, number: int = number) -> None:
            counts[number] += 1
            assert error.kind

        events = event_batch.read(read, refuse)
        core.step(EventsReceived(tuple(events)), 7)
        core.check()
    seen(f"messages less: {len(messages) - len(packed)}")
    assert counts[0] == counts[1]
    assert cores[0].dump() == cores[1].dump()
    assert cores[0].statistics() == cores[1].statistics()
    assert cores[0].positions() == cores[1].positions()
    assert cores[0].behind() == cores[1].behind()


@pytest.mark.parametrize("first", [0, 3])
def test_packed_run_from_the_root_is_listed_as_such(first: int) -> None:
    """Goal: a first block is found without a look at every holder, as of an event of JSON."""
    said = [stored(2, first), stored(3, first + 1)]
    found = []
    for messages in (
        [EventMessage(packed_subject(SUBJECT_PREFIX, said[0]), pack(said), 2)],
        [EventMessage(event_subject(one), event_codec.encode(one), one.seq) for one in said],
    ):
        begin = cleared(1)
        whole = [EventMessage(event_subject(begin), event_codec.encode(begin), 1), *messages]
        core = IndexCore()
        events = event_batch.read(whole, lambda *_: pytest.fail("refused"))
        core.step(EventsReceived(tuple(events), 3, "s"), 7)
        (holder,) = core.image().holders
        found.append([(segment.rooted, segment.blocks) for segment in holder.segments])
    assert found[0] == found[1]
    assert found[0][0][0] is (first == 0)


def test_broken_packed_message_is_refused_whole() -> None:
    """Goal: of a message with a good part and a broken one nothing is applied, and the source is
    asked for a snapshot once the next event shows the hole."""
    good = pack([stored(2, 0), removed(3, 0)])
    broken = good[:-1]
    subject = packed_subject(SUBJECT_PREFIX, stored(2, 0))
    first, after = cleared(1), stored(4, 5)
    refused: list[str] = []
    messages = [
        EventMessage(event_subject(first), event_codec.encode(first), 1),
        EventMessage(subject, broken, 2),
        EventMessage(subject, pack([after]), 3),
    ]
    events = event_batch.read(messages, lambda _, error: refused.append(error.kind))
    core = IndexCore()
    asked = core.step(EventsReceived(tuple(events), 3, "s"), 7)
    assert refused == ["malformed"]
    assert asked == [RequestSnapshot(KEY)]
    assert not core.dump().holders


def read(*events: Event) -> list[event_decoder.DecodedEvent]:
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


def test_two_events_of_a_namespace_that_is_no_hex_are_refused() -> None:
    """Goal: neighbours of one source are read together; a source that is wrong ends no index."""
    bad = [msgspec.structs.replace(stored(seq, seq), namespace="x" * 64) for seq in (2, 3)]
    core = IndexCore()
    events = read(cleared(1), *bad)
    asked = core.step(EventsReceived(tuple(events), 3, "s"), 7)
    assert asked == [RequestSnapshot(KEY)]
    assert core.statistics().drops["malformed"] == 1


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
