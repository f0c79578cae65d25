"""A store that answers what S3 would not: nothing is believed, nothing ends, and it goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from kvbm_common.runtime.metrics import Metrics
from kvbm_disk_tier.core.messages import DeletesRefused, ReadDone, StoreDown, StoreUp, Written
from kvbm_disk_tier.objects.core import bucket_health
from kvbm_disk_tier.objects.core.messages import (
    ListedBlock,
    ListingEnded,
    ListingStalled,
    ObjectsListed,
)
from kvbm_disk_tier.objects.core.names import Names
from kvbm_disk_tier.objects.shell import bucket as bucket_module
from kvbm_disk_tier.objects.shell import lister as lister_module
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.calls import THREADS
from kvbm_disk_tier.objects.shell.medium import ObjectMedium
from kvbm_disk_tier.objects.shell.object_store import BucketError

from tests.services.disk_tier.helpers import block
from tests.services.disk_tier.mediums import Place, arena
from tests.services.disk_tier.objects.making import PREFIX, make_medium, running
from tests.services.disk_tier.objects.odd_server import Answer, OddServer, http, listing
from tests.services.disk_tier.s3_server import Proxy, S3Server
from tests.waiting import wait_until

NAMES = Names(PREFIX)
[ROOT] = NAMES.roots
OURS = NAMES.name_of(block(1))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again at once."""
    monkeypatch.setattr(lister_module, "PAUSE_MAX_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_S", 0.02)
    monkeypatch.setattr(bucket_health, "PAUSE_MAX_S", 0.05)


@pytest.fixture
async def odd() -> AsyncIterator[OddServer]:
    """A server that lists nothing, as it should."""
    server = OddServer()
    listener = await server.serve()
    yield server
    listener.close()
    server.drop()


@pytest.fixture
async def medium(odd: OddServer) -> AsyncIterator[ObjectMedium]:
    """An open medium on it."""
    made = make_medium(odd.options, Metrics())
    await made.open(0)
    yield made
    made.close()


def always(answer: bytes) -> Answer:
    """The same to every request."""
    return lambda _method, _query: answer


MAINTENANCE = "<html><body><h1>We are down for maintenance</h1></body></html>"
ODD: dict[str, Answer] = {
    "a maintenance page": always(http("<!DOCTYPE html><html><p>Back soon<br></html>")),
    "a well-formed page": always(http(MAINTENANCE)),
    "an empty body": always(http("")),
    "no content": always(http("", status="204 No Content")),
    "JSON": always(http('{"error": "busy"}')),
    "half of a listing": always(http(listing(OURS, prefix=ROOT)[:300])),
    "a body that is cut off": always(http(listing(OURS, prefix=ROOT)[:-1], length=9_000)),
    "another listing": always(http(listing("other", prefix=""))),
    "names of others": always(http(listing("other", prefix=ROOT))),
    "cut off without names": always(http(listing(prefix=ROOT, truncated="true"))),
    "a size that is none": always(http(listing(OURS, prefix=ROOT, size="large"))),
    "a date that is none": always(http(listing(OURS, prefix=ROOT, stored="yesterday"))),
    "a storm of 503": always(http("<Error><Code>SlowDown</Code></Error>", status="503 Slow Down")),
    "a redirection": always(http("", status="302 Found")),
    "nonsense": always(b"\x00\xff\r\n\r\n"),
    "nothing": always(b""),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ODD)
async def test_what_is_no_listing_stalls_it_and_it_goes_on(
    odd: OddServer, medium: ObjectMedium, what: str
) -> None:
    """1. Nothing of it is used. 2. The reason names the variable. 3. Sense again: it is listed."""
    odd.answer = ODD[what]
    async with running(medium) as inbox:
        await wait_until(lambda: len(inbox.of(ListingStalled)) >= 3)
        await wait_until(lambda: inbox.of(StoreDown))
        assert not inbox.of(ListingEnded)
        assert not inbox.of(ObjectsListed)
        reason = inbox.of(StoreDown)[0].reason
        assert reason.startswith("DYN_KVBM_OBJECT_ENDPOINT http://127.0.0.1:")
        odd.answer = sane
        await wait_until(lambda: inbox.of(ListingEnded))
        [page] = inbox.of(ObjectsListed)
        assert [found.block for found in page.objects] == [block(1)]
        await wait_until(lambda: inbox.of(StoreUp))


async def test_a_redirection_to_nowhere_is_one_request(
    odd: OddServer, medium: ObjectMedium
) -> None:
    """botocore asks for the bucket's region, and is redirected, and asks for the region."""
    store = Bucket(odd.options, lambda _kind, _ok: None)
    odd.answer = ODD["a redirection"]
    odd.requests.clear()
    with pytest.raises(
        BucketError, match=r"DYN_KVBM_OBJECT_ENDPOINT .* cannot be used: Redirected"
    ):
        await store.page(ROOT, "")
    assert len(odd.requests) == bucket_module.TRIES


def sane(method: str, query: dict[str, str]) -> bytes:
    """One block, and what else a store says."""
    if method != "GET":
        return http("")
    prefix, after = query.get("prefix", ""), query.get("start-after", "")
    names = [OURS] if OURS.startswith(prefix) and after < OURS else []
    return http(listing(*names, prefix=prefix, size=str(block(1).bytes)))


@pytest.mark.parametrize("date", ["", "soon", "Thu, 01 Jan 2099 00:00:00 GMT", "0"])
async def test_a_date_that_is_none_makes_nothing_old(
    odd: OddServer, medium: ObjectMedium, date: str
) -> None:
    """The header of an answer: else a TTL would delete everything."""
    stored = "2026-11-24T10:00:00.000Z"
    expected = (await listed_by(odd, medium, stored))[0].age_ms
    odd.answer = lambda method, query: (
        http(listing(OURS, prefix=ROOT, size=str(block(1).bytes)), date=date)
        if method == "GET" else http("")
    )  # fmt: skip
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        [page] = inbox.of(ObjectsListed)
    assert abs(page.objects[0].age_ms - expected) < 60_000


