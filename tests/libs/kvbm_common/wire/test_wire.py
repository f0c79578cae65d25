"""The wire: golden bytes, evolution rules, bad input, and the documents that describe it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.tier import kv_groups
from kvbm_common.wire import (
    admin,
    consolidator,
    events,
    index_verbs,
    local,
    packed_events,
    routes,
    scores,
    verbs,
)
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, JsonCodec, MsgpackCodec, WireError
from kvbm_common.wire.local_fields import LOOKUP_MS_MAX

from tests.libs.wire_examples import EXAMPLES, GOLDEN, STORED, Example

BEFORE = GOLDEN / "before"
"""Messages as releases before some of their fields sent them."""

MODULES = (
    admin, consolidator, events, index_verbs, local, packed_events, routes, scores, verbs
)  # fmt: skip
WIRE_MD = Path(__file__).parents[4] / "docs" / "wire.md"
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def raw_of(example: Example) -> dict[str, Any]:
    """The golden message as a plain map."""
    decode: Callable[..., Any] = msgspec.json.decode if example.is_json else msgspec.msgpack.decode
    raw = decode(example.golden())
    assert isinstance(raw, dict)
    return raw


def encode_raw(example: Example, raw: object) -> bytes:
    """A plain map as bytes of the example's encoding."""
    return msgspec.json.encode(raw) if example.is_json else msgspec.msgpack.encode(raw)


def refusal(codec: JsonCodec[Any] | MsgpackCodec[Any], payload: bytes) -> str:
    """The kind of the WireError that decoding `payload` must raise."""
    with pytest.raises(WireError) as caught:
        codec.decode(payload)
    assert caught.value.code == "bad_message"
    return caught.value.kind


# --- golden files -----------------------------------------------------------------------------


@each_example
def test_golden_bytes_decode_to_the_example(example: Example) -> None:
    """What was once on the wire means the same today."""
    assert example.codec.decode(example.golden()) == example.message


@each_example
def test_the_example_encodes_to_its_golden_bytes(example: Example) -> None:
    """What we send today is what we sent then, byte for byte."""
    assert example.codec.encode(example.message) == example.golden()


def test_every_message_has_an_example_and_every_golden_file_a_message() -> None:
    """Every top-level message of the modules is pinned; no golden file is left over."""
    messages = {
        one
        for module in MODULES
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__name__[0] != "_"
        if "v" in one.__struct_fields__
    }
    assert {type(example.message) for example in EXAMPLES} == messages
    assert {example.path for example in EXAMPLES} == {
        path for path in GOLDEN.iterdir() if path.suffix in (".json", ".hex")
    }


# --- evolution --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "example",
    [one for one in EXAMPLES if not isinstance(one.message, verbs.ErrorReply)],
    ids=lambda one: one.name,
)
def test_an_unknown_field_is_ignored(example: Example) -> None:
    """A newer sender may add fields. (An ErrorReply is told from a reply by its exact shape.)"""
    payload = encode_raw(example, raw_of(example) | {"later": {"a": [1, None]}})
    assert example.codec.decode(payload) == example.message


@each_example
def test_a_field_with_a_default_may_be_missing(example: Example) -> None:
    """An older sender does not know the fields that came later."""
    fields = msgspec.structs.fields(type(example.message))
    defaults = {one.encode_name: one.default for one in fields if not one.required}
    raw = {
        key: value
        for key, value in raw_of(example).items()
        if key not in defaults or value != defaults[key]
    }
    assert example.codec.decode(encode_raw(example, raw)) == example.message


@pytest.mark.parametrize("path", sorted(BEFORE.iterdir()), ids=lambda path: path.name)
def test_messages_of_earlier_releases_are_still_read(path: Path) -> None:
    """A message from before a field came means what it meant: the field has its default."""
    (example,) = (one for one in EXAMPLES if one.path.name == path.name)
    text = path.read_text().strip()
    old = text.encode() if example.is_json else bytes.fromhex(text)
    assert old != example.golden()
    assert example.codec.decode(old) == example.message


@each_example
def test_a_missing_field_is_malformed(example: Example) -> None:
    """Each field without a default must be there."""
    for one in msgspec.structs.fields(type(example.message)):
        if one.required:
            raw = raw_of(example)
            del raw[one.encode_name]
            assert refusal(example.codec, encode_raw(example, raw)) == "malformed"


