"""Naming by the compiled library, and without it: the same ids, and the same names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.copying.naming import (
    BLOCKS_MIN,
    TOKENS_MAX,
    Naming,
    best_naming,
    native_naming,
)
from kvbm_common.identity import (
    Extras,
    ExtraTag,
    Hasher,
    IdentityError,
    Namespace,
    SequenceHash,
    pack_tokens,
)
from kvbm_common.wire.compact_batches import (
    PAYLOAD_BYTES_MIN,
    ReadTokens,
    compact,
    decode_compact,
)
from kvbm_common.wire.engine_events import EngineBatch, decode_batch

from tests.libs.native import library

IDS = st.integers(0, 2**32 - 1) | st.sampled_from([0, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**31])
OTHERS = st.integers(-(2**63), -1) | st.integers(2**32, 2**64 - 1) | st.floats() | st.lists(IDS)
EXTRA: Extras = ((ExtraTag.SALT, b"blue"),)
PARENT = SequenceHash(bytes(range(16)))
DEADLINE_S = 10


@pytest.fixture(scope="module")
def naming() -> Naming:
    """Return the functions of the library; skip the test where there is no compiler."""
    return native_naming(library())


def read_tokens(naming: Naming) -> ReadTokens:
    """Return the library's reader of token ids."""
    assert naming.read_tokens is not None
    return naming.read_tokens


