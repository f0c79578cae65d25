"""The object medium on a real S3 server that fails, dawdles, denies, and holds garbage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.slots import Block
from kvbm_disk_tier.core.messages import (
    ReadDone,
    StoreDown,
    StoreFailed,
    StoreOpened,
    StoreUp,
    Written,
)
from kvbm_disk_tier.objects.core.messages import ListedBlock, ListingEnded, ObjectsListed
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.shell import bucket as bucket_module
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.objects.shell.object_store import BucketRefused

from tests.services.disk_tier.mediums import BLOCK_BYTES, Inbox, Place, arena
from tests.services.disk_tier.objects.making import (
    LANES,
    PARTS,
    PREFIX,
    listed_of,
    make_medium,
    running,
)
from tests.services.disk_tier.s3_server import Proxy, S3Server
from tests.waiting import wait_until

NAMES = Names(PREFIX)


@pytest.fixture
def counters() -> Metrics:
    """What the medium counts."""
    return Metrics()


@pytest.fixture
async def place(s3: S3Server, bucket_name: str, counters: Metrics) -> AsyncIterator[Place]:
    """An open bucket and an arena."""
    medium = make_medium(s3.options(bucket_name), counters)
    with arena() as made:
        assert isinstance(await medium.open(0), StoreOpened)
        yield Place(made, medium)
        medium.close()


@pytest.fixture
async def far(
    proxy: Proxy, s3: S3Server, bucket_name: str, counters: Metrics
) -> AsyncIterator[Place]:
    """The same, through a proxy."""
    medium = make_medium(s3.options(bucket_name, endpoint=proxy.endpoint), counters)
    with arena() as made:
        assert isinstance(await medium.open(0), StoreOpened)
        yield Place(made, medium)
        medium.close()


def requests(counters: Metrics, kind: str, outcome: str = "ok") -> float:
    """What the store would bill."""
    return counters.value("kvbm_object_requests_total", request=kind, outcome=outcome)


async def read(place: Place, blocks: dict[int, Block], *, within_ms: int = 5_000) -> ReadDone:
    """A fill."""
    done = await place.medium.read(place.reading(blocks, within_ms=within_ms))
    assert isinstance(done, ReadDone)
    return done


async def listed(inbox: Inbox) -> list[ListedBlock]:
    """What the first complete listing has named."""
    await wait_until(lambda: inbox.of(ListingEnded))
    return [found for page in inbox.of(ObjectsListed) for found in page.objects]


def listing(medium: ObjectMedium) -> dict[str, float]:
    """Listed objects by kind."""
    return {kind: listed_of(medium, kind) for kind in ("ours", "foreign", "wrong_size")}


# --- single objects -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_what_a_lane_held_before_does_not_complete_a_torn_object(
    place: Place, s3: S3Server, bucket_name: str
) -> None:
    """1. A block is written. 2. Its object is cut short. 3. It is read through every lane."""
    blocks = {0: place.fill(0, 10)}
    assert await place.medium.write(place.writing(blocks)) == Written(1)
    s3.client.put_object(Bucket=bucket_name, Key=NAMES.name_of(blocks[0]), Body=b"\x0a" * 100)
    for _ in range(2 * LANES):
        done = await read(place, blocks, within_ms=20_000)
        assert done.reasons == ("corrupt",)


async def test_what_is_missing_torn_or_false_hurts_nobody_else(
    place: Place, s3: S3Server, bucket_name: str, counters: Metrics
) -> None:
    """Four objects: one deleted, one cut short, one with other bytes, one good."""
    blocks = {slot: place.fill(slot, 10 + slot) for slot in range(4)}
    assert await place.medium.write(place.writing(blocks)) == Written(1)
    gone, short, false, good = (NAMES.name_of(block) for block in blocks.values())
    s3.client.delete_object(Bucket=bucket_name, Key=gone)
    s3.client.put_object(Bucket=bucket_name, Key=short, Body=b"\x0b" * 100)
    s3.client.put_object(Bucket=bucket_name, Key=false, Body=b"?" * BLOCK_BYTES)
    wanted = {4 + slot: block for slot, block in blocks.items()}
    done = await read(place, wanted, within_ms=20_000)
    assert done.intact == (False, False, False, True), done
    assert done.reasons == ("gone", "corrupt", "corrupt", "")
    assert place.bytes_of(7) == b"\x0d" * BLOCK_BYTES
    assert place.bytes_of(6)[:1] != b"?", "wrong bytes never reach the arena"
    assert requests(counters, "put") >= 5, "one for each block and one for the probe, or more tries"
    assert good in s3.names(bucket_name)


async def test_a_slot_that_was_reused_is_not_stored_under_a_false_name(
    place: Place, s3: S3Server, bucket_name: str
) -> None:
    """The lease was lost before the copy: that block is lost, its neighbour is not."""
    blocks = {0: place.fill(0, 10), 1: place.fill(1, 11)}
    place.fill(0, 99)
    assert await place.medium.write(place.writing(blocks)) == Written(1, (0,))
    stored = [NAMES.block_of(name) for name in s3.names(bucket_name)]
    assert [block for block in stored if block] == [blocks[1]]


# --- listings and deletes -----------------------------------------------------------------------


async def test_a_bucket_full_of_garbage_is_listed_by_the_page(
    place: Place, s3: S3Server, bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Foreign objects stay, ours of a wrong size go, blocks are found after them."""
    monkeypatch.setattr(bucket_module, "PAGE_MAX", 3)
    blocks = {slot: place.fill(slot, 10 + slot) for slot in range(5)}
    await place.medium.write(place.writing(blocks))
    torn = NAMES.name_of(blocks[0])
    s3.client.put_object(Bucket=bucket_name, Key=torn, Body=b"short")
    [root] = NAMES.roots
    foreign = [f"{root}{name}" for name in ("x", "00/11", "ü%2f ", torn[-40:])] + ["other"]
    for name in foreign:
        s3.client.put_object(Bucket=bucket_name, Key=name, Body=b"theirs")
    medium = place.medium
    assert isinstance(medium, ObjectMedium)
    async with running(medium) as inbox:
        found = await listed(inbox)
        assert {entry.block for entry in found} == set(blocks.values()) - {blocks[0]}
        assert all(0 <= entry.age_ms < 60_000 for entry in found)
        assert len(inbox.of(ObjectsListed)) > 1
        assert listing(medium) == {"ours": 4, "foreign": 4, "wrong_size": 1}
        await wait_until(lambda: torn not in s3.names(bucket_name))
    assert set(foreign) <= set(s3.names(bucket_name))


