"""Sealed objects in a real S3 server: who lacks the key neither reads, nor lists, nor deletes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from kvbm_common.runtime.metrics import Metrics
from kvbm_disk_tier.core.messages import ReadDone, StoreOpened, Written
from kvbm_disk_tier.objects.core.messages import ListingEnded, ObjectsListed
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.shell.cipher import SEAL_BYTES, Keys
from msgspec.structs import replace

from tests.services.disk_tier.helpers import NAMESPACE, block
from tests.services.disk_tier.mediums import BLOCK_BYTES, Place, arena
from tests.services.disk_tier.objects.making import PREFIX, listed_of, make_medium, running
from tests.services.disk_tier.s3_server import S3Server
from tests.waiting import wait_until

KEY, OTHER_KEY = "11" * 32, "22" * 32
OLD, NEW = Keys.parse(KEY, "V"), Keys.parse(OTHER_KEY, "V")


class Hosts:
    """Tiers that share a bucket, with keys of their own."""

    def __init__(self, s3: S3Server, bucket_name: str) -> None:
        self.s3 = s3
        self.bucket_name = bucket_name
        self.stack = AsyncExitStack()

    async def open(self, keys: Keys | None) -> Place:
        """A tier on a host of its own, with an arena."""
        medium = make_medium(self.s3.options(self.bucket_name), Metrics(), keys=keys)
        made = self.stack.enter_context(arena())
        self.stack.callback(medium.close)
        assert isinstance(await medium.open(0), StoreOpened)
        return Place(made, medium)

    def names(self) -> set[str]:
        """What the bucket holds."""
        return {name for name in self.s3.names(self.bucket_name) if "/probe/" not in name}


@pytest.fixture
async def hosts(s3: S3Server, bucket_name: str) -> AsyncIterator[Hosts]:
    hosts = Hosts(s3, bucket_name)
    async with hosts.stack:
        yield hosts


async def listed(place: Place) -> tuple[set[bytes], dict[str, float]]:
    """The blocks that a listing finds, and what it counted."""
    medium = place.medium
    assert isinstance(medium, ObjectMedium)
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
    found = {entry.block.hash for page in inbox.of(ObjectsListed) for entry in page.objects}
    return found, {kind: listed_of(medium, kind) for kind in ("foreign", "wrong_size")}


@pytest.mark.slow
async def test_no_block_can_be_read_from_the_bucket(hosts: Hosts) -> None:
    place = await hosts.open(OLD)
    blocks = {0: place.fill(0, 65)}
    write = place.writing(blocks)
    assert await place.medium.write(write) == Written(write.write)
    [name] = hosts.names()
    body = hosts.s3.client.get_object(Bucket=hosts.bucket_name, Key=name)["Body"].read()
    assert len(body) == BLOCK_BYTES + SEAL_BYTES
    assert b"A" * 16 not in body
    assert KEY not in name
    assert (await listed(place))[0] == {blocks[0].hash}


async def test_a_wrong_key_is_a_miss_and_harms_nobody(hosts: Hosts) -> None:
    """Two keys and no key on three hosts: each finds its own, and nobody deletes another's."""
    places = [await hosts.open(keys) for keys in (OLD, NEW, None)]
    blocks = [place.fill(0, 65 + number) for number, place in enumerate(places)]
    for place, own in zip(places, blocks, strict=True):
        await place.medium.write(place.writing({0: own}))
    before = hosts.names()
    assert len(before) == 3
    for place, own in zip(places, blocks, strict=True):
        assert await listed(place) == ({own.hash}, {"foreign": 0, "wrong_size": 0})
        others = {1 + i: other for i, other in enumerate(blocks) if other is not own}
        done = await place.medium.read(place.reading(others))
        assert isinstance(done, ReadDone)
        assert done.intact == (False, False)
        assert done.reasons == ("gone", "gone")
        assert place.bytes_of(1)[:1] == b"\0", "the arena is as it was"
    assert hosts.names() == before


async def test_after_a_change_of_the_key_the_old_objects_are_misses_until_it_is_back(
    hosts: Hosts,
) -> None:
    intact: list[tuple[bool, ...]] = []
    for keys in (OLD, NEW, OLD):
        place = await hosts.open(keys)
        one = place.fill(0, 65)
        if not intact:
            await place.medium.write(place.writing({0: one}))
        done = await place.medium.read(place.reading({4: one}))
        assert isinstance(done, ReadDone)
        intact.append(done.intact)
        if keys is NEW:
            await place.medium.write(place.writing({0: one}))
            assert len(hosts.names()) == 2, "sealed anew, beside the old one"
    assert intact == [(True,), (False,), (True,)]


async def test_an_object_with_other_bytes_does_not_open(hosts: Hosts) -> None:
    """A flipped bit, and another block's object under this name."""
    place = await hosts.open(OLD)
    blocks = {0: place.fill(0, 65), 1: place.fill(1, 66), 2: place.fill(2, 67)}
    await place.medium.write(place.writing(blocks))
    names = [Names(PREFIX, OLD).name_of(block) for block in blocks.values()]
    bodies = [
        bytearray(hosts.s3.client.get_object(Bucket=hosts.bucket_name, Key=name)["Body"].read())
        for name in names
    ]
    bodies[0][100] ^= 1
    for name, body in ((names[0], bodies[0]), (names[1], bodies[2])):
        hosts.s3.client.put_object(Bucket=hosts.bucket_name, Key=name, Body=bytes(body))
    done = await place.medium.read(place.reading({4: blocks[0], 5: blocks[1], 6: blocks[2]}))
    assert isinstance(done, ReadDone)
    assert done.intact == (False, False, True)
    assert done.reasons == ("corrupt", "corrupt", "")


async def test_blocks_without_a_key_are_not_stored(hosts: Hosts) -> None:
    place = await hosts.open(Keys.parse(f"{NAMESPACE.hex()}={KEY}", "V"))
    stranger = replace(place.fill(1, 66), namespace=bytes(32))
    write = place.writing({0: place.fill(0, 65), 1: stranger})
    assert await place.medium.write(write) == Written(write.write, (1,))
    assert len(hosts.names()) == 1


def test_a_name_under_another_namespaces_key_is_foreign() -> None:
    """Its namespace has got a key of its own since: ours would not open it."""
    both = Names("p", Keys.parse(f"{KEY}, {NAMESPACE.hex()}={OTHER_KEY}", "V"))
    general = Names("p", OLD).name_of(block(1))
    own = Names("p", NEW).name_of(block(1))
    assert both.block_of(general) is None
    assert both.block_of(own) == block(1)
    assert both.name_of(block(1)) == own
    assert len(both.roots) == 2