async def listed_by(odd: OddServer, medium: ObjectMedium, stored: str) -> list[ListedBlock]:
    """What a sane answer is."""
    odd.answer = lambda method, query: (
        http(listing(OURS, prefix=ROOT, size=str(block(1).bytes), stored=stored))
        if method == "GET" else http("")
    )  # fmt: skip
    async with running(medium) as inbox:
        await wait_until(lambda: inbox.of(ListingEnded))
        [page] = inbox.of(ObjectsListed)
    return list(page.objects)


async def test_truncated_pages_without_a_token_are_followed_by_name(odd: OddServer) -> None:
    """Three names, one on each page, none with a token; a page that comes again is refused."""
    names = [f"{ROOT}{letter}" for letter in "abc"]

    def answer(_method: str, query: dict[str, str]) -> bytes:
        left = [name for name in names if name > query.get("start-after", "")]
        return http(listing(*left[:1], prefix=query["prefix"],
                            truncated=str(len(left) > 1).lower()))  # fmt: skip

    odd.answer = answer
    bucket = Bucket(odd.options, lambda _kind, _ok: None)
    after, found = "", []
    while True:
        page = await bucket.page(ROOT, after)
        found += [one.name for one in page.objects]
        after = page.last_name
        if not page.more:
            break
    assert found == names
    odd.answer = always(http(listing(names[0], prefix=ROOT, truncated="true")))
    with pytest.raises(BucketError, match="do not ascend"):
        await bucket.page(ROOT, names[0])


@pytest.mark.slow
async def test_a_dripping_connection_is_cut_and_its_thread_ends(
    odd: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than threads: the next call finds a turn at once."""
    bucket = Bucket(odd.options, lambda _kind, _ok: None)
    assert await bucket.size("x") is None
    monkeypatch.setattr(bucket_module, "CALL_DEADLINE_S", 0.5)
    odd.drips = True
    calls = [bucket.size("x") for _ in range(2 * THREADS)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all("has not answered within 0.5 s" in str(outcome) for outcome in outcomes)
    monkeypatch.undo()
    odd.drips = False
    assert await bucket.size("x") is None
    await wait_until(lambda: not [t for t in threading.enumerate() if t.name == "object store"])


@pytest.mark.parametrize(
    "answer",
    [
        http(MAINTENANCE),
        http(""),
        http("<DeleteResult><Error><Code>InternalError</Code></Error></DeleteResult>"),
        http("<DeleteResult><Error/></DeleteResult>"),
    ],
    ids=["maintenance", "empty", "error", "error without a code"],
)
async def test_an_odd_answer_to_a_delete_ends_nothing(
    odd: OddServer, medium: ObjectMedium, answer: bytes
) -> None:
    odd.answer = lambda method, query: answer if method == "POST" else sane(method, query)
    with arena() as made:
        place = Place(made, medium)
        await medium.append(place.removing(block(1)))
        async with running(medium) as inbox:
            await wait_until(lambda: [one for one in odd.requests if one[0] == "POST"])
            await wait_until(lambda: inbox.of(ListingEnded))


async def test_an_answer_that_refuses_each_delete_is_told_with_its_reason(
    odd: OddServer, medium: ObjectMedium
) -> None:
    """1. 200, with AccessDenied for the one name, which may be locked: the tier stays ready.
    2. The keys may delete now: it is gone."""
    error = f"<Error><Key>{OURS}</Key><Code>AccessDenied</Code></Error>"
    answer = http(f"<DeleteResult>{error}</DeleteResult>")
    odd.answer = lambda method, query: answer if method == "POST" else sane(method, query)
    with arena() as made:
        await medium.append(Place(made, medium).removing(block(1)))
        async with running(medium) as inbox:
            await wait_until(lambda: inbox.of(DeletesRefused))
            waits = "objects wait to be deleted: 1 (AccessDenied)"
            assert inbox.of(DeletesRefused) == [DeletesRefused("", waits)]
            assert not inbox.of(StoreDown), "reads and writes go on"
            answer = http("<DeleteResult></DeleteResult>")
            await wait_until(lambda: len(inbox.of(DeletesRefused)) > 1)
            assert inbox.of(DeletesRefused)[-1] == DeletesRefused("")


@pytest.mark.slow
async def test_a_maintenance_page_for_an_object_deletes_nothing(
    s3: S3Server, bucket_name: str, proxy: Proxy
) -> None:
    """1. A block is stored. 2. Every request is answered with a page: the block is not lost.
    3. The store is back: it is read."""
    medium = make_medium(s3.options(bucket_name, endpoint=proxy.endpoint), Metrics())
    with arena() as made:
        await medium.open(0)
        place = Place(made, medium)
        blocks = {0: place.fill(0, 10)}
        assert await medium.write(place.writing(blocks)) == Written(1)
        proxy.page = http(MAINTENANCE)
        proxy.drop()
        done = await medium.read(place.reading({4: blocks[0]}, within_ms=3_000))
        assert isinstance(done, ReadDone)
        assert done.intact == (False,)
        assert not {"corrupt", "gone"} & set(done.reasons), done
        proxy.page = b""
        proxy.drop()
        done = await medium.read(place.reading({4: blocks[0]}, within_ms=5_000))
        assert isinstance(done, ReadDone)
        assert done.intact == (True,)
    medium.close()
