"""A directory as an object store: mounts that go, files that are half there, servers that hang."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.breaker import FAILURES_MAX, PAUSE_MAX_MS
from kvbm_common.wire.verbs import LeaseReply
from kvbm_disk_tier.core.effects import LeaseHost, ProbeStore, ReadSlots, WriteSlots
from kvbm_disk_tier.core.messages import (
    ArenaKnown,
    Leased,
    ReadDone,
    StoreDown,
    StoreFailed,
    StoreOpened,
    StoreUp,
    Tick,
    Written,
)
from kvbm_disk_tier.objects.core import bucket_health
from kvbm_disk_tier.objects.core.answers import FolderList
from kvbm_disk_tier.objects.core.messages import (
    ListingEnded,
    ListingStalled,
    ObjectsListed,
    RangeListed,
)
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.core.paths import path_of
from kvbm_disk_tier.objects.shell import directory as directory_module
from kvbm_disk_tier.objects.shell import file_transport
from kvbm_disk_tier.objects.shell import lister as lister_module
from kvbm_disk_tier.objects.shell.directory import Directory
from kvbm_disk_tier.objects.shell.folders import UNFINISHED, UNFINISHED_MS
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.objects.shell.object_store import BucketError

from tests.services.disk_tier.helpers import arena as core_arena
from tests.services.disk_tier.helpers import block, leased_slot, one
from tests.services.disk_tier.mediums import Inbox, Place, arena
from tests.services.disk_tier.objects.core.test_listing import Bucket, seen
from tests.services.disk_tier.objects.core.test_listing import fill as ask_for
from tests.services.disk_tier.objects.making import LANES, PARTS, listed_of, make_medium, running
from tests.services.disk_tier.shell.test_service import remount
from tests.small_tmpfs import fill, small_tmpfs
from tests.waiting import wait_until

MIB = 1 << 20
SPACE = "ab" * 32


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again at once."""
    monkeypatch.setattr(lister_module, "PAUSE_MAX_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_MAX_S", 0.05)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The directory that hosts have mounted."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


@pytest.fixture
async def place(shared: Path) -> AsyncIterator[Place]:
    """An open store and an arena."""
    medium = make_medium(shared, Metrics())
    with arena() as made:
        assert isinstance(await medium.open(0), StoreOpened)
        yield Place(made, medium)
        medium.close()


def file_of(place: Place, shared: Path, number: int = 10) -> Path:
    """The file of a block that was put."""
    assert isinstance(place.medium, ObjectMedium)
    name = PARTS[place.medium].names.name_of(place.fill(0, number))
    return shared / path_of(name)


async def read(place: Place, number: int = 10, *, within_ms: int = 5_000) -> ReadDone:
    """Read a block into slot 4."""
    done = await place.medium.read(place.reading({4: place.fill(0, number)}, within_ms=within_ms))
    assert isinstance(done, ReadDone)
    return done


# --- two hosts ----------------------------------------------------------------------------------


async def test_what_one_host_writes_the_other_finds_and_reads(shared: Path) -> None:
    """Without a word between them: by the listing, until the first has deleted it."""
    first, second = (make_medium(shared, Metrics(), label=f"h-{n}", list_s=0.05) for n in (1, 2))
    with arena() as here, arena() as there:
        for medium in (first, second):
            assert isinstance(await medium.open(0), StoreOpened)
        writer, reader = Place(here, first), Place(there, second)
        blocks = {slot: writer.fill(slot, 10 + slot) for slot in range(3)}
        assert await first.write(writer.writing(blocks)) == Written(1)
        async with running(second) as inbox:
            await wait_until(lambda: inbox.of(ObjectsListed))
            found = {one.block for page in inbox.of(ObjectsListed) for one in page.objects}
            assert found == set(blocks.values())
            done = await second.read(reader.reading({4 + n: b for n, b in blocks.items()}))
            assert isinstance(done, ReadDone)
            assert done.intact == (True, True, True)
            assert reader.bytes_of(6)[:1] == b"\x0c"
        async with running(first):
            await first.append(writer.removing(blocks[0]))
            await wait_until(lambda: not file_of(writer, shared).exists())
        gone = await second.read(reader.reading({4: blocks[0]}))
        assert isinstance(gone, ReadDone)
        assert gone.reasons == ("gone",)
        first.close()
        second.close()