async def test_what_is_deleted_leaves_the_bucket_unless_it_is_written_again(
    place: Place, s3: S3Server, bucket_name: str, counters: Metrics
) -> None:
    """Evicted blocks go in one request; one that comes back meanwhile stays."""
    blocks = {slot: place.fill(slot, 10 + slot) for slot in range(4)}
    await place.medium.write(place.writing(blocks))
    await place.medium.append(place.removing(*blocks.values()))
    await place.medium.write(place.writing({2: blocks[2]}))
    assert isinstance(place.medium, ObjectMedium)
    async with running(place.medium):
        await wait_until(lambda: requests(counters, "delete") == 1)
    assert len(s3.names(bucket_name)) == 2, "the block that came back, and the probe"
    assert NAMES.name_of(blocks[2]) in s3.names(bucket_name)


async def test_what_is_about_to_be_deleted_is_not_listed(place: Place) -> None:
    """Else a block that was just evicted would come back for the time of a read."""
    blocks = {0: place.fill(0, 10), 1: place.fill(1, 11)}
    await place.medium.write(place.writing(blocks))
    await place.medium.append(place.removing(blocks[0]))
    assert isinstance(place.medium, ObjectMedium)
    async with running(place.medium) as inbox:
        assert [entry.block for entry in await listed(inbox)] == [blocks[1]]


# --- who says no --------------------------------------------------------------------------------


async def test_a_missing_bucket_is_named(s3: S3Server, counters: Metrics) -> None:
    """The text says which variable to look at."""
    medium = make_medium(s3.options("no-such-bucket"), counters)
    failed = await medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "DYN_KVBM_OBJECT_BUCKET no-such-bucket: there is no such bucket" in failed.reason
    medium.close()


