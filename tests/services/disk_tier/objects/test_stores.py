"""What every object store promises of its names: the same suite over two S3 servers of different
makers, and a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_disk_tier.objects.core.answers import FolderList
from kvbm_disk_tier.objects.core.paths import path_of
from kvbm_disk_tier.objects.shell import bucket as bucket_module
from kvbm_disk_tier.objects.shell import directory as directory_module
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.directory import Directory
from kvbm_disk_tier.objects.shell.object_store import ObjectStore

from tests.services.disk_tier.s3_server import S3Server

STORES = [
    "s3",
    "directory",
    pytest.param("swift", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]
SPACES = [f"{number:x}" * 64 for number in (1, 2)]
HASHES = [f"{number:02x}" * 16 for number in range(0, 256, 16)]
OTHERS = "0" * 32


class Names:
    """An open store, and what puts objects into it beside the product."""

    def __init__(self, store: ObjectStore, server: S3Server | None, where: str | Path) -> None:
        self.store = store
        self._server, self._where = server, where

    def put(self, name: str, size: int = 3) -> None:
        """Put an object of another host."""
        if isinstance(self._where, Path):
            path = self._where / path_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
        else:
            assert self._server is not None
            self._server.client.put_object(Bucket=self._where, Key=name, Body=b"x" * size)

    async def all(self, prefix: str) -> list[str]:
        """List a prefix to its end."""
        after, found = "", []
        while True:
            page = await self.store.page(prefix, after)
            found += [one.name for one in page.objects]
            after = page.last_name
            if not page.more:
                return found


@pytest.fixture(params=STORES)
async def names(request: pytest.FixtureRequest, tmp_path: Path) -> Names:
    """An open store without objects."""
    server: S3Server | None = None
    where: str | Path
    store: ObjectStore
    if request.param == "directory":
        where = tmp_path
        store = Directory(tmp_path, lambda _kind, _ok: None, lambda _kind, _n: None)
    else:
        found: S3Server = request.getfixturevalue(request.param)
        server, where = found, found.make_bucket()
        store = Bucket(found.options(where), lambda _kind, _ok: None)
    await store.probe("kv/probe/h-0/", write=True)
    return Names(store, server, where)


def ours(space: str, digits: str) -> str:
    """A block's object."""
    return f"kv/v2/{space}/{digits}.{OTHERS}.3.1.{digits[:16]}"


async def test_names_come_in_order_page_by_page(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all namespaces, of one, and of a range of one; with the size and the age of each."""
    for module in (bucket_module, directory_module):
        monkeypatch.setattr(module, "PAGE_MAX", 3)
    wanted = [ours(space, digits) for space in SPACES for digits in HASHES]
    for name in reversed(wanted):
        names.put(name)
    assert await names.all("kv/v2/") == wanted
    assert await names.all(f"kv/v2/{SPACES[1]}/") == wanted[16:]
    for digits, expected in (("", wanted[:16]), ("4", wanted[4:5]), ("40", wanted[4:5]),
                             ("404", wanted[4:5]), ("4040", wanted[4:5]), ("41", [])):  # fmt: skip
        assert await names.all(f"kv/v2/{SPACES[0]}/{digits}") == expected
    page = await names.store.page("kv/v2/", wanted[7])
    assert [one.name for one in page.objects] == wanted[8:11]
    assert page.more
    assert all(one.bytes == 3 and 0 <= one.age_ms < 600_000 for one in page.objects)


async def test_namespaces_are_folders(names: Names) -> None:
    for space in SPACES:
        names.put(ours(space, HASHES[3]))
    found = await names.store.folders("kv/v2/")
    assert sorted(found.prefixes) == [f"kv/v2/{space}/" for space in SPACES]
    assert not found.unread
    assert await names.store.folders("kv/none/") == FolderList([])
    assert await names.all("kv/none/") == []


async def test_an_object_has_a_size_or_is_not_there(names: Names) -> None:
    """One whose name begins alike is another object."""
    name = ours(SPACES[0], HASHES[1])
    assert await names.store.size(name) is None
    names.put(f"{name}0")
    assert await names.store.size(name) is None
    names.put(name, size=77)
    assert await names.store.size(name) == 77


async def test_what_is_deleted_is_gone_also_if_it_was_not_there(names: Names) -> None:
    kept, gone = (ours(SPACES[0], digits) for digits in HASHES[:2])
    names.put(kept)
    names.put(gone)
    assert await names.store.delete([gone, ours(SPACES[1], HASHES[5])]) == {}
    assert await names.all("kv/v2/") == [kept]


async def test_two_hosts_see_each_others_objects(names: Names) -> None:
    """Whatever was listed before is looked at again."""
    first = ours(SPACES[0], HASHES[2])
    names.put(first)
    assert await names.all("kv/v2/") == [first]
    second = ours(SPACES[0], HASHES[2][:3] + "f" * 29)
    names.put(second)
    assert await names.all("kv/v2/") == [first, second]
    await names.store.delete([first])
    assert await names.all("kv/v2/") == [second]