# --- files --------------------------------------------------------------------------------------


async def test_a_file_is_there_as_a_whole_or_not_at_all(
    place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails in the middle leaves nothing; one that hangs is not listed."""

    def half(fd: int, data: memoryview, offset: int) -> int:
        os.pwrite(fd, data[:100], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file_transport, "write_at", half)
        lost = await place.medium.write(place.writing({0: place.fill(0, 10)}))
    assert isinstance(lost, Written)
    assert lost.lost == (0,)
    folder = file_of(place, shared).parent
    assert list(folder.iterdir()) == []
    (folder / f"{UNFINISHED}1").write_bytes(b"half")
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        assert not inbox.of(ObjectsListed)
    assert (folder / f"{UNFINISHED}1").exists()


async def test_what_a_dead_host_has_left_unfinished_is_removed(place: Place, shared: Path) -> None:
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    left = file_of(place, shared).parent / f"{UNFINISHED}1"
    left.write_bytes(b"half")
    long_ago_s = time.time() - UNFINISHED_MS / 1000 - 60
    os.utime(left, (long_ago_s, long_ago_s))
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
    assert not left.exists()
    assert file_of(place, shared).exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "corrupt"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "corrupt"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), ""),
        (lambda path: path.write_bytes(bytes(5000)), "corrupt"),
        (lambda path: path.unlink(), "gone"),
        (lambda path: pipe(path), "corrupt"),
    ],
)
async def test_a_damaged_file_is_a_miss(
    place: Place, shared: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """Empty, short, of other bytes, gone; one that is too long has the right bytes in front.

    A pipe in its place used to keep a thread for good.
    """
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    damage(file_of(place, shared))
    assert (await read(place)).reasons == (reason,)


# --- file systems in trouble --------------------------------------------------------------------


async def test_what_is_not_mounted_any_more_is_not_empty(place: Place, shared: Path) -> None:
    """1. The file system goes: nothing is listed, read or said to be gone. 2. It is back."""
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
    unmount(shared)
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: len(inbox.of(ListingStalled)) > 2)
        assert not inbox.of(ListingEnded)
        assert (await read(place)).reasons == ("transfer_failed",)
        await place.medium.write(place.writing({0: place.fill(0, 11)}))
        assert os.listdir(shared) == [], "nothing is written where nothing is mounted"
        await wait_until(lambda: inbox.of(StoreDown))
        reasons = " ".join(one.reason for one in inbox.of(StoreDown))
        assert f"KVBM_OBJECT_URL file://{shared}" in reasons
        mount(shared)
        await wait_until(lambda: inbox.of(StoreUp))
        await wait_until(lambda: inbox.of(ListingEnded))
        assert (await read(place)).intact == (True,)


def unmount(shared: Path) -> None:
    """Leave an empty directory in its place."""
    shared.rename(shared.with_name("away"))
    shared.mkdir()


def mount(shared: Path) -> None:
    """Have it back."""
    shared.rmdir()
    shared.with_name("away").rename(shared)


async def test_a_probe_makes_nothing_where_nothing_is_mounted(place: Place, shared: Path) -> None:
    """The folder of an empty mount point would be hidden, and full, beneath the file system."""
    unmount(shared)
    failed = await place.medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "is the file system mounted?" in failed.reason
    assert os.listdir(shared) == []


async def test_another_file_system_in_its_place_is_not_believed(place: Place, shared: Path) -> None:
    """It has a mark as well, of another store."""
    (shared / "kv/kvbm-store").write_text("0" * 32)
    failed = await place.medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "another store" in failed.reason


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"0" * 31, b"0" * 33, b"0" * 1_000_000])
async def test_a_damaged_mark_is_named_and_the_store_goes_on_when_it_is_whole_again(
    place: Place, shared: Path, text: bytes
) -> None:
    """1. While the tier runs: a reason, and nothing ends. 2. At its start, too. 3. It is whole."""
    mark = shared / "kv/kvbm-store"
    whole = mark.read_bytes()
    mark.write_bytes(text)
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(StoreDown))
        (down, *_) = inbox.of(StoreDown)
        assert not inbox.of(ListingEnded)
        for medium in (_medium(place), make_medium(shared, Metrics())):
            failed = await medium.open(0)
            assert isinstance(failed, StoreFailed)
            for reason in (down.reason, failed.reason):
                assert f"KVBM_OBJECT_URL file://{shared} cannot be used: {mark} holds" in reason
                assert "should hold the 32 hex digits" in reason
        mark.write_bytes(whole)
        await wait_until(lambda: inbox.of(StoreUp))
        await wait_until(lambda: inbox.of(ListingEnded))


def pipe(path: Path) -> None:
    """Put a pipe there: nobody writes into it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


async def test_a_pipe_or_a_folder_in_the_place_of_the_mark_holds_up_nothing(
    place: Place, shared: Path
) -> None:
    mark = shared / "kv/kvbm-store"
    pipe(mark)
    failed = await place.medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert f"{mark} holds nothing" in failed.reason
    mark.unlink()
    mark.mkdir()
    failed = await place.medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "directory" in failed.reason


@pytest.mark.parametrize(
    "put",
    [
        lambda folder: pipe(folder / "pipe"),
        lambda folder: (folder / "loop").symlink_to("loop"),
        lambda folder: (folder / "above").symlink_to("."),
        lambda folder: (folder / "nowhere").symlink_to("missing"),
    ],
    ids=["pipe", "loop", "above", "nowhere"],
)
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_what_is_neither_file_nor_folder_is_skipped_and_counted(
    place: Place, shared: Path, put: Callable[[Path], None], depth: int
) -> None:
    """In a namespace's folder, in one of its folders by digits, and beside the namespaces."""
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    put(file_of(place, shared).parents[depth])
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        assert [len(page.objects) for page in inbox.of(ObjectsListed)] == [1]
        assert not inbox.of(ListingStalled)
    assert listed_of(_medium(place), "odd") >= 1
    assert listed_of(_medium(place), "foreign") == 0


def put_files(shared: Path, *paths: str) -> None:
    """Have files of 16 bytes in folders of one namespace: the paths are those below it."""
    for path in paths:
        file = shared / "kv/v2" / SPACE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(16))