async def test_denied_access_is_named_without_the_secret(
    s3: S3Server, bucket_name: str, counters: Metrics
) -> None:
    """At start; and the keys are not told to anybody."""
    medium = make_medium(s3.options(bucket_name), counters)
    s3.require_keys(required=True)
    try:
        failed = await medium.open(0)
    finally:
        s3.require_keys(required=False)
    assert isinstance(failed, StoreFailed)
    assert "DYN_KVBM_OBJECT_ACCESS_KEY and DYN_KVBM_OBJECT_SECRET_KEY do not give" in failed.reason
    assert "secret" not in failed.reason
    assert "secret" not in medium.where
    assert isinstance(await medium.open(0), StoreOpened), "the next try finds it in order"
    medium.close()


async def test_rights_that_are_taken_away_stop_everything_until_they_return(
    place: Place, s3: S3Server
) -> None:
    """Reads fail as failures, not as missing blocks: the table keeps what the bucket has."""
    blocks = {0: place.fill(0, 10), 1: place.fill(1, 11), 2: place.fill(2, 12)}
    await place.medium.write(place.writing(blocks))
    assert isinstance(place.medium, ObjectMedium)
    async with running(place.medium) as inbox:
        s3.require_keys(required=True)
        try:
            done = await read(place, {4: blocks[0], 5: blocks[1], 6: blocks[2]})
            assert done.reasons == ("transfer_failed",) * 3
            await wait_until(lambda: any("ACCESS_KEY" in e.reason for e in inbox.of(StoreDown)))
        finally:
            s3.require_keys(required=False)
        await wait_until(lambda: inbox.of(StoreUp))
        assert (await read(place, {4: blocks[0]})).intact == (True,)


