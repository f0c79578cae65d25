"""What every medium promises: the same suite over a file, buckets and a directory, all real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.blocks import Block
from kvbm_disk_tier.core.effects import AppendJournal
from kvbm_disk_tier.core.messages import (
    Journaled,
    ReadDone,
    ReadFailed,
    StoreOpened,
    WriteFailed,
    Written,
)
from kvbm_disk_tier.objects.core.paths import path_of
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions
from kvbm_disk_tier.shell.cipher import Keys
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.medium import Medium
from kvbm_disk_tier.shell.mover import DiskMover
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread
from msgspec.structs import replace

from tests.services.disk_tier.mediums import (
    PART_BYTES,
    SLOT_BYTES,
    SLOTS,
    Place,
    arena,
    sealed_medium,
)
from tests.services.disk_tier.objects.making import PARTS, make_medium
from tests.services.disk_tier.s3_server import S3Server

STORES = [
    "disk", "sealed disk", "object", "sealed object", "directory", "sealed directory",
    pytest.param("swift", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]  # fmt: skip


@pytest.fixture(params=STORES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """An open store and an arena."""
    counters = Metrics()
    medium: Medium
    if request.param == "disk":
        store = Store(StoreOptions(directory=tmp_path / "store", capacity_bytes=SLOTS * SLOT_BYTES))
        medium = FileMedium(
            StoreThread(store),
            DiskMover(mover=MoverThread("test", backends=("POSIX",)), counters=counters),
        )
    elif request.param == "sealed disk":
        medium = sealed_medium(tmp_path / "store", Keys({"": bytes(32)}))
    else:
        keys = Keys({"": bytes(32)}) if request.param.startswith("sealed") else None
        medium = make_medium(shared_store(request, tmp_path), counters, keys=keys)
    try:
        with arena() as made:
            assert isinstance(await medium.open(SLOT_BYTES), StoreOpened)
            yield Place(made, medium)
    finally:
        medium.close()


def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> BucketOptions | Path:
    """A bucket, or a directory."""
    if request.param.endswith("directory"):
        directory = tmp_path / "shared"
        directory.mkdir()
        return directory
    server: S3Server = request.getfixturevalue("swift" if request.param == "swift" else "s3")
    return server.options(server.make_bucket())


async def test_a_written_batch_is_read_back_into_other_slots(place: Place) -> None:
    """A batch is written, and read into other slots in another order."""
    blocks = {0: place.fill(0, 10), 1: place.fill(1, 11), 2: place.fill(2, 12)}
    write = place.writing(blocks)
    assert await place.medium.write(write) == Written(write.write)
    assert await place.medium.append(AppendJournal(write.write, ())) == Journaled((write.write,))
    read = place.reading({5: blocks[0], 3: blocks[1], 4: blocks[2]})
    done = await place.medium.read(read)
    assert isinstance(done, ReadDone)
    assert done.intact == (True, True, True)
    assert [place.bytes_of(slot)[:1] for slot in (5, 3, 4)] == [b"\x0a", b"\x0b", b"\x0c"]


async def test_the_parts_of_a_block_have_their_checksums_after_a_read(place: Place) -> None:
    """Two ranks: what the store knows is how many there are; the bytes say the rest."""
    blocks = {0: place.fill_parts(0, 10, 20), 1: place.fill_parts(1, 11, 21)}
    write = place.writing(blocks)
    assert await place.medium.write(write) == Written(write.write)
    done = await place.medium.read(place.reading({5: blocks[0], 3: blocks[1]}))
    assert isinstance(done, ReadDone)
    assert done.intact == (True, True)
    assert done.sums == tuple(pack_sums([sum_of(n), sum_of(n + 10)]) for n in (10, 11))
    assert place.bytes_of(5, size=2 * PART_BYTES) == b"\x0a" * PART_BYTES + b"\x14" * PART_BYTES


@pytest.mark.parametrize("offset", [0, PART_BYTES, 2 * PART_BYTES - 1])
async def test_a_flipped_byte_in_any_ranks_part_is_noticed(
    place: Place, request: pytest.FixtureRequest, offset: int
) -> None:
    """In the first rank's part, and at both ends of the second one's; the neighbour is read."""
    blocks = {0: place.fill_parts(0, 10, 20), 1: place.fill_parts(1, 11, 21)}
    await place.medium.write(place.writing(blocks))
    flip(place, request, blocks[0], offset)
    done = await place.medium.read(place.reading({5: blocks[0], 3: blocks[1]}))
    assert isinstance(done, ReadDone)
    assert done.intact == (False, True)
    assert done.sums == (b"", pack_sums([sum_of(11), sum_of(21)]))


async def test_parts_that_changed_places_are_noticed(place: Place) -> None:
    """The right parts in the wrong order are another block."""
    blocks = {0: place.fill_parts(0, 10, 20)}
    await place.medium.write(place.writing(blocks))
    turned = place.fill_parts(1, 20, 10)
    wanted = replace(turned, hash=blocks[0].hash, parent=blocks[0].parent)
    done = await place.medium.read(place.reading({5: wanted}))
    assert isinstance(done, ReadDone)
    assert done.intact == (False,)


def sum_of(number: int) -> int:
    """The checksum of a part that is full of this byte."""
    return block_checksum(bytes([number]) * PART_BYTES)


def flip(place: Place, request: pytest.FixtureRequest, block: Block, offset: int) -> None:
    """Change one byte of a block in slot 0 of the store, or in its object."""
    if isinstance(place.medium, FileMedium):
        with (Path(place.medium.where) / "slots").open("r+b") as file:
            file.seek(offset)
            [old] = file.read(1)
            file.seek(offset)
            file.write(bytes([old ^ 1]))
        return
    assert isinstance(place.medium, ObjectMedium)
    parts = PARTS[place.medium]
    key = parts.names.name_of(block)
    if isinstance(parts.options, Path):
        path = parts.options / path_of(key)
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        return
    name = "swift" if "swift" in request.node.name else "s3"
    client, bucket = request.getfixturevalue(name).client, parts.options.bucket
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[offset] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))


async def test_wrong_bytes_are_never_intact(place: Place) -> None:
    """The store has other bytes than the table says: the neighbours of the block are not hurt."""
    blocks = {0: place.fill(0, 10), 1: place.fill(1, 11)}
    await place.medium.write(place.writing(blocks))
    wrong = place.fill(2, 99)
    done = await place.medium.read(place.reading({3: wrong, 4: blocks[1]}))
    assert isinstance(done, ReadDone)
    assert done.intact == (False, True)


async def test_a_decision_about_a_former_arena_touches_nothing(place: Place) -> None:
    """The next life's arena was mapped meanwhile."""
    blocks = {0: place.fill(0, 10)}
    await place.medium.write(place.writing(blocks))
    stale_write, stale_read = place.writing(blocks), place.reading({1: blocks[0]})
    with arena() as other:
        later = Place(other, place.medium, epoch=2)
        later.fill(1, 77)
        failed = await place.medium.write(stale_write)
        assert failed == WriteFailed(stale_write.write, "stale_arena")
        outcome = await place.medium.read(stale_read)
        if isinstance(outcome, ReadDone):
            assert outcome.intact == (False,)
            assert outcome.reasons == ("stale_arena",)
        else:
            assert outcome == ReadFailed(stale_read.read, "stale_arena")
        assert later.bytes_of(1)[:1] == b"\x4d"
        assert isinstance(await place.medium.read(later.reading({2: blocks[0]})), ReadDone)
        assert later.bytes_of(2)[:1] == b"\x0a"