@each_example
@pytest.mark.parametrize("version", [0, 2, 2**40])
def test_another_version_is_refused_as_such(example: Example, version: int) -> None:
    """An operator who mixes releases must see `version`, not `malformed`."""
    payload = encode_raw(example, raw_of(example) | {"v": version})
    assert refusal(example.codec, payload) == "version"


# --- bad input --------------------------------------------------------------------------------


@each_example
def test_truncated_messages_are_malformed(example: Example) -> None:
    """No prefix of a message is a message."""
    golden = example.golden()
    for end in range(0, len(golden), max(1, len(golden) // 50)):
        assert refusal(example.codec, golden[:end]) == "malformed"


@each_example
def test_an_oversized_message_is_refused_unread(example: Example) -> None:
    """The size is checked before the decoder sees a byte."""
    assert refusal(example.codec, b"\xff" * (MESSAGE_BYTES_MAX + 1)) == "oversized"


@each_example
@pytest.mark.parametrize("raw", [[], None, 7, "stored", {"v": "1"}], ids=str)
def test_something_else_than_the_message_is_malformed(example: Example, raw: object) -> None:
    """Not a map, or a map of something else."""
    assert refusal(example.codec, encode_raw(example, raw)) == "malformed"


@pytest.mark.parametrize("tag", ["melted", "", None, 3, "Stored"], ids=repr)
def test_an_unknown_tag_is_malformed(tag: object) -> None:
    """Neither another kind of event nor another type of local message exists."""
    event = msgspec.json.decode(events.event_codec.encode(STORED)) | {"kind": tag}
    assert refusal(events.event_codec, msgspec.json.encode(event)) == "malformed"
    assert refusal(local.to_host_tier, msgspec.msgpack.encode({"type": tag})) == "malformed"


def fields_of(example: Example) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of an example's type."""
    return msgspec.structs.fields(type(example.message))


@pytest.mark.parametrize(
    "change",
    [
        {"host": "a.b"},
        {"host": "a b"},
        {"host": ""},
        {"host": "x" * 65},
        {"source": "*"},
        {"source": ">"},
        {"tier": "gpu"},
        {"epoch": -1},
        {"seq": 0},
        {"seq": 1.5},
        {"seq": "2"},
        {"namespace": "CE" * 32},
        {"namespace": "ce" * 16},
        {"runs": [{"parent": "0" * 31, "hashes": []}]},
        {"runs": {}},
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_malformed(change: dict[str, object]) -> None:
    """Names fit into a NATS subject, digests are lower-case hex, counts are in range."""
    raw = msgspec.json.decode(events.event_codec.encode(STORED))
    payload = msgspec.json.encode(raw | change)
    assert refusal(events.event_codec, payload) == "malformed"


@pytest.mark.parametrize(
    "payload",
    [
        b'{"kind":"cleared","later":' + b"[" * 100_000,
        b'{"kind":"\xff"}',
        b"\xff\xfe",
        b'{"v":' + b"9" * 5_000 + b"}",
    ],
    ids=["nested", "not utf-8", "not json", "huge number"],
)
def test_hostile_json_is_malformed(payload: bytes) -> None:
    """What makes a decoder raise something unexpected must still come out as a WireError."""
    assert refusal(events.event_codec, payload) == "malformed"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * 100_000,
        b"\x81\xa4type\xa4be\xffd",
        b"\xdf\xff\xff\xff\xff",
        b"\xc1",
    ],
    ids=["nested", "not utf-8", "huge map", "not msgpack"],
)
def test_hostile_msgpack_is_malformed(payload: bytes) -> None:
    """The same for what an engine sends."""
    assert refusal(local.to_host_tier, payload) == "malformed"


def test_a_number_that_no_peer_can_hold_is_malformed() -> None:
    """A position beyond 64 bits would be kept by Python and break every other encoder."""
    raw = msgspec.json.decode(events.event_codec.encode(STORED))
    payload = json.dumps(raw | {"seq": 2**70}).encode()
    assert refusal(events.event_codec, payload) == "malformed"


NAMESPACE = {"model": "m", "block_tokens": 16}
HELLO = {"engine": "ada", "incarnation": "0" * 16, "role": "worker", "namespace": NAMESPACE}
REGION = [4096, 64, 64, 8]


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"group_namespaces": [NAMESPACE] * kv_groups.GROUPS_MAX}, "group_namespaces", "<= 63"),
        ({"regions": [REGION] * (local.REGIONS_MAX + 1)}, "regions", "<= 16384"),
        ({"shards": 2**62 + 1}, "shards", "<= 4611686018427387904"),
        ({"namespace": NAMESPACE | {"group": -1}}, "namespace.group", "≥ 0"),
        ({"namespace": NAMESPACE | {"layers": -5}}, "namespace.layers", "≥ 0"),
    ],
)
def test_a_hello_out_of_bounds_is_refused_by_field(
    change: dict[str, object], field: str, allowed: str
) -> None:
    """Goal: no hello makes the host tier work for seconds, and the engine reads what to change."""
    with pytest.raises(WireError, match=allowed) as caught:
        local.to_host_tier.decode(msgspec.msgpack.encode({"type": "hello", **HELLO, **change}))
    assert (caught.value.kind, caught.value.field) == ("malformed", field)


