"""The object store on a real NATS: whole objects or errors, and NATS's own format."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import nats
import pytest
from kvbm_common.nats import object_store
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.object_store import CHUNK_BYTES, ObjectBroken, ObjectStore, ObjectTooLarge

from tests.waiting import ask_until

LARGE = hashlib.shake_128(b"object").digest(2 * CHUNK_BYTES + 17)


@pytest.fixture
def store(bus: Bus) -> ObjectStore:
    """An empty bucket."""
    return ObjectStore(bus, "things", bytes_max=1 << 26)


async def test_an_object_comes_back(store: ObjectStore) -> None:
    assert await store.info("a") is None
    for content in (LARGE, b"x"):
        await store.put("a", content, nuid=str(len(content)), metadata={"position": "7"})
        info = await store.info("a")
        assert info is not None
        assert (info.size, info.metadata) == (len(content), {"position": "7"})
        assert await store.get(info, deadline_s=5) == content


async def test_the_object_before_leaves_nothing(store: ObjectStore, bus: Bus) -> None:
    for nuid in ("one", "two"):
        before = await store.put("a", LARGE, nuid=nuid, metadata={})
    state = msgspec.json.decode(await call_api(bus, "STREAM.INFO.OBJ_things"))["state"]
    assert state["messages"] == before.chunks + 1


async def test_an_object_that_is_replaced_meanwhile_is_broken(store: ObjectStore) -> None:
    before = await store.put("a", LARGE, nuid="one", metadata={})
    await store.put("a", LARGE, nuid="two", metadata={})
    with pytest.raises(ObjectBroken):
        await store.get(before, deadline_s=0.2)


async def test_another_content_is_broken(store: ObjectStore) -> None:
    info = await store.put("a", LARGE, nuid="one", metadata={})
    wrong = msgspec.structs.replace(info, digest="SHA-256=no")
    with pytest.raises(ObjectBroken):
        await store.get(wrong, deadline_s=5)


@pytest.mark.parametrize(
    "description", [b"", b"garbage", b'{"name":"\xff"}', b'{"x":' + b"[" * 9_999]
)
async def test_a_description_that_cannot_be_read_is_replaced(
    store: ObjectStore, bus: Bus, description: bytes
) -> None:
    """Goal: what another client has written under a name ends no reader, and no writer for good."""
    await store.put("a", b"x", nuid="one", metadata={})
    await bus.request_raw("$O.things.M.YQ==", description, deadline_s=2)
    with pytest.raises(ObjectBroken):
        await store.info("a")
    info = await store.put("a", b"y", nuid="two", metadata={})
    assert await store.info("a") == info
    assert await store.get(info, deadline_s=5) == b"y"


async def test_a_writer_that_died_is_not_noticed(store: ObjectStore, bus: Bus) -> None:
    """Chunks without a description are nobody's."""
    await store.put("a", b"x", nuid="one", metadata={})
    await bus.request_raw("$O.things.C.dead", LARGE[:CHUNK_BYTES], deadline_s=2)
    info = await store.info("a")
    assert info is not None
    assert await store.get(info, deadline_s=5) == b"x"