async def test_a_fill_whose_time_is_over_does_not_touch_the_arena(place: Place) -> None:
    """Whatever the store does, afterwards the slot is the host tier's again."""
    blocks = {0: place.fill(0, 10)}
    await place.medium.write(place.writing(blocks))
    place.fill(6, 66)
    late = place.reading({6: blocks[0]}, within_ms=-1_000)
    outcome = await place.medium.read(late)
    before = place.bytes_of(6)
    if isinstance(outcome, ReadDone) and outcome.intact == (True,):
        return  # It was in time after all: a file may answer at once.
    place.fill(6, 67)
    again = await place.medium.read(place.reading({5: blocks[0]}))
    assert isinstance(again, ReadDone)
    assert again.intact == (True,)
    assert before[:1] in (b"\x42", b"\x0a")
    assert place.bytes_of(6)[:1] == b"\x43", "late bytes came into a slot that was given back"


async def test_many_at_once(place: Place) -> None:
    """Reads and writes side by side do not mix up."""
    blocks = {slot: place.fill(slot, 20 + slot) for slot in range(4)}
    await place.medium.write(place.writing(blocks))
    reads = [place.medium.read(place.reading({4 + i: blocks[i]}, source=i)) for i in range(4)]
    outcomes = await asyncio.gather(*reads, place.medium.write(place.writing(blocks)))
    assert all(isinstance(outcome, ReadDone | Written) for outcome in outcomes)
    assert [place.bytes_of(4 + i)[0] for i in range(4)] == [20, 21, 22, 23]