@settings(max_examples=300, deadline=None)
@given(
    size=st.sampled_from([1, 2, 16, 28, 29, 60, 61, 100]),
    count=st.integers(0, 3 * BLOCKS_MIN),
    spare=st.integers(0, 1),
    parent=st.sampled_from([None, PARENT]),
    extras=st.dictionaries(st.integers(0, 3 * BLOCKS_MIN), st.just(EXTRA), max_size=2),
    data=st.data(),
)
def test_library_gives_the_names_of_python(
    naming: Naming,
    size: int,
    count: int,
    spare: int,
    parent: SequenceHash | None,
    extras: Mapping[int, Extras],
    data: st.DataObject,
) -> None:
    """Goal: one name for a block, whoever makes it. Sizes are around the ends of BLAKE2b's chunks:
    the name before a block and 28 tokens fill one, and 60 tokens two."""
    namespace = Namespace(model="m", block_tokens=size)
    tokens = data.draw(st.lists(IDS, min_size=8, max_size=8)) * (size * count // 8 + 1)
    tokens = tokens[: size * count + (spare if size > 1 else 0)]
    wanted = Hasher(namespace).chain(tokens, parent=parent, extras=extras)
    assert naming.hasher(namespace).chain(tokens, parent=parent, extras=extras) == wanted
    assert len(wanted) == count


def test_library_refuses_a_parent_that_is_no_hash(naming: Naming) -> None:
    """Goal: nothing is read beyond the end of a short hash."""
    hasher = naming.hasher(Namespace(model="m", block_tokens=1))
    with pytest.raises(IdentityError):
        hasher.chain(range(BLOCKS_MIN), parent=SequenceHash(b"short"))


@pytest.mark.parametrize("first", [{}, {0: EXTRA}])
def test_library_takes_a_parent_in_other_memory(
    naming: Naming, first: Mapping[int, Extras]
) -> None:
    """A name out of a buffer is a parent like any other, as it is for Python."""
    namespace, tokens = Namespace(model="m", block_tokens=1), range(2 * BLOCKS_MIN)
    parent = SequenceHash(cast("bytes", bytearray(PARENT)))
    wanted = Hasher(namespace).chain(tokens, parent=PARENT, extras=first)
    assert naming.hasher(namespace).chain(tokens, parent=parent, extras=first) == wanted


def test_threads_read_their_own_ids(naming: Naming) -> None:
    """Goal: what another thread reads between two lines of a call changes nothing in it."""
    read, others = read_tokens(naming), msgspec.msgpack.encode([2] * 8)

    def beside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            other = threading.Thread(target=read, args=(others,))
            other.start()
            other.join(DEADLINE_S)
            assert not other.is_alive()
        return beside if frame.f_code.co_name == "read_tokens" else None

    before = sys.gettrace()
    sys.settrace(beside)
    try:
        found = read(msgspec.msgpack.encode([1] * 8))
    finally:
        sys.settrace(before)
    assert found == pack_tokens([1] * 8)


@settings(max_examples=300, deadline=None)
@given(st.lists(IDS, max_size=40))
def test_library_reads_the_ids_of_an_array(naming: Naming, ids: Sequence[int]) -> None:
    assert read_tokens(naming)(msgspec.msgpack.encode(ids)) == pack_tokens(ids)


@given(st.lists(IDS, max_size=20), OTHERS, st.integers(0, 20))
def test_library_reads_no_array_of_other_things(
    naming: Naming, ids: list[int], other: Any, at: int
) -> None:
    """Goal: what is no token id is left to Python, which says what it is."""
    ids.insert(at, other)
    assert read_tokens(naming)(msgspec.msgpack.encode(ids)) is None


@given(st.binary(max_size=40))
def test_library_reads_no_further_than_the_bytes(naming: Naming, array: bytes) -> None:
    """Goal: any bytes give what Python gives, or nothing; all that is read is inside of them."""
    found = read_tokens(naming)(array)
    if found is not None:
        assert found == pack_tokens(msgspec.msgpack.decode(array, type=list[int]))


def test_library_reads_long_arrays_up_to_its_room(naming: Naming) -> None:
    """Each of the three lengths that msgpack has for an array."""
    for count in (15, 16, TOKENS_MAX - 1, TOKENS_MAX):
        ids = [count] * count
        assert read_tokens(naming)(msgspec.msgpack.encode(ids)) == pack_tokens(ids)
    assert read_tokens(naming)(msgspec.msgpack.encode([1] * (TOKENS_MAX + 1))) is None


def fields(batch: EngineBatch) -> Any:
    """Return what a batch says, event by event."""
    events = [
        (event.__struct_config__.tag, msgspec.structs.asdict(event)) for event in batch.events
    ]
    ids = [pack_tokens(said["token_ids"]) for _, said in events if is_packed(said)]
    return batch.ts, batch.dp_rank, events, ids


def is_packed(said: dict[str, Any]) -> bool:
    """Return whether an event has its token ids in one piece of memory."""
    return isinstance(said.get("token_ids"), memoryview)


STORED = {
    "type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": -3,
    "token_ids": [5, 6, 70_000, 8], "block_size": 2, "lora_id": None, "medium": "GPU",
}  # fmt: skip
REMOVED = {"type": "BlockRemoved", "block_hashes": [b"8 bytes.", 9]}


@pytest.mark.parametrize(
    "events",
    [
        [STORED, REMOVED, {"type": "AllBlocksCleared"}],
        [STORED, STORED | {"token_ids": [5, -1, 7, 8]}],
        [STORED | {"token_ids": [[5, 6], [7, 8]]}],
        [STORED | {"mm_keys": [None, [["image", 3]]]}],
        [STORED | {"mm_keys": 7}],
        [["BlockStored", [1], None, [5, 6], 2, None, "GPU", None], STORED],
        [{"type": "BlockLost"}, STORED],
        [],
    ],
)
def test_batch_whose_ids_the_library_reads_says_the_same(naming: Naming, events: list[Any]) -> None:
    """Goal: the way a batch is decoded changes nothing in it, in any layout."""
    payload = msgspec.msgpack.encode([1.5, events * 8, 0])
    assert not events or len(payload) >= PAYLOAD_BYTES_MIN
    plain = compact(decode_batch(payload))
    for read in (None, naming.read_tokens):
        assert fields(decode_compact(payload, read)) == fields(plain)


def test_library_of_older_sources_is_not_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a checkout that was renewed and not compiled again names blocks by Python."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "old.c").write_text("void kvbm_move_lanes(void) {}")
    old = tmp_path / "_native.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", old, tmp_path / "old.c"], check=True)
    assert best_naming(old) == Naming(Hasher, None)
    assert "of another version" in caplog.text
    assert best_naming(tmp_path / "missing.so") == Naming(Hasher, None)
