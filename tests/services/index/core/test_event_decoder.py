"""Lean events: the short way from JSON to names says what the long way says."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import IdentityError, packed_from_hex, packed_from_json
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import Removed, Run, Stored, event_codec, event_subject
from kvbm_index.core import event_decoder

from tests.services.index.core.test_core import NAMESPACE, block, cleared, removed, stored

DIGITS = st.text("0123456789abcdef", min_size=32, max_size=32)
ODD = st.text('0f ",[]\\', min_size=26, max_size=36) | st.integers(10**33, 10**34)
PIECES = st.sampled_from(
    ['"', '","', "0" * 28, "0" * 30, "0" * 31, "0" * 32, "1" * 34, ",", "[", "]"]
)


@given(st.lists(DIGITS, max_size=70))
def test_names_come_out_as_they_went_in(names: list[str]) -> None:
    text = msgspec.json.encode(names)
    assert packed_from_json(text) == (packed_from_hex(names) if names else None)


@given(
    st.lists(DIGITS | ODD, max_size=4).map(lambda values: json.dumps(values))
    | st.lists(PIECES).map("".join)
)
def test_what_is_no_array_of_names_is_left_to_the_decoder(text: str) -> None:
    """Goal: no layout that happens to have the right length shifts a digit into another name."""
    try:
        values = msgspec.json.decode(text.encode())
        truth = packed_from_hex(msgspec.convert(values, list[str]))
    except (msgspec.MsgspecError, IdentityError):
        truth = None
    found = packed_from_json(text.encode())
    assert found is None or found == truth


@pytest.mark.parametrize("blanks", [False, True])
@pytest.mark.parametrize("runs", [[[1]], [[1, 2, 3]], [[1, 2], [7]], [[0, 1]], []])
def test_runs_are_those_of_the_whole_event(runs: list[list[int]], blanks: bool) -> None:
    """One run, several, none; a parent that is the root; JSON with blanks of another writer."""
    event = Stored(
        host="h", source="s", tier="host", epoch=1, seq=1, ts_ms=0, namespace=NAMESPACE,
        runs=[Run(parent=block(run[0] - 1).hex(), hashes=[block(one).hex() for one in run])
              for run in runs],
    )  # fmt: skip
    payload = msgspec.json.encode(event)
    if blanks:
        payload = json.dumps(json.loads(payload)).encode()
    read = event_decoder.read(event_subject(event), payload)
    assert isinstance(read, event_decoder.DecodedStored)
    assert event_decoder.runs_of(read) == event_decoder.runs_of(event)


@pytest.mark.parametrize(
    "runs",
    [
        '[{"parent":"' + "0" * 32 + '","hashes":[]}]',
        '[{"parent":"' + "g" * 32 + '","hashes":["' + "0" * 32 + '"]}]',
        '[{"parent":"' + "0" * 32 + '","hashes":["' + "g" * 32 + '"]}]',
        '[{"parent":"' + "0" * 32 + '","hashes":["' + "0" * 31 + '"]}]',
        '[{"parent":"' + "0" * 32 + '","hashes":[7]}]',
        '[{"hashes":[]}]',
        "7",
    ],
)
def test_malformed_runs_are_refused(runs: str) -> None:
    """All but the first, which says nothing."""
    event = stored(1, 1)
    payload = event_codec.encode(event)
    start = payload.index(b'"runs":') + len(b'"runs":')
    read = event_decoder.read(event_subject(event), payload[:start] + runs.encode() + b"}")
    assert isinstance(read, event_decoder.DecodedStored)
    if runs.endswith("[]}]") and "parent" in runs:
        assert event_decoder.runs_of(read) == [(bytes(16), b"", True)]
        return
    with pytest.raises(IdentityError):
        event_decoder.runs_of(read)


def test_removed_hashes_with_blanks() -> None:
    event = removed(1, 1, 2)
    read = event_decoder.read(
        event_subject(event), json.dumps(json.loads(event_codec.encode(event))).encode()
    )
    assert isinstance(read, event_decoder.DecodedRemoved)
    assert isinstance(event, Removed)
    assert event_decoder.removed_of(read) == event_decoder.removed_of(event)


@pytest.mark.parametrize(
    "subject",
    [
        "kvbm.v1.events.h.t.cleared", "kvbm.v1.events.h.s.stored", "h.s.cleared",
        "other.v1.events.h.s.cleared", "cleared",
    ],
)  # fmt: skip
def test_an_event_on_another_subject_is_refused(subject: str) -> None:
    payload = event_codec.encode(cleared(1))
    event_decoder.read("kvbm.v1.events.h.s.cleared", payload)
    with pytest.raises(WireError) as refused:
        event_decoder.read(subject, payload)
    assert refused.value.kind == "wrong_subject"
