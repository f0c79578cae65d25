"""Identity: the published vectors, the algebra of the chain, and what keeps tenants apart."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import (
    BLOCK_TOKENS_MAX,
    FORMAT,
    HASH_BYTES,
    NUMBER_MAX,
    TEXT_MAX,
    Extras,
    ExtraTag,
    Hasher,
    IdentityError,
    Namespace,
    SequenceHash,
    check_hash,
    hash_from_hex,
    hashes_from_hex,
    hashes_to_hex,
    lora_extra,
    pack_extras,
    pack_hashes,
    pack_tokens,
    request_extras,
    unpack_hashes,
)

WIRE_MD = Path(__file__).parents[3] / "docs" / "wire.md"
SMALL = Namespace(model="test", block_tokens=4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def published_vectors() -> list[dict[str, Any]]:
    """The vectors of docs/wire.md: every fenced block marked `json vector`."""
    blocks = re.findall(r"^```json vector\n(.*?)^```", WIRE_MD.read_text(), re.M | re.S)
    return [json.loads(block) for block in blocks]


def vector_extras(vector: dict[str, Any]) -> dict[int, Extras]:
    """The extras of a vector: those of the request, then those spelled out per block."""
    extras = {i: list(e) for i, e in request_extras(**vector.get("request", {})).items()}
    for index, pairs in vector.get("extras", {}).items():
        named = [(ExtraTag[tag.upper()], bytes.fromhex(value)) for tag, value in pairs]
        extras.setdefault(int(index), []).extend(named)
    return dict(extras)


# --- vectors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", published_vectors(), ids=lambda vector: vector["name"])
def test_published_vector(vector: dict[str, Any]) -> None:
    """Another implementation that follows docs/wire.md gets these very digits."""
    namespace = msgspec.convert(vector["namespace"], Namespace)
    first, last = vector["tokens_range"]
    parent = hash_from_hex(vector["parent"]) if "parent" in vector else None
    assert namespace.digest.hex() == vector["digest"]
    hashes = Hasher(namespace).chain(
        range(first, last), parent=parent, extras=vector_extras(vector)
    )
    assert hashes_to_hex(hashes) == vector["hashes"]


def test_there_are_vectors_for_every_ingredient() -> None:
    """Namespace, parent, salt, LoRA and block extras each have a published vector."""
    vectors = published_vectors()
    assert len(vectors) >= 6
    assert {"request", "extras", "parent"} <= {key for vector in vectors for key in vector}


def test_the_formula_as_published() -> None:
    """The hash is what the module's formula says, computed here with nothing but hashlib."""
    first, second = Hasher(SMALL).chain(range(8), extras={1: [(ExtraTag.OTHER, b"xy")]})
    tokens = b"".join(token.to_bytes(4, "little") for token in range(8))
    tail = bytes([255]) + (2).to_bytes(4, "little") + b"xy"

    def blake(message: bytes) -> bytes:
        return hashlib.blake2b(message, key=SMALL.digest, digest_size=16).digest()

    assert first == blake(SMALL.digest[:16] + tokens[:16])
    assert second == blake(first + tokens[16:] + tail)


# --- the chain --------------------------------------------------------------------------------


@given(TOKENS, st.integers(0, 10))
@settings(deadline=None)
def test_the_chain_of_a_whole_is_the_chain_of_its_parts(tokens: list[int], cut: int) -> None:
    """A connector may hash a prompt as it grows, block by block."""
    hasher = Hasher(SMALL)
    whole = hasher.chain(tokens)
    cut = min(cut, len(whole))
    head = hasher.chain(tokens[: cut * 4])
    tail = hasher.chain(tokens[cut * 4 :], parent=head[-1] if head else None)
    assert head + tail == whole
    assert len(whole) == len(tokens) // 4