def object_of(digits: str, number: int) -> str:
    """The path of an object that `put_files` makes."""
    return f"{digits}/{digits}{number:029x}.{'0' * 32}.16.1.{'0' * 16}"


OBJECTS = [object_of("000", 0), *(object_of("111", number) for number in range(3))]


@pytest.mark.parametrize(
    "odd",
    [
        "000/zzz",
        "111/.nfs0001",
        "111/README~",
        f"111/222{0:029x}.x",
        f"11/11{0:030x}.x",
        f"111-/111-/111{0:029x}.x",
        f"../000/000{0:029x}.x",
        f"../{'ab' * 31}-/000/000{0:029x}.x",
    ],
)
@pytest.mark.parametrize("page", [1, 2, 3])
async def test_a_listing_goes_on_after_what_has_an_odd_name(
    shared: Path, monkeypatch: pytest.MonkeyPatch, odd: str, page: int
) -> None:
    """It ended the service, or hid the folders after it, where it was the last of a page."""
    monkeypatch.setattr(directory_module, "PAGE_MAX", page)
    put_files(shared, *OBJECTS, odd)
    medium = make_medium(shared, Metrics())
    assert isinstance(await medium.open(0), StoreOpened)
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        assert names_of(inbox) == OBJECTS
    assert listed_of(medium, "odd") > 0
    medium.close()


