"""Blocks at rest: nobody reads them without the key, and no wrong one is ever taken for right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.checksum import block_checksum
from kvbm_common.memory.arena import Arena
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core.messages import ReadDone, ReadFailed, StoreOpened, WriteFailed, Written
from kvbm_disk_tier.shell.cipher import BadKeys, Keys, seal, unseal
from kvbm_disk_tier.shell.store import SEALED_CURE, Store
from kvbm_disk_tier.shell.store_header import CIPHER, EXTRA_BYTES
from kvbm_disk_tier.shell.store_options import StoreError, StoreOptions
from msgspec.structs import replace

from tests.services.disk_tier.helpers import NAMESPACE, name
from tests.services.disk_tier.mediums import SLOT_BYTES, SLOTS, Place, arena, sealed_medium

KEY, OTHER_KEY = "11" * 32, "22" * 32
DATA = bytes(range(200)) * 5
BLOCK = Block(name(1), name(0), NAMESPACE, block_checksum(DATA), len(DATA))
SEALED_BYTES = 4096 + EXTRA_BYTES


def sealed(keys: Keys, block: Block = BLOCK) -> bytearray:
    """A sealed slot."""
    slot = bytearray(SEALED_BYTES)
    assert seal(keys, block, memoryview(DATA), memoryview(slot))
    return slot


def opened(keys: Keys, slot: bytearray, block: Block = BLOCK) -> bytes | None:
    """What is in it, None: it does not open."""
    plain = bytearray(4096)
    if not unseal(keys, block, memoryview(slot), memoryview(plain)):
        return None
    return bytes(plain[: block.bytes])


@pytest.fixture
def made() -> Iterator[Arena]:
    """An arena."""
    with arena() as one:
        yield one


# --- the seal -----------------------------------------------------------------------------------


def test_what_is_sealed_opens_and_cannot_be_read() -> None:
    keys = Keys.parse(KEY, "V")
    slot = sealed(keys)
    assert DATA[:32] not in slot
    assert opened(keys, slot) == DATA
    assert sealed(keys) != slot, "each time another nonce"


@given(st.integers(0, len(DATA) + 15), st.integers(0, 7))
def test_a_flipped_bit_does_not_open(at: int, bit: int) -> None:
    keys = Keys.parse(KEY, "V")
    slot = sealed(keys)
    slot[at] ^= 1 << bit
    assert opened(keys, slot) is None


@pytest.mark.parametrize(
    "other",
    [
        {"hash": name(2)},
        {"namespace": bytes(32)},
        {"checksum": BLOCK.checksum ^ 1},
        {"bytes": BLOCK.bytes - 1},
    ],
)
def test_another_block_does_not_open(other: dict[str, object]) -> None:
    keys = Keys.parse(KEY, "V")
    assert opened(keys, sealed(keys), replace(BLOCK, **other)) is None


def test_another_key_does_not_open() -> None:
    assert opened(Keys.parse(OTHER_KEY, "V"), sealed(Keys.parse(KEY, "V"))) is None


# --- keys ---------------------------------------------------------------------------------------


def test_the_longest_beginning_of_a_namespace_has_its_key() -> None:
    digest = NAMESPACE.hex()
    keys = Keys.parse(f"{KEY}, {digest[:8]}={OTHER_KEY}", "V")
    assert opened(Keys.parse(OTHER_KEY, "V"), sealed(keys)) == DATA
    other = replace(BLOCK, namespace=bytes(32))
    assert opened(Keys.parse(KEY, "V"), sealed(keys, other), other) == DATA


def test_a_namespace_without_a_key_is_not_sealed() -> None:
    keys = Keys.parse(f"{'0' * 64}={KEY}", "V")
    slot = bytearray(SEALED_BYTES)
    assert not seal(keys, BLOCK, memoryview(DATA), memoryview(slot))
    assert not any(slot)
    assert opened(keys, slot) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        (KEY + "1", "entry 1 is not 64 hex digits"),
        (f"{KEY}\nhello={KEY}", "entry 2 is not"),
        (f"{KEY}, {OTHER_KEY}", "entry 2: the others have a key"),
        (f"1234567={KEY}", "entry 1 is not"),
    ],
)
def test_bad_keys_are_said_and_not_shown(text: str, said: str) -> None:
    with pytest.raises(BadKeys, match="V") as error:
        Keys.parse(text, "V")
    assert said in str(error.value)
    assert KEY not in str(error.value)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n00000000={OTHER_KEY}\n")
    assert opened(Keys.read(path, "V"), sealed(Keys.parse(KEY, "V"))) == DATA
    with pytest.raises(BadKeys, match=r"V: .*missing"):
        Keys.read(tmp_path / "missing", "V")


# --- the store ----------------------------------------------------------------------------------


async def test_no_block_can_be_read_from_the_file(made: Arena, tmp_path: Path) -> None:
    medium = sealed_medium(tmp_path, Keys.parse(KEY, "V"))
    assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
    place = Place(made, medium)
    blocks = {0: place.fill(0, 65), 1: place.fill(1, 66)}
    write = place.writing(blocks)
    assert await medium.write(write) == Written(write.write)
    medium.close()
    data = (tmp_path / "slots").read_bytes()
    assert len(data) == SLOTS * (SLOT_BYTES + EXTRA_BYTES)
    assert b"A" * 64 not in data
    assert b"B" * 64 not in data


async def test_after_a_change_of_the_key_there_are_misses(made: Arena, tmp_path: Path) -> None:
    """Misses, never garbage; with the old key the blocks are there again."""
    intact: list[tuple[bool, ...]] = []
    blocks: dict[int, Block] = {}
    for key in (KEY, OTHER_KEY, KEY):
        medium = sealed_medium(tmp_path, Keys.parse(key, "V"))
        if not blocks:
            assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
        else:
            assert isinstance(await medium.recover(), StoreOpened)
        place = Place(made, medium)
        if not blocks:
            blocks = {0: place.fill(0, 65), 1: place.fill(1, 66)}
            await medium.write(place.writing(blocks))
        done = await medium.read(place.reading({4: blocks[0], 5: blocks[1]}))
        assert isinstance(done, ReadDone)
        intact.append(done.intact)
        medium.close()
    assert intact == [(True, True), (False, False), (True, True)]


async def test_blocks_without_a_key_are_not_kept(made: Arena, tmp_path: Path) -> None:
    medium = sealed_medium(tmp_path, Keys.parse(f"{NAMESPACE.hex()}={KEY}", "V"))
    assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
    place = Place(made, medium)
    stranger = replace(place.fill(1, 66), namespace=bytes(32))
    write = place.writing({0: place.fill(0, 65), 1: stranger})
    assert await medium.write(write) == Written(write.write, (1,))
    medium.close()


async def test_more_at_once_than_the_pool_has_is_refused(made: Arena, tmp_path: Path) -> None:
    medium = sealed_medium(tmp_path, Keys.parse(KEY, "V"), pool_slots=1)
    assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
    place = Place(made, medium)
    one, two = {0: place.fill(0, 65)}, {0: place.fill(0, 65), 1: place.fill(1, 66)}
    assert isinstance(await medium.write(place.writing(two)), WriteFailed)
    assert isinstance(await medium.read(place.reading(two)), ReadFailed)
    write = place.writing(one)
    assert await medium.write(write) == Written(write.write)
    medium.close()


def test_a_store_with_another_cipher_is_not_read(tmp_path: Path) -> None:
    plain = StoreOptions(directory=tmp_path, capacity_bytes=0, slot_count=2)
    store = Store(plain)
    store.create(4096)
    store.close()
    options = dataclasses.replace(plain, cipher=CIPHER)
    store = Store(options)
    assert store.recover() is None
    store.create(4096)
    store.close()
    store = Store(options)
    assert store.recover() is not None
    store.close()


def test_a_sealed_store_is_not_replaced_while_there_are_no_keys(tmp_path: Path) -> None:
    """One start without the variable must not cost the cache. 1. A sealed store. 2. A life without
    keys: refused, each time. 3. The keys are back, and so is the store."""
    plain = StoreOptions(directory=tmp_path, capacity_bytes=0, slot_count=2)
    store = Store(dataclasses.replace(plain, cipher=CIPHER))
    store.create(4096)
    store.close()
    before = (tmp_path / "header").read_bytes()
    store = Store(plain)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"is sealed, and no keys are set: {SEALED_CURE}"):
            store.recover()
    store.close()
    assert (tmp_path / "header").read_bytes() == before
    store = Store(dataclasses.replace(plain, cipher=CIPHER))
    assert store.recover() is not None
    store.close()