@given(TOKENS, st.integers(0, 39))
@settings(deadline=None)
def test_a_change_renames_its_block_and_all_after_it(tokens: list[int], position: int) -> None:
    """A name stands for the whole prefix: nothing before the change moves, all after it does."""
    if position >= len(tokens):
        return
    changed = tokens.copy()
    changed[position] ^= 1
    before, after = Hasher(SMALL).chain(tokens), Hasher(SMALL).chain(changed)
    block = position // 4
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
@settings(deadline=None)
def test_lists_and_arrays_of_any_integer_type_agree(tokens: list[int]) -> None:
    """Engines hand over lists, int32 and int64 arrays; the name is the same."""
    hasher = Hasher(SMALL)
    expected = hasher.chain(tokens)
    for dtype in (np.int32, np.uint32, np.int64, ">u4"):
        assert hasher.chain(np.array(tokens, dtype=dtype)) == expected


def test_a_partial_block_has_no_name() -> None:
    """Less than a block is nothing; the rest after full blocks is left out."""
    hasher = Hasher(SMALL)
    assert hasher.chain([]) == hasher.chain([1, 2, 3]) == []
    assert hasher.chain([1, 2, 3, 4, 5]) == hasher.chain([1, 2, 3, 4])


def test_the_chain_starts_from_the_namespace() -> None:
    """The parent of a first block is the root; naming it explicitly changes nothing."""
    hasher = Hasher(SMALL)
    assert hasher.root == SMALL.root == SMALL.digest[:16]
    assert hasher.chain(range(8), parent=SMALL.root) == hasher.chain(range(8))


# --- separation -------------------------------------------------------------------------------


def test_salt_lora_and_generation_separate_whole_sequences() -> None:
    """Every block differs: the first one's extras are carried on by the chain."""
    hasher = Hasher(SMALL)
    requests: list[dict[str, str]] = [
        {},
        {"salt": "a"},
        {"salt": "b"},
        {"lora": "a"},
        {"lora": "a", "salt": "b"},
        {"lora": "b", "salt": "a"},
        {"lora": "ab"},
        {"lora": lora_extra("a", "00")},
        {"lora": lora_extra("a", "01")},
        {"generation": "00"},
        {"generation": "01"},
    ]
    chains = [hasher.chain(range(12), extras=request_extras(**one)) for one in requests]
    assert len({name for chain in chains for name in chain}) == 3 * len(requests)


def test_an_empty_salt_lora_or_generation_is_absent() -> None:
    """Clients that send "" mean nothing by it."""
    assert request_extras(lora="", salt="", generation="") == request_extras() == {}


@pytest.mark.parametrize("changes", [{"format": None}, {"format": 2}], ids=["1", "2"])
def test_names_of_formats_before_are_never_found(changes: dict[str, Any]) -> None:
    """Blocks that a tier holds from before stay out of reach: from before content was in their
    names, and from before they were ordered by layers and heads.

    The digest is taken by the rules of those times, over the fields that there were.
    """
    fields = msgspec.structs.asdict(SMALL) | changes
    del fields["parts"], fields["tenant"]
    fields = {name: value for name, value in fields.items() if value is not None}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    before = hashlib.blake2b(text.encode(), digest_size=32, person=b"kvbm-namespace").digest()
    assert SMALL.digest != before


def test_extras_are_sets_with_unambiguous_borders() -> None:
    """Order does not matter; how bytes are divided among extras does."""
    image, other = (ExtraTag.MULTIMODAL, b"one"), (ExtraTag.OTHER, b"two")
    assert pack_extras([image, other]) == pack_extras([other, image])
    assert pack_extras([(ExtraTag.SALT, b"ab")]) != pack_extras(
        [(ExtraTag.SALT, b"a"), (ExtraTag.SALT, b"b")]
    )
    assert pack_extras([(ExtraTag.SALT, b"a")]) != pack_extras([(ExtraTag.LORA, b"a")])