@pytest.mark.parametrize("field", ["lease_ms", "deadline_ms"])
def test_a_lookup_pins_slots_for_an_hour_at_most(field: str) -> None:
    """Goal: no slot is pinned for the life of a tier, by an engine that fell silent."""
    [example] = [one for one in EXAMPLES if isinstance(one.message, local.Lookup)][:1]
    raw = raw_of(example) | {field: LOOKUP_MS_MAX}
    example.codec.decode(encode_raw(example, raw))
    with pytest.raises(WireError, match=field):
        example.codec.decode(encode_raw(example, raw | {field: LOOKUP_MS_MAX + 1}))


@pytest.mark.parametrize(
    ("type_", "field"),
    [(local.Lookup, "avoided"), (local.Outcome, "blocks"), (local.Misses, "in_vain")],
)
def test_what_is_added_up_is_bounded(type_: type, field: str) -> None:
    """Goal: two messages of an engine do not make a sum that no reader of statistics takes."""
    example = next(one for one in EXAMPLES if isinstance(one.message, type_))
    raw = raw_of(example) | {field: 2**32}
    example.codec.decode(encode_raw(example, raw))
    with pytest.raises(WireError, match=field):
        example.codec.decode(encode_raw(example, raw | {field: 2**32 + 1}))


def test_a_name_with_a_line_break_is_refused() -> None:
    """It would be a NATS subject that no server takes."""
    for source in ("e\n", "e\n\n", "\ne"):
        with pytest.raises(WireError) as caught:
            JsonCodec(index_verbs.DumpRequest).decode(msgspec.json.encode({"source": source}))
        assert (caught.value.kind, caught.value.field) == ("malformed", "source")


STATS = {"kind": "host-tier", "host": "h", "instance": "0", "epoch": 1, "ready": True}
ARENA = {
    "path": "/a", "bytes": 8192, "slot_bytes": 4096, "slot_count": 2, "epoch": 1, "instance": "0",
}  # fmt: skip
DOOR = {"epoch": 1, "slot_bytes": 4096, "slot_count": 2, "address": 0, "agent": ""}