async def test_a_writer_that_died_leaves_nothing_to_the_next(
    store: ObjectStore, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: dead writers never fill the bucket, whose limit would drop chunks that are named."""
    await store.put("b", b"z", nuid="kept", metadata={})
    await store.put("a", b"x", nuid="one", metadata={})
    await bus.request_raw("$O.things.C.dead", LARGE[:CHUNK_BYTES], deadline_s=2)
    await store.put("a", b"y", nuid="two", metadata={})
    assert await chunk_subjects(bus) == {"dead", "kept", "two"}, "its writer may live still"
    monkeypatch.setattr(object_store, "ABANDONED_S", 0.0)
    await store.put("a", b"y", nuid="three", metadata={})
    assert await chunk_subjects(bus) == {"kept", "three"}


async def chunk_subjects(bus: Bus) -> set[str]:
    """Whose chunks the bucket `things` has, by `nuid`."""
    payload = await call_api(bus, "STREAM.INFO.OBJ_things", {"subjects_filter": "$O.things.C.>"})
    return {name.split(".")[-1] for name in msgspec.json.decode(payload)["state"]["subjects"]}


async def test_the_nats_client_reads_it(store: ObjectStore, nats_url: str) -> None:
    """Goal: `nats object get` works on what we write."""
    await store.put("a", LARGE, nuid="one", metadata={})
    client = await nats.connect(nats_url)
    theirs = await client.jetstream().object_store("things")
    assert (await theirs.get("a")).data == LARGE
    await client.close()


async def test_an_object_that_fits_only_once_is_refused_before_a_byte_is_written(bus: Bus) -> None:
    """The bucket would drop the oldest chunks of the new object, or of the one that is there."""
    small = ObjectStore(bus, "small", bytes_max=2 * len(LARGE) - 1)
    before = await small.put("a", b"x", nuid="one", metadata={})
    with pytest.raises(ObjectTooLarge, match="room for two"):
        await small.put("a", LARGE, nuid="two", metadata={})
    assert await small.info("a") == before
    assert await small.get(before, deadline_s=5) == b"x"


async def test_a_writer_that_was_overtaken_leaves_no_chunks(bus: Bus) -> None:
    """A long object is being written when a short one is written whole: of each name one stays."""
    slow, fast = (ObjectStore(bus, "pair", bytes_max=1 << 27) for _ in range(2))
    await slow.put("a", LARGE, nuid="old", metadata={})
    before = await messages(bus)
    writing = asyncio.create_task(slow.put("a", 20 * LARGE, nuid="slow", metadata={}))
    await ask_until(lambda: more_than(bus, before))
    await fast.put("a", b"x", nuid="fast", metadata={})
    await writing
    info = await fast.info("a")
    assert info is not None
    assert await messages(bus) == info.chunks + 1
    assert len(await fast.get(info, deadline_s=5)) == info.size


async def test_a_bucket_that_others_fill_refuses_and_keeps_what_it_has(bus: Bus) -> None:
    """Three objects fit; the fourth writer is refused, alone or beside another."""
    size = len(LARGE)
    stores = [ObjectStore(bus, "pair", bytes_max=4 * size) for _ in range(2)]
    kept = [await stores[0].put(name, LARGE, nuid=name, metadata={}) for name in "abc"]
    with pytest.raises(ObjectTooLarge):
        await stores[0].put("c", LARGE, nuid="c2", metadata={})
    for info in kept:
        assert await stores[0].get(info, deadline_s=5) == LARGE


async def test_writers_at_once_without_room_for_all_leave_what_was_there(bus: Bus) -> None:
    """Each finds room for its own; together they have none. What fails leaves no chunk."""
    stores = [ObjectStore(bus, "pair", bytes_max=3 * len(LARGE)) for _ in range(4)]
    await stores[0].put("a", LARGE, nuid="old", metadata={})
    await asyncio.gather(
        *(one.put("a", LARGE, nuid=str(number), metadata={}) for number, one in enumerate(stores)),
        return_exceptions=True,
    )
    info = await stores[0].info("a")
    assert info is not None
    assert await stores[0].get(info, deadline_s=5) == LARGE
    assert await messages(bus) == info.chunks + 1


class Standing:
    """A connection that stands still before its first question about a subject."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus, self._subject = bus, subject.encode()
        self.stands, self.goes_on = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def request_raw(self, subject: str, payload: bytes, **options: Any) -> Any:
        if self._subject in payload:
            self.stands.set()
            await self.goes_on.wait()
        return await self._bus.request_raw(subject, payload, **options)


async def test_a_writer_that_stood_still_describes_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another has taken it for dead: the object that was there stays."""
    link = Standing(bus, "$O.pair.C.slow")
    links: list[Any] = [link, bus]
    slow, other = (ObjectStore(one, "pair", bytes_max=1 << 27) for one in links)
    before = await slow.put("a", LARGE, nuid="old", metadata={})
    monkeypatch.setattr(object_store, "ABANDONED_S", -60.0)
    writing = asyncio.create_task(slow.put("a", LARGE, nuid="slow", metadata={}))
    async with asyncio.timeout(30):
        await link.stands.wait()
    await other.put("b", b"x", nuid="other", metadata={})
    link.goes_on.set()
    with pytest.raises(ObjectBroken, match="chunks are left"):
        await writing
    assert await slow.info("a") == before
    assert await slow.get(before, deadline_s=5) == LARGE
    assert await messages(bus) == before.chunks + 3


async def test_writers_at_once_leave_one_object(bus: Bus) -> None:
    """Forty describe one name within some milliseconds; those that give up leave no chunk."""
    stores = [ObjectStore(bus, "pair", bytes_max=1 << 27) for _ in range(40)]
    await asyncio.gather(
        *(one.put("a", b"x", nuid=str(number), metadata={}) for number, one in enumerate(stores)),
        return_exceptions=True,
    )
    info = await stores[0].info("a")
    assert info is not None
    assert await stores[0].get(info, deadline_s=5) == b"x"
    assert await messages(bus) == 2, "a chunk and a description"


async def messages(bus: Bus) -> int:
    """How many messages the bucket has."""
    state = msgspec.json.decode(await call_api(bus, "STREAM.INFO.OBJ_pair"))["state"]
    return int(state["messages"])


async def more_than(bus: Bus, count: int) -> bool:
    """Whether the bucket has more messages than before."""
    return await messages(bus) > count