def test_extras_rename_their_block_and_all_after_it() -> None:
    """An image in the second block leaves the first one shared."""
    hasher = Hasher(SMALL)
    plain = hasher.chain(range(12))
    image = hasher.chain(range(12), extras={1: [(ExtraTag.MULTIMODAL, b"digest")]})
    assert image[0] == plain[0]
    assert not set(image[1:]) & set(plain[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "r"},
        {"dtype": "float16"},
        {"quantisation": "fp8"},
        {"layout": "LBHNC/avx512"},
        {"group": 1},
        {"layers": 1},
        {"heads": 1},
        {"head_dim": 1},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"parts": "4x8x8"},
        {"tenant": "gold", "format": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_namespace_separates(change: dict[str, Any]) -> None:
    """Engines whose bytes differ in any respect never share a name."""
    other = msgspec.structs.replace(SMALL, **change)
    assert other.digest != SMALL.digest
    assert not set(Hasher(other).chain(range(8))) & set(Hasher(SMALL).chain(range(8)))


def test_every_field_of_the_namespace_is_tested_above() -> None:
    """A new field must join the test; block_tokens changes the number of blocks as well, and
    the format follows from the tenant."""
    assert len(Namespace.__struct_fields__) == 13 + 2
    assert Hasher(Namespace(model="test", block_tokens=8)).chain(range(8)) != Hasher(SMALL).chain(
        range(8)
    )


# --- invalid inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"block_tokens": 0},
        {"block_tokens": BLOCK_TOKENS_MAX + 1},
        {"tensor_parallel": 0},
        {"pipeline_parallel": -1},
        {"format": FORMAT - 1},
        {"group": -1},
        {"group": NUMBER_MAX + 1},
        {"layers": -5},
        {"heads": -1},
        {"head_dim": -1},
        {"model": "m" * (TEXT_MAX + 1)},
        {"parts": "4" * (TEXT_MAX + 1)},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_an_invalid_namespace_cannot_exist(fields: dict[str, Any]) -> None:
    """Refused at construction, with the field's name."""
    with pytest.raises(IdentityError, match=next(iter(fields))):
        msgspec.structs.replace(SMALL, **fields)


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1.5], [[1, 2]], ["a"], [None], np.zeros(4)], ids=str
)
def test_tokens_that_are_not_token_ids_are_refused(tokens: Any) -> None:
    """Never truncated, wrapped or rounded into somebody else's block."""
    with pytest.raises(IdentityError):
        pack_tokens(tokens)


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_parent_of_another_length_is_refused(length: int) -> None:
    """A hash has 16 bytes."""
    with pytest.raises(IdentityError):
        check_hash(bytes(length))
    with pytest.raises(IdentityError):
        Hasher(SMALL).chain([1, 2, 3, 4], parent=SequenceHash(bytes(length)))


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "g" * 32, "é" * 32, " " * 32, "0" * 30 + " 0"], ids=repr
)
def test_text_that_is_not_a_hash_is_refused(text: str) -> None:
    """Alone and among good ones; blanks count as digits nowhere."""
    with pytest.raises(IdentityError):
        hash_from_hex(text)
    with pytest.raises(IdentityError):
        hashes_from_hex(["0" * 32, text])


def test_blanks_cannot_shift_hashes_in_bulk() -> None:
    """Sixteen texts with two blanks each are not fifteen shifted hashes."""
    with pytest.raises(IdentityError):
        hashes_from_hex(["  " + "0" * 30] * 16)


def test_a_partial_packed_hash_is_refused() -> None:
    """Packed hashes come in sixteens."""
    with pytest.raises(IdentityError):
        unpack_hashes(bytes(31))


def test_unpacking_lists_of_many_lengths_keeps_no_memory() -> None:
    """A struct for each length would be kept: 32 bytes for each hash of it."""
    kept: list[int] = []
    tracemalloc.start()
    try:
        for length in range(2000, 2040):
            packed = b"".join(number.to_bytes(HASH_BYTES) for number in range(length))
            assert [int.from_bytes(one) for one in unpack_hashes(packed)] == [*range(length)]
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[-1] - kept[0] < 1_000_000


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512, 513])
def test_packed_hashes_of_any_count_keep_their_order(
    kind: type[bytes | bytearray], count: int
) -> None:
    """Around the number that is unpacked at once."""
    hashes = [SequenceHash(number.to_bytes(HASH_BYTES)) for number in range(count)]
    assert unpack_hashes(kind(pack_hashes(hashes))) == hashes


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
@settings(deadline=None)
def test_hex_and_packed_forms_round_trip(raw: list[bytes]) -> None:
    """Both encodings keep every hash and their order."""
    hashes = [SequenceHash(one) for one in raw]
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    assert hashes_from_hex(hashes_to_hex(hashes)) == hashes
    assert [hash_from_hex(one.hex()) for one in hashes] == hashes