def names_of(inbox: Inbox) -> list[str]:
    """The paths of what listings have named."""
    blocks = [one.block for page in inbox.of(ObjectsListed) for one in page.objects]
    names = [Names("kv").name_of(block) for block in blocks]
    return [path_of(name).removeprefix(f"kv/v2/{SPACE}/") for name in names]


@pytest.mark.parametrize("failing", ["os.scandir", "pathlib.Path.stat"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
async def test_what_cannot_be_read_is_left_out_of_a_listing(
    shared: Path, monkeypatch: pytest.MonkeyPatch, failing: str, number: int
) -> None:
    """One folder or file took the whole store down, again and again."""
    put_files(shared, *OBJECTS)
    call = os.scandir if failing == "os.scandir" else Path.stat

    def fail(path: Any, **named: Any) -> Any:
        if Path(path).name[:3] == "111":
            raise OSError(number, os.strerror(number))
        return call(path, **named)

    monkeypatch.setattr(failing, fail)
    medium = make_medium(shared, Metrics(), list_s=0.05)
    assert isinstance(await medium.open(0), StoreOpened)
    async with running(medium) as inbox:
        await wait_until(lambda: len(inbox.of(ListingEnded)) > 3)
        assert set(names_of(inbox)) == {OBJECTS[0]}
        assert not inbox.of(ListingStalled)
        assert not inbox.of(StoreDown)
        assert not any(one.is_whole for one in inbox.of(RangeListed))
        assert listed_of(medium, "unread") > 0
        monkeypatch.undo()
        await wait_until(lambda: inbox.of(RangeListed)[-1].is_whole)
        assert set(names_of(inbox)) == set(OBJECTS)
    medium.close()


async def test_a_list_of_namespaces_says_what_it_could_not_read(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a namespace that is not on it are not gone then."""
    put_files(shared, *OBJECTS)
    store = Directory(shared, lambda *_: None, lambda *_: None)
    await store.probe("kv/probe/h-0/", write=True)
    assert await store.folders("kv/v2/") == FolderList([f"kv/v2/{SPACE}/"])

    def fail(_path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", fail)
    found = await store.folders("kv/v2/")
    assert found.prefixes == []
    assert os.strerror(errno.EIO) in found.unread


async def test_a_file_server_whose_clock_jumps_ahead_ages_nothing(
    place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was resumed stamps two days ahead for a moment: all files had expired."""
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    touch = Path.touch

    def touch_ahead(path: Path, **named: Any) -> None:
        touch(path, **named)
        ahead_s = time.time() + 2 * 86_400
        os.utime(path, (ahead_s, ahead_s))

    monkeypatch.setattr(Path, "touch", touch_ahead)
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        (page,) = inbox.of(ObjectsListed)
        assert page.objects[0].age_ms < 60_000


async def test_ages_are_told_by_the_file_server_however_wrong_our_clock_is(
    place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was two hours ahead deleted what others had stored, or were about to store."""
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    other = file_of(place, shared).parent / f"{UNFINISHED}1"
    other.write_bytes(b"half")
    time_ns = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: time_ns() + 7_200 * 10**9)
    medium = make_medium(shared, Metrics())
    assert isinstance(await medium.open(0), StoreOpened)
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        (page,) = inbox.of(ObjectsListed)
        assert page.objects[0].age_ms < 60_000
    assert other.exists()
    medium.close()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_mark_is_made_once_where_a_file_system_has_no_links(
    shared: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Another host may have made one meanwhile, and uses it: it was replaced."""
    mark = shared / "kv/kvbm-store"

    def link(*_: Any) -> None:
        if not is_first:
            mark.write_text("a" * 32)
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.link", link)
    medium = make_medium(shared, Metrics())
    assert isinstance(await medium.open(0), StoreOpened)
    assert len(mark.read_text()) == 32
    assert (mark.read_text() == "a" * 32) != is_first
    assert [path.name for path in mark.parent.iterdir() if path.is_file()] == ["kvbm-store"]
    medium.close()


async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    medium = make_medium(tmp_path / "missing", Metrics())
    failed = await medium.open(0)
    assert isinstance(failed, StoreFailed)
    assert "missing cannot be used" in failed.reason
    assert "there is no such directory" in failed.reason
    (tmp_path / "missing").mkdir()
    assert isinstance(await medium.open(0), StoreOpened)
    medium.close()


@asynccontextmanager
async def judged(medium: ObjectMedium) -> AsyncIterator[tuple[Bucket, Callable[..., Any]]]:
    """A core that knows block 10 and hears all that the medium says; and what writes a block."""
    bucket = Bucket(objects={block(10): 0})
    bucket.step(ArenaKnown(core_arena()))
    async with running(medium) as inbox:

        async def put(place: Place, number: int) -> Written:
            """Write a block, and give the core the outcome as that of a write of its own."""
            done = await medium.write(place.writing({0: place.fill(0, number)}))
            assert isinstance(done, Written)
            lease = one(seen(bucket, 2 * number), LeaseHost)
            reply = LeaseReply(lease=1, slots=[leased_slot(2 * number)])
            write = one(bucket.step(Leased(lease.write, reply)), WriteSlots)
            bucket.step(replace(done, write=write.write))
            for said in inbox.of(StoreDown):
                bucket.step(said)
            return done

        yield bucket, put


async def probed(bucket: Bucket, medium: ObjectMedium) -> None:
    """Let the pause end, and tell the core what a probe has found."""
    bucket.now_ms += PAUSE_MAX_MS
    bucket.step(await medium.probe(one(bucket.step(Tick()), ProbeStore)))


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "read only"])
async def test_a_full_or_read_only_file_system_is_read_from(tmp_path: Path, trouble: str) -> None:
    """What cannot be written is lost, readiness says why, and with room it goes on by itself."""
    with small_tmpfs(tmp_path / "mounted", 2 * MIB) as directory, arena() as made:
        medium = make_medium(directory, Metrics())
        assert isinstance(await medium.open(0), StoreOpened)
        place = Place(made, medium)
        await medium.write(place.writing({0: place.fill(0, 10)}))
        async with judged(medium) as (bucket, put):
            filler = fill(directory) if trouble == "full" else None
            if filler is None:
                remount(directory, "ro")
            for number in range(11, 11 + FAILURES_MAX):
                lost = await put(place, number)
                assert lost.lost == (0,)
            told = bucket.core.view.statistics()
            assert not told.ready
            assert "the object store takes no blocks: blocks cannot be written" in told.reasons[0]
            assert one(ask_for(bucket, 10), ReadSlots)
            assert (await read(place)).intact == (True,)
            await probed(bucket, medium)
            words = {"full": "No space left", "read only": "Read-only file system"}[trouble]
            assert words in bucket.core.view.statistics().reasons[0]
            again = await make_medium(directory, Metrics()).open(0)
            assert isinstance(again, StoreOpened), "the next life reads from it, too"
            assert words in again.write_failure
            if filler is None:
                remount(directory, "rw")
            else:
                filler.unlink()
            await probed(bucket, medium)
            assert bucket.core.view.statistics().ready
            assert (await put(place, 20)).lost == ()
        medium.close()


@pytest.mark.slow
async def test_a_file_that_cannot_be_opened_fails_alone(
    place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is listed, and it has the right size. Each read of it took the whole store out."""
    for number in (10, 11):
        await place.medium.write(place.writing({0: place.fill(0, number)}))
    bad, open_file = file_of(place, shared, 11), os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path) == bad:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    async with running(_medium(place)) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        for _ in range(bucket_health.TROUBLES_MAX):
            assert (await read(place, 11)).reasons == ("transfer_failed",)
        assert (await read(place, 10)).intact == (True,)
        assert not inbox.of(StoreDown)


async def test_a_probe_needs_room_each_time(tmp_path: Path) -> None:
    """Its own file of the last time has its room already: writing it again proves nothing."""
    with small_tmpfs(tmp_path / "mounted", 2 * MIB) as directory:
        store = Directory(directory, lambda *_: None, lambda *_: None)
        await store.probe("kv/probe/h-0/", write=True)
        fill(directory)
        with pytest.raises(BucketError, match="No space left"):
            await store.probe("kv/probe/h-0/", write=True)
        assert os.listdir(directory / "kv/probe/h-0") == []


async def test_a_file_server_that_hangs_costs_deadlines_and_no_late_byte_arrives(
    place: Place, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads, lists and writes hang for a while; the loop does not, and the lanes come back."""
    await place.medium.write(place.writing({0: place.fill(0, 10)}))
    goes_on = threading.Event()
    open_file, scandir = os.open, os.scandir

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        def hanging(path: Any, *arguments: Any, **named: Any) -> Any:
            if str(path).startswith(str(shared)):
                goes_on.wait(30)
            return function(path, *arguments, **named)

        return hanging

    monkeypatch.setattr("os.open", hang(open_file))
    monkeypatch.setattr("os.scandir", hang(scandir))
    monkeypatch.setattr(directory_module, "CALL_DEADLINE_S", 0.2)
    place.fill(4, 44)
    medium = _medium(place)
    async with running(medium) as inbox:
        started_s = time.monotonic()
        outcomes = await asyncio.gather(*(read(place, within_ms=300) for _ in range(2 * LANES)))
        assert {done.reasons for done in outcomes} <= {
            ("transfer_timeout",), ("deadline_exceeded",), ("transfer_failed",)
        }  # fmt: skip
        assert time.monotonic() - started_s < 3.0
        assert PARTS[medium].mover.lanes.taken_count == LANES
        await wait_until(lambda: inbox.of(ListingStalled))
        await wait_until(lambda: "not answered" in "".join(e.reason for e in inbox.of(StoreDown)))
        goes_on.set()
        await wait_until(lambda: PARTS[medium].mover.lanes.taken_count == 0)
        assert place.bytes_of(4)[:1] == b"\x2c"
        await wait_until(lambda: inbox.of(StoreUp))
        assert (await read(place)).intact == (True,)


def _medium(place: Place) -> ObjectMedium:
    assert isinstance(place.medium, ObjectMedium)
    return place.medium


# --- settings -----------------------------------------------------------------------------------


def test_a_url_is_enough() -> None:
    """For a directory, and for a bucket, whose other settings stay as they are."""
    files = Settings.load({"KVBM_OBJECT_URL": "file:///mnt/kv/"})
    assert (files.object_enabled, files.object_directory) == (True, Path("/mnt/kv"))
    bucket = Settings.load({"KVBM_OBJECT_URL": "s3://kv", "DYN_KVBM_OBJECT_REGION": "x"})
    assert (bucket.object_enabled, bucket.object_directory) == (True, None)
    assert (bucket.object_bucket, bucket.object_region) == ("kv", "x")
    assert not Settings.load({}).object_enabled


@pytest.mark.parametrize(
    "url", ["/mnt/kv", "file://mnt/kv", "file:///", "s3://kv/path", "s3://", "nfs://host/kv"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"KVBM_OBJECT_URL.*file:///DIRECTORY or s3://BUCKET"):
        Settings.load({"KVBM_OBJECT_URL": url})


def test_two_names_for_the_bucket_are_refused() -> None:
    with pytest.raises(ConfigError, match="DYN_KVBM_OBJECT_BUCKET"):
        Settings.load({"KVBM_OBJECT_URL": "s3://kv", "DYN_KVBM_OBJECT_BUCKET": "other"})
