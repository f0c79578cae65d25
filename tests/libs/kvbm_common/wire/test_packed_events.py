"""Packed events say what the same events say in JSON; a broken message says nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import HASH_BYTES, hash_from_hex, hashes_from_hex
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, WireError
from kvbm_common.wire.events import (
    CONSOLIDATED_PREFIX,
    SUBJECT_PREFIX,
    Cleared,
    Event,
    Removed,
    Run,
    Stored,
    event_codec,
    event_subject,
)
from kvbm_common.wire.packed_events import (
    PackedEvents,
    PackedRun,
    StoredPart,
    block_count,
    can_pack,
    events_on,
    pack,
    packed_subject,
    runs_of_events,
)
from kvbm_common.wire.raw_events import RawRemoved, RawStored, as_json

Said = Stored | Removed

NAMESPACE = "ab" * 32
NUMBERS = st.integers(0, 20)
NAMES = st.lists(NUMBERS, min_size=1, max_size=4).map(lambda many: [f"{n:032x}" for n in many])
RUN = st.builds(Run, parent=NUMBERS.map(lambda n: f"{n:032x}"), hashes=NAMES)
HEAD = st.fixed_dictionaries(
    {
        "tier": st.sampled_from(["host"] * 4 + ["device", "disk", "object"]),
        "ts_ms": st.sampled_from([5] * 4 + [0, 2**63 - 1]),
        "rank": st.sampled_from([0] * 4 + [3]),
        "group": st.sampled_from([0] * 4 + [1]),
        "namespace": st.sampled_from([NAMESPACE] * 4 + ["01" * 32]),
    }
)


@st.composite
def said(draw: st.DrawFn) -> list[Said]:
    """What a source says one after the other; runs often continue those of the event before."""
    events: list[Said] = []
    epoch, first = draw(st.sampled_from([0, 7, 2**63 - 1])), draw(st.sampled_from([1, 500]))
    tail = ""
    for seq in range(first, first + draw(st.integers(1, 8))):
        head: dict[str, Any] = draw(HEAD) | {
            "host": "h", "source": "host-tier-0", "epoch": epoch, "seq": seq,
        }  # fmt: skip
        if draw(st.booleans()):
            runs = draw(st.lists(RUN, min_size=1, max_size=3))
            if tail and draw(st.booleans()):
                runs[0] = msgspec.structs.replace(runs[0], parent=tail)
            tail = runs[-1].hashes[-1]
            events.append(Stored(**head, runs=runs, block_bytes=draw(st.sampled_from([0, 0, 9]))))
        else:
            reason = draw(st.sampled_from(["evicted", "evicted", "", "corrupt"]))
            events.append(Removed(**head, hashes=draw(NAMES), reason=reason))
    return events


def in_json(events: list[Said]) -> list[Event]:
    """As readers have them from messages of one event each."""
    return [one for event in events for one in events_on(event_subject(event), encoded(event))]


def events_or_error(subject: str, payload: bytes) -> list[Event] | WireError:
    """Return what a reader has of a message."""
    try:
        return events_on(subject, payload)
    except WireError as error:
        return error


def encoded(event: Event) -> bytes:
    """Return an event as JSON."""
    return event_codec.encode(event)


@settings(max_examples=200, deadline=None)
@given(said())
def test_packed_events_are_those_of_json(events: list[Said]) -> None:
    """Goal: a reader learns the same from both forms, event for event."""
    assert all(map(can_pack, events))
    payload = pack(events)
    for prefix in (SUBJECT_PREFIX, CONSOLIDATED_PREFIX):
        found = events_on(packed_subject(prefix, events[0]), payload, prefix=prefix)
        assert found == in_json(events) == events
    message = msgspec.msgpack.decode(payload)
    runs = sum(len(part.get("runs", ())) for part in message["parts"])
    seen(f"runs were joined: {runs < sum(len(e.runs) for e in events if isinstance(e, Stored))}")
    seen(f"parts: {min(3, len(message['parts']))}")


def raw_of(event: Said) -> RawStored | RawRemoved:
    """Return an event as its source has it in memory."""
    fields: dict[str, Any] = msgspec.structs.asdict(event)
    del fields["v"]
    if isinstance(event, Removed):
        return RawRemoved(**fields | {"hashes": hashes_from_hex(event.hashes)})
    runs = [(hash_from_hex(run.parent), hashes_from_hex(run.hashes)) for run in event.runs]
    return RawStored(**fields | {"runs": runs})


@settings(max_examples=200, deadline=None)
@given(said())
def test_raw_events_leave_as_the_same_bytes(events: list[Said]) -> None:
    """Goal: readers cannot tell in which form a source had its events, packed or as JSON."""
    raw = [raw_of(event) for event in events]
    assert all(map(can_pack, raw))
    assert list(map(block_count, raw)) == list(map(block_count, events))
    assert pack(raw) == pack(events)
    assert [as_json(event) for event in raw] == events
    assert [raw_of(event) for event in events] == raw, "events are as before they were packed"


@settings(max_examples=100, deadline=None)
@given(said(), st.data())
def test_cut_message_is_refused(events: list[Said], data: st.DataObject) -> None:
    """Goal: a truncated message is a typed error, and no event of it is returned."""
    payload = pack(events)
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    with pytest.raises(WireError) as refused:
        events_on(packed_subject(SUBJECT_PREFIX, events[0]), cut)
    assert refused.value.kind == "malformed"


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(said(), st.data())
def test_changed_message_is_refused_or_is_whole(events: list[Said], data: st.DataObject) -> None:
    """Goal: whatever a stranger changes, what is returned are valid events, or a typed error."""
    payload = bytearray(pack(events))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    found = events_or_error(packed_subject(SUBJECT_PREFIX, events[0]), bytes(payload))
    seen(f"refused: {isinstance(found, WireError)}")
    if isinstance(found, WireError):
        assert found.kind in ("malformed", "version")
        return
    assert [one.seq for one in found] == list(range(found[0].seq, found[0].seq + len(found)))
    for one in found:
        assert isinstance(one, Stored | Removed)
        assert event_codec.decode(encoded(one)) == one
        assert block_count(one) > 0


STORED: dict[str, Any] = {
    "kind": "stored", "tier": "host", "ts_ms": 1, "namespace": bytes(32), "sizes": [2],
    "runs": [{"parent": bytes(16), "hashes": bytes(32)}],
}  # fmt: skip
REMOVED: dict[str, Any] = {
    "kind": "removed", "tier": "host", "ts_ms": 1, "namespace": bytes(32), "sizes": [1, 1],
    "hashes": bytes(32),
}  # fmt: skip
GOOD: dict[str, Any] = {"v": 1, "epoch": 3, "seq": 5, "parts": [STORED, REMOVED]}
SUBJECT = f"{SUBJECT_PREFIX}.h.host-tier-0.packed"


def test_message_of_another_implementation_is_read() -> None:
    found = events_on(SUBJECT, msgspec.msgpack.encode(GOOD | {"new": 1}))
    assert [(type(one), one.seq) for one in found] == [(Stored, 5), (Removed, 6), (Removed, 7)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parts": []}, "parts"),
        ({"seq": 0}, "seq"),
        ({"seq": 2**63 - 3}, "seq"),
        ({"epoch": -1}, "epoch"),
        ({"v": 2}, "v"),
        ({"parts": [STORED | {"sizes": [1]}]}, "sizes"),
        ({"parts": [STORED | {"sizes": [2, 0]}]}, "parts"),
        ({"parts": [STORED | {"sizes": []}]}, "parts"),
        ({"parts": [STORED | {"runs": []}]}, "parts"),
        ({"parts": [STORED | {"sizes": [2**63 - 1, 1]}]}, "sizes"),
        ({"parts": [STORED | {"runs": [{"parent": bytes(15), "hashes": bytes(32)}]}]}, "parts"),
        ({"parts": [STORED | {"runs": [{"parent": bytes(16), "hashes": bytes(33)}]}]}, "hashes"),
        ({"parts": [STORED, STORED | {"namespace": bytes(31)}]}, "parts"),
        ({"parts": [STORED, REMOVED | {"hashes": bytes(31)}]}, "hashes"),
        ({"parts": [STORED, REMOVED | {"hashes": b""}]}, "hashes"),
        ({"parts": [STORED, REMOVED | {"hashes": bytes(48)}]}, "sizes"),
        ({"parts": [STORED, {"kind": "cleared", "tier": "host", "ts_ms": 1}]}, "parts"),
        ({"parts": [STORED | {"tier": "tape"}]}, "parts"),
    ],
)  # fmt: skip
def test_message_that_contradicts_itself_names_the_field(
    change: dict[str, Any], field: str
) -> None:
    """Goal: nothing of a message is returned where a part of it is wrong."""
    with pytest.raises(WireError) as refused:
        events_on(SUBJECT, msgspec.msgpack.encode(GOOD | change))
    assert refused.value.field == field
    assert refused.value.kind == ("version" if field == "v" else "malformed")


@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        ("h.packed", "wrong_subject"),
        ("kvbm.v1.events.h.a b.packed", "wrong_subject"),
        ("kvbm.v1.consolidated.h.host-tier-0.packed", "malformed"),
        ("kvbm.v1.events.h.host-tier-0.stored", "malformed"),
    ],
)
def test_message_on_a_subject_of_other_messages_is_refused(subject: str, kind: str) -> None:
    with pytest.raises(WireError) as refused:
        events_on(subject, msgspec.msgpack.encode(GOOD))
    assert refused.value.kind == kind


def test_json_on_another_subject_is_refused() -> None:
    one = Cleared(host="h", source="s", tier="host", epoch=1, seq=1, ts_ms=0)
    for subject in ("kvbm.v1.events.h.t.cleared", "kvbm.v1.events.h.s.stored"):
        with pytest.raises(WireError) as refused:
            events_on(subject, encoded(one))
        assert refused.value.kind == "wrong_subject"


def test_oversized_message_is_refused() -> None:
    with pytest.raises(WireError) as refused:
        events_on(SUBJECT, bytes(MESSAGE_BYTES_MAX + 1))
    assert refused.value.kind == "oversized"


def test_event_without_blocks_has_no_packed_form() -> None:
    head: dict[str, Any] = {
        "host": "h", "source": "s", "tier": "host", "epoch": 1, "seq": 1, "ts_ms": 0,
    }  # fmt: skip
    empty = Run(parent="0" * 32, hashes=[])
    for event in (
        Cleared(**head),
        Stored(**head, namespace=NAMESPACE, runs=[]),
        Stored(**head, namespace=NAMESPACE, runs=[empty]),
        Removed(**head, namespace=NAMESPACE, hashes=[]),
    ):
        assert not can_pack(event)


def test_single_blocks_that_follow_each_other_cost_little() -> None:
    """Goal: an event of one block takes its hash and a size, not an envelope."""
    names = [f"{n:032x}" for n in range(1, 101)]
    events: list[Said] = [
        Stored(
            host="h", source="s", tier="device", epoch=1, seq=n + 1, ts_ms=1,
            namespace=NAMESPACE, runs=[Run(parent=f"{n:032x}", hashes=[names[n]])],
        )
        for n in range(100)
    ]  # fmt: skip
    payload = pack(events)
    assert len(payload) < 100 * (HASH_BYTES + 1) + 200
    assert isinstance(msgspec.msgpack.decode(payload, type=PackedEvents).parts, list)


class Counted(bytes):
    """Bytes that count how many of them slices have copied."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        part = Counted(super().__getitem__(key))
        Counted.copied += len(part)
        return part


def test_events_of_one_run_are_cut_out_of_it_once() -> None:
    """Goal: time grows with the blocks of a message, not with blocks times events."""
    count = 1000
    hashes = Counted(bytes(HASH_BYTES * count))
    part = StoredPart(
        tier="host", ts_ms=1, namespace=bytes(32), sizes=[1] * count,
        runs=[PackedRun(parent=bytes(HASH_BYTES), hashes=hashes)],
    )  # fmt: skip
    assert sum(len(blocks) for [(_, blocks)] in runs_of_events(part)) == len(hashes)
    assert Counted.copied <= 2 * len(hashes)