@pytest.mark.parametrize(
    ("message", "example", "change"),
    [
        (verbs.ArenaReply, ARENA, {"sizes": [0]}),
        (verbs.DoorReply, DOOR, {"slot_bytes": 10**21}),
        (verbs.DoorReply, DOOR, {"agent": "AAAA" * 349_526}),
        (verbs.StatsReply, STATS, {"slots": {"total": 10**400}}),
        (verbs.StatsReply, STATS, {"slots": {"total": -1}}),
        (verbs.StatsReply, STATS, {"slabs": {"cut": 2**63}}),
        (verbs.StatsReply, STATS, {"figures": {"fills": 1e300}}),
        (verbs.StatsReply, STATS, {"positions": {"h": [1, 2**63]}}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_a_number_of_a_reply_that_nobody_can_count_with_is_refused(
    message: type[msgspec.Struct], example: dict[str, object], change: dict[str, object]
) -> None:
    """No slot has no length, and no sum, quotient or address of a reply overflows."""
    codec: JsonCodec[msgspec.Struct] = JsonCodec(message)
    assert codec.decode(json.dumps(example).encode())
    assert refusal(codec, json.dumps(example | change).encode()) == "malformed"


def test_a_lease_without_an_owner_is_refused_by_field() -> None:
    raw = {"owner": "", "epoch": 1, "hashes": [], "lease_ms": 1}
    with pytest.raises(WireError) as caught:
        JsonCodec(verbs.LeaseRequest).decode(msgspec.json.encode(raw))
    assert (caught.value.kind, caught.value.field) == ("malformed", "owner")


def test_a_hello_of_the_largest_size_is_read() -> None:
    """Goal: the bounds are the largest values that are allowed, for a consolidator as well."""
    groups = [NAMESPACE | {"group": 1 + group} for group in range(kv_groups.GROUPS_MAX - 1)]
    largest = {"group_namespaces": groups, "regions": [REGION] * local.REGIONS_MAX}
    payload = msgspec.msgpack.encode({"type": "hello", **HELLO, **largest})
    hello = local.to_host_tier.decode(payload)
    assert isinstance(hello, local.Hello)
    assert len(hello.namespaces) == kv_groups.GROUPS_MAX
    attach = {
        "type": "attach", "engine": "ada", "incarnation": "0" * 16, "endpoint": "",
        "namespace": NAMESPACE, "group_namespaces": [*groups, NAMESPACE],
    }  # fmt: skip
    with pytest.raises(WireError, match="<= 63"):
        consolidator.to_consolidator.decode(msgspec.msgpack.encode(attach))


CODECS = list({id(example.codec): example.codec for example in EXAMPLES}.values())


@given(st.sampled_from(CODECS), st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_raise_wire_error(
    codec: JsonCodec[Any] | MsgpackCodec[Any], payload: bytes
) -> None:
    """Noise never raises anything else."""
    _decode_or_refuse(codec, payload)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_mutation_decodes_or_raises_wire_error(data: st.DataObject) -> None:
    """1. Take a real message. 2. Overwrite some bytes in the middle. 3. Decode."""
    example = data.draw(st.sampled_from(EXAMPLES))
    payload = bytearray(example.golden())
    start = data.draw(st.integers(0, len(payload) - 1))
    patch = data.draw(st.binary(max_size=8))
    payload[start : start + len(patch)] = patch
    _decode_or_refuse(example.codec, bytes(payload))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.data(), JSON_VALUES)
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_field_decodes_or_raises_wire_error(
    data: st.DataObject, value: object
) -> None:
    """1. Take a real message. 2. Put anything into one of its fields. 3. Decode."""
    example = data.draw(st.sampled_from([one for one in EXAMPLES if one.is_json]))
    raw = raw_of(example)
    raw[data.draw(st.sampled_from(sorted(raw)))] = value
    _decode_or_refuse(example.codec, json.dumps(raw).encode())


def _decode_or_refuse(codec: JsonCodec[Any] | MsgpackCodec[Any], payload: bytes) -> None:
    try:
        message = codec.decode(payload)
    except WireError as error:
        assert error.kind in ("malformed", "oversized", "version")  # noqa: PT017
    else:
        assert codec.decode(codec.encode(message)) == message


# --- documents --------------------------------------------------------------------------------


def test_subjects() -> None:
    """The subjects that the documents promise."""
    assert events.event_subject(STORED) == "kvbm.v1.events.gpu-a.host-tier-0.stored"
    assert verbs.offers_subject("gpu-a") == "kvbm.v1.offers.gpu-a"
    assert verbs.hits_subject("gpu-a") == "kvbm.v1.hits.gpu-a"
    assert verbs.verb_subject("index", "match") == "kvbm.v1.index.match"
    assert (
        verbs.verb_subject("host-tier", "stats", host="gpu-a", instance="0")
        == "kvbm.v1.host-tier.gpu-a.0.stats"
    )


@each_example
def test_wire_md_explains_every_field(example: Example) -> None:
    """Each message has a section in docs/wire.md whose table names each of its fields."""
    name = type(example.message).__name__
    section = re.search(rf"^### `?{name}\b.*?(?=^##)", WIRE_MD.read_text() + "\n##", re.M | re.S)
    assert section, f"docs/wire.md has no section {name}"
    explained = set(re.findall(r"^\| `(\w+)`", section.group(0), re.M)) | {"v"}
    assert explained == {one.encode_name for one in fields_of(example)}