async def test_keys_that_another_program_renews_are_read_again(
    s3: S3Server, bucket_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS' own chain finds them in a file, whose keys end before they are replaced."""
    file, known = tmp_path / "credentials", s3.make_keys()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = replace(s3.options(bucket_name), access_key="", secret_key="")
    bucket = Bucket(options, lambda kind, ok: None)

    def write(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    write("AKIAEND", "secret")
    s3.require_keys(required=True)
    try:
        with pytest.raises(BucketRefused, match="of AWS' own chain do not give access"):
            await bucket.page("kv/", "")
        write(*known)
        assert (await bucket.page("kv/", "")).objects == []
    finally:
        s3.require_keys(required=False)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken", "TokenRefreshRequired"])
async def test_a_session_that_has_ended_is_no_trouble_of_the_endpoint(
    s3: S3Server, bucket_name: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def list_objects_v2(self, **_: object) -> object:
            raise ClientError({"Error": {"Code": code}}, "ListObjectsV2")

    monkeypatch.setattr(bucket_module, "make_client", lambda options, connections: Client())
    bucket = Bucket(s3.options(bucket_name), lambda kind, ok: None)
    with pytest.raises(BucketRefused, match=f"do not give access .*{code}"):
        await bucket.page("kv/", "")


async def test_a_missing_bucket_does_not_empty_the_table(
    place: Place, s3: S3Server, bucket_name: str
) -> None:
    """A bucket that somebody removed answers 404 to everything: nothing is `gone` by that."""
    blocks = {0: place.fill(0, 10)}
    await place.medium.write(place.writing(blocks))
    medium = place.medium
    assert isinstance(medium, ObjectMedium)
    for name in s3.names(bucket_name):
        s3.client.delete_object(Bucket=bucket_name, Key=name)
    s3.client.delete_bucket(Bucket=bucket_name)
    assert (await read(place, {4: blocks[0]}, within_ms=1_000)).reasons == ("transfer_failed",)
    failed = await medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "DYN_KVBM_OBJECT_BUCKET" in failed.reason


# --- who does not answer ------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_server_that_is_away_is_bypassed_probed_and_found_again(
    far: Place, proxy: Proxy
) -> None:
    """Connections are refused: everything ends at once, and starts again by itself."""
    blocks = {0: far.fill(0, 10), 1: far.fill(1, 11), 2: far.fill(2, 12)}
    await far.medium.write(far.writing(blocks))
    assert isinstance(far.medium, ObjectMedium)
    async with running(far.medium) as inbox:
        await listed(inbox)
        proxy.refuses = True
        proxy.drop()
        done = await read(far, {4: blocks[0], 5: blocks[1], 6: blocks[2]}, within_ms=3_000)
        assert done.reasons == ("transfer_failed",) * 3
        lost = await far.medium.write(far.writing({0: blocks[0]}))
        assert isinstance(lost, Written)
        assert lost.lost == (0,)
        await wait_until(lambda: any("ENDPOINT" in e.reason for e in inbox.of(StoreDown)))
        proxy.refuses = False
        await wait_until(lambda: inbox.of(StoreUp))
        assert (await read(far, {4: blocks[0]})).intact == (True,)


async def test_a_server_that_hangs_costs_its_deadline_and_no_late_byte_arrives(
    far: Place, proxy: Proxy
) -> None:
    """Requests are swallowed: the fill ends in time, and its lanes come back later."""
    blocks = {0: far.fill(0, 10)}
    await far.medium.write(far.writing(blocks))
    proxy.swallows = True
    far.fill(4, 44)
    started_s = time.monotonic()
    done = await read(far, {4: blocks[0]}, within_ms=300)
    assert done.reasons == ("transfer_timeout",)
    assert time.monotonic() - started_s < 6.0, "much later than the deadline"
    medium = far.medium
    assert isinstance(medium, ObjectMedium)
    lanes = PARTS[medium].mover.lanes
    assert lanes.taken_count == 1, "NIXL may still write into it"
    proxy.swallows = False
    proxy.drop()
    await wait_until(lambda: lanes.taken_count == 0)
    assert far.bytes_of(4)[:1] == b"\x2c"
    assert (await read(far, {4: blocks[0]})).intact == (True,)


async def test_a_slow_server_is_slow_and_no_more(far: Place, proxy: Proxy) -> None:
    """Every answer takes a while: blocks move side by side and arrive."""
    blocks = {slot: far.fill(slot, 10 + slot) for slot in range(4)}
    await far.medium.write(far.writing(blocks))
    proxy.delay_s, proxy.waiting_max = 0.3, 0
    done = await read(far, {4 + slot: block for slot, block in blocks.items()}, within_ms=20_000)
    assert done.intact == (True,) * 4
    assert proxy.waiting_max >= 2, "one after the other"


@pytest.mark.slow
async def test_a_server_that_dies_with_its_memory_and_comes_back_is_empty(
    mortal_s3: S3Server, counters: Metrics
) -> None:
    """Killed in mid-transfer: failures, then a missing bucket, then, when it is there, `gone`."""
    mortal_s3.start()
    bucket = mortal_s3.make_bucket()
    medium = make_medium(mortal_s3.options(bucket), counters)
    with arena() as made:
        assert isinstance(await medium.open(0), StoreOpened)
        place = Place(made, medium)
        blocks = {0: place.fill(0, 10), 1: place.fill(1, 11), 2: place.fill(2, 12)}
        await medium.write(place.writing(blocks))
        async with running(medium) as inbox:
            await listed(inbox)
            in_flight = asyncio.create_task(medium.write(place.writing(blocks)))
            mortal_s3.kill()
            assert isinstance(await in_flight, Written)
            done = await read(place, {4: blocks[0]}, within_ms=1_000)
            assert done.reasons in (("transfer_failed",), ("transfer_timeout",))
            lost = await medium.write(place.writing(blocks))
            assert isinstance(lost, Written)
            assert lost.failure
            await read(place, {4: blocks[0], 5: blocks[1], 6: blocks[2]}, within_ms=1_000)
            await wait_until(lambda: inbox.of(StoreDown))
            mortal_s3.start()
            mortal_s3.client.create_bucket(Bucket=bucket)
            await wait_until(lambda: inbox.of(StoreUp))
            assert (await read(place, {4: blocks[0]})).reasons == ("gone",)
        medium.close()
