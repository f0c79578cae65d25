"""What blocks of vLLM are named by beside their tokens: adapters by content, and generations."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.wire.local_fields import Adapter
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.core.messages import Hit, Load, LoadResult, OfferEnded
from kvbm_connectors.vllm.adapters import (
    ADAPTERS_MAX,
    NUMBERS_OF_ONE,
    WARNED_MAX,
    AdapterRefused,
    Adapters,
)
from kvbm_connectors.vllm.block_holds import is_cleared
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.requests import Output, Request

OLD, NEW = "", "00000000000000f1"


@dataclass(frozen=True)
class Lora:
    """vllm.lora.request.LoRARequest."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "poet"
    lora_tensors: Any = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def make_adapter(directory: Path, content: bytes = b"1") -> str:
    """A directory with an adapter."""
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(content)
    return str(directory)


class FakeHalf:
    """A scheduler half whose host tier has everything."""

    epoch = 1

    def __init__(self) -> None:
        self.asked: list[tuple[SequenceHash, ...]] = []
        self.revoked: list[int] = []
        self.forgotten: list[str] = []
        self.offers = 0

    def lookup(self, request: str, hashes: Any, **_: Any) -> Hit:
        self.asked.append(tuple(hashes))
        return Hit(len(hashes))

    def take(self, request: str, blocks: Any) -> Load:
        return Load(
            request=request, epoch=1, lease=1, slots=(0,) * len(blocks), blocks=tuple(blocks),
            hashes=self.asked[-1], checksums=(bytes(8),) * len(blocks), block_bytes=1,
            deadline_ms=1,
        )  # fmt: skip

    def load_ended(self, result: LoadResult) -> None: ...

    def forget(self, request: str) -> None:
        self.forgotten.append(request)

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None: ...

    def offer(
        self, runs: Any, *, priority: int = 0, namespace: bytes = b"", hurry: bool = True
    ) -> int:
        self.offers += 1
        return self.offers

    def revoke(self, offer: int) -> None:
        self.revoked.append(offer)

    def drain_ended(self) -> list[OfferEnded]:
        return []


class Blocks:
    """vLLM's block table of one request."""

    def get_block_ids(self, *_: str) -> tuple[list[int], ...]:
        return ([3, 4, 5],)


def asked(side: SchedulerSide, half: FakeHalf, **fields: Any) -> tuple[SequenceHash, ...]:
    """The names under which a request is looked up."""
    number = str(len(half.asked))
    side.matched(Request(request_id=number, **fields), 0)
    return half.asked[-1]


def make_side() -> tuple[SchedulerSide, FakeHalf]:
    half = FakeHalf()
    return SchedulerSide(half, Hasher(NAMESPACE)), half


# --- adapters -------------------------------------------------------------------------------


def test_one_name_with_other_weights_has_other_blocks(tmp_path: Path) -> None:
    """Content counts: a copy elsewhere under the same name is the same adapter."""
    one, copy, other = (
        make_adapter(tmp_path / n, c) for n, c in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    )
    side, half = make_side()
    plain = asked(side, half)
    first, same, tuned = (
        asked(side, half, lora_request=Lora(path, number))
        for number, path in enumerate((one, copy, other), start=1)
    )
    assert first == same
    assert len({plain, first, tuned}) == 3


def test_the_consolidator_hears_of_each_adapter_once(tmp_path: Path) -> None:
    """By its number, as events say it."""
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append)
    path = make_adapter(tmp_path / "a")
    for number in (1, 1, 2):
        adapters.value_of(Lora(path, number))
    assert [[one.id for one in each] for each in said] == [[1], [1, 2]]
    assert said[1][0].content == said[1][1].content


def test_an_adapter_whose_files_change_is_refused_until_a_reset(tmp_path: Path) -> None:
    """What the engine computes with is not known, nor what its device still holds."""
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    before = asked(side, half, lora_request=Lora(path))
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"2")
    assert side.matched(Request("changed", lora_request=Lora(path)), 0) == (0, False)
    assert side.matched(Request("new number", lora_request=Lora(path, 2)), 0) == (0, False)
    assert side.counts["requests_refused.lora_changed"] == 3, "the first one runs on"
    side.reset(NEW)
    after = asked(side, half, lora_request=Lora(path))
    assert not set(before) & set(after)


@pytest.mark.parametrize(
    ("lora", "code"),
    [
        (Lora("/nowhere"), "lora_unreadable"),
        (Lora(""), "lora_unreadable"),
        (Lora("/nowhere", lora_tensors={}), "lora_in_memory"),
    ],
)
def test_adapters_without_files_are_refused(lora: Lora, code: str) -> None:
    """Their requests are computed, and counted."""
    with pytest.raises(AdapterRefused) as refused:
        Adapters().value_of(lora)
    assert refused.value.code == code
    side, half = make_side()
    assert side.matched(Request(lora_request=lora), 0) == (0, False)
    assert side.counts[f"requests_refused.{code}"] == 1
    assert not half.asked


def test_a_number_stands_for_one_adapter(tmp_path: Path) -> None:
    """vLLM keeps by its number what it has loaded: another path under it is not looked at."""
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    adapters = Adapters()
    adapters.value_of(Lora(one))
    with pytest.raises(AdapterRefused) as refused:
        adapters.value_of(Lora(other))
    assert refused.value.code == "lora_changed"


def test_a_number_stands_for_one_adapter_after_a_reset_and_if_it_was_refused(
    tmp_path: Path,
) -> None:
    """Goal: vLLM keeps what it has loaded under a number, whatever we know of its files."""
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    adapters = Adapters()
    adapters.value_of(Lora(one))
    with pytest.raises(AdapterRefused):
        adapters.value_of(Lora("/nowhere", 2))
    adapters.forget()
    for number in (1, 2):
        with pytest.raises(AdapterRefused) as refused:
            adapters.value_of(Lora(other, number))
        assert refused.value.code == "lora_changed"


def test_an_adapter_in_two_formats_is_refused_until_a_reset(tmp_path: Path) -> None:
    """Goal: no block that was computed with weights in one format is found with the other.

    vLLM's device cache finds them: it knows the adapter's name and path alone.
    """
    path = make_adapter(tmp_path / "a")
    adapters = Adapters()
    one, other = Lora(path), Lora(path, 2, is_3d_lora_weight=True)
    value = adapters.value_of(one)
    for lora in (other, one):
        with pytest.raises(AdapterRefused) as refused:
            adapters.value_of(lora)
        assert refused.value.code == "lora_changed"
    adapters.forget()
    assert adapters.value_of(other) != value
    adapters.forget()
    assert adapters.value_of(one) == value
    with pytest.raises(AdapterRefused):
        adapters.value_of(Lora(path, is_3d_lora_weight=True))


def test_both_adapters_of_a_number_are_refused_until_a_reset(tmp_path: Path) -> None:
    """Goal: no block that was computed with one adapter is stored under the name of another.

    vLLM may have computed requests of either with the other's weights, and its device cache has
    their blocks under the name that the requests say. The number itself is never trusted again.
    """
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append)
    value = adapters.value_of(Lora(one))
    for lora in (Lora(other), Lora(one), Lora(one, 2), Lora(other, 3)):
        with pytest.raises(AdapterRefused) as refused:
            adapters.value_of(lora)
        assert refused.value.code == "lora_changed"
    assert said[-1] == [], "events with the number have no name"
    adapters.forget()
    assert adapters.value_of(Lora(one, 2)) == value
    with pytest.raises(AdapterRefused):
        adapters.value_of(Lora(one))


def test_too_many_replaced_adapters_make_all_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: what is remembered of adapters that trade places is bounded, and never forgotten."""
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.ADAPTERS_MAX", 4)
    lora, adapters = Lora(make_adapter(tmp_path / "a"), 1, "painter"), Adapters()
    for version in range(5):
        assert adapters.note_load(Lora(f"/{version}", 2)) == bool(version)
    with pytest.raises(AdapterRefused) as refused:
        adapters.value_of(lora)
    assert refused.value.code == "lora_too_many"
    adapters.forget()
    adapters.value_of(lora)


@pytest.mark.parametrize("place", ["another path", "the same path"])
@pytest.mark.parametrize("heard", ["loaded", "asked"])
def test_an_adapter_that_is_replaced_stores_nothing_more(
    tmp_path: Path, place: str, heard: str
) -> None:
    """Goal: a request whose adapter vLLM has replaced in place stores no block of the new weights.

    1. A request with an adapter has begun.
    2. Another adapter takes its number, or other files its path: vLLM loads it, or a request
       brings it.
    3. The first request offers nothing at its end. One without an adapter does.
    """
    path = make_adapter(tmp_path / "a")
    side, half = make_side()
    running, plain = Request("running", lora_request=Lora(path)), Request("plain")
    for request in (running, plain):
        side.matched(request, 0)
        side.allocated(request, Blocks(), 0)
    side.plan(Output({"running": 9, "plain": 9}))
    for request in (running, plain):
        request.begin(9)
        request.end(9)
    replaced = Lora(path)
    if place == "another path":
        replaced = Lora(make_adapter(tmp_path / "b", b"2"))
    else:
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"2")
    if heard == "loaded":
        side.adapter_loaded(replaced)
    else:
        side.matched(Request("next", lora_request=replaced), 0)
    assert not side.finished(running, ([3, 4, 5],))
    assert not half.offers
    assert side.finished(plain, ([3, 4, 5],))


def test_events_have_no_name_for_an_adapter_whose_files_were_replaced(tmp_path: Path) -> None:
    """Device blocks of running requests are of the new weights: no router hears of the old."""
    said: list[list[Adapter]] = []
    adapters, lora = Adapters(said.append), Lora(make_adapter(tmp_path / "a"))
    adapters.value_of(lora)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"2")
    assert adapters.note_load(lora)
    assert said[-1] == []


def test_an_adapter_that_is_loaded_before_its_first_request_counts(tmp_path: Path) -> None:
    """Goal: a request that waited while its adapter was replaced stores nothing."""
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    side, half = make_side()
    for _ in range(2):
        side.adapter_loaded(Lora(one))
    assert asked(side, half, lora_request=Lora(one))
    for path in (one, other):
        side.adapter_loaded(Lora(path, 2, "painter"))
    waited = Request("waited", lora_request=Lora(one, 2, "painter"))
    assert side.matched(waited, 0) == (0, False)
    assert side.counts["requests_refused.lora_changed"] == 1


def test_an_adapter_that_is_loaded_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    """Goal: a server gives each load a number, and the consolidator hears of the newest alone."""
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append)
    one, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"2")
    value = adapters.value_of(Lora(one, 1))
    adapters.value_of(Lora(other, 2, "painter"))
    for number in range(3, 3 + 2 * ADAPTERS_MAX):
        assert adapters.value_of(Lora(one, number)) == value
    assert max(map(len, said)) == NUMBERS_OF_ONE + 1
    newest = 2 + 2 * ADAPTERS_MAX
    assert [told.id for told in said[-1]] == [2, *range(newest - NUMBERS_OF_ONE + 1, newest + 1)]
    count = len(said)
    adapters.value_of(Lora(one, newest - 1))
    assert len(said) == count
    adapters.value_of(Lora(one, 1))
    assert said[-1][-1].id == 1, "a number that was left out is told when it is used again"


def test_an_adapter_that_was_written_after_the_engine_began_is_refused(tmp_path: Path) -> None:
    """vLLM may have loaded other files of that name before the first request."""
    path = make_adapter(tmp_path / "a")
    written_ns = (tmp_path / "a" / "adapter_model.safetensors").stat().st_ctime_ns
    Adapters(since_ns=written_ns + 1).value_of(Lora(path))
    with pytest.raises(AdapterRefused) as refused:
        Adapters(since_ns=written_ns).value_of(Lora(path))
    assert refused.value.code == "lora_recent"


def test_a_number_that_is_used_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: vLLM keeps the adapters that were used last, so their numbers stand for no other."""
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.ADAPTERS_MAX", 4)
    adapters = Adapters()
    one, other = Lora(make_adapter(tmp_path / "a")), make_adapter(tmp_path / "b", b"2")
    for number in range(2, 12):
        adapters.value_of(one)
        adapters.value_of(Lora(other, number))
    with pytest.raises(AdapterRefused):
        adapters.value_of(Lora(other))


def test_a_number_that_stands_for_another_adapter_after_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: events with this number have the name that its requests have."""
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.ADAPTERS_MAX", 4)
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append)
    adapters.value_of(Lora(make_adapter(tmp_path / "a"), 1))
    other = make_adapter(tmp_path / "b", b"2")
    for number in range(2, 6):
        with pytest.raises(AdapterRefused):
            adapters.value_of(Lora("/nowhere", number))
    adapters.value_of(Lora(other, 1, "painter"))
    assert [(told.id, told.name) for told in said[-1]] == [(1, "painter")]


def test_numbers_of_one_adapter_in_turn_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a client with many numbers for one adapter makes no message with each request."""
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append)
    path = make_adapter(tmp_path / "a")
    numbers = range(NUMBERS_OF_ONE + 1)
    for number in [*numbers, *numbers]:
        adapters.value_of(Lora(path, number))
    count = len(said)
    for number in [*numbers, *numbers]:
        adapters.value_of(Lora(path, number))
    assert len(said) == count
    assert {told.id for told in said[-1]} == set(numbers)
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.NUMBERS_IN_USE", len(numbers))
    for number in [100, 0, 101, 0, 1, 100, 101, 0, 1]:
        adapters.value_of(Lora(path, number))
    assert max(map(len, said)) == len(numbers)


def test_an_adapter_in_the_home_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: vLLM itself expands `~` in an adapter's path, and so does the name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = make_adapter(tmp_path / "poet")
    adapters = Adapters()
    assert adapters.value_of(Lora("~/poet")) == Adapters().value_of(Lora(path))


def test_an_adapter_that_modelscope_brings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the Hugging Face cache may hold another adapter of that name. Paths stay cached."""
    path = make_adapter(tmp_path / "poet")
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.resolve", lambda _: Path(path))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    adapters = Adapters()
    adapters.value_of(Lora(path))
    with pytest.raises(AdapterRefused, match="ModelScope") as refused:
        adapters.value_of(Lora("org/poet", 2, "other"))
    assert refused.value.code == "lora_unreadable"


def newest_ns(root: Path) -> int:
    """When something below a directory was changed last; links are not followed."""
    return max(one.lstat().st_ctime_ns for one in (root, *root.rglob("*")))


def moved_to(link: Path, target: Path, since_ns: int) -> None:
    """Move a link, until the file system's clock says that it is young."""
    while not link.is_symlink() or link.lstat().st_ctime_ns < since_ns:
        spare = link.with_name("spare")
        spare.symlink_to(target)
        spare.replace(link)


@pytest.mark.parametrize("place", ["current", "stages/live/poet", "copy/../poet"])
def test_a_link_that_moves_after_the_engine_began_is_seen(tmp_path: Path, place: str) -> None:
    """Goal: vLLM may have loaded what a link led to before the first request.

    1. A link leads to an adapter, on its own or in the middle of a path; all is old: accepted.
    2. It is moved to another old adapter: refused as young, in an engine that has seen neither.
    3. An engine that began later accepts it, and one that had read the first refuses it.
    """
    for version in "12":
        (tmp_path / version).mkdir()
        make_adapter(tmp_path / version / "poet", version.encode())
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "live").symlink_to(tmp_path / "1")
    (tmp_path / "copy").symlink_to("stages/live/poet")
    (tmp_path / "current").symlink_to("1/poet")
    lora = Lora(str(tmp_path / place))
    link = tmp_path / "current" if place == "current" else tmp_path / "stages" / "live"
    since_ns = newest_ns(tmp_path) + 1
    reader, waiting = (Adapters(since_ns=since_ns) for _ in range(2))
    value = reader.value_of(lora)
    moved_to(link, tmp_path / ("2/poet" if place == "current" else "2"), since_ns)
    with pytest.raises(AdapterRefused) as refused:
        waiting.value_of(lora)
    assert refused.value.code == "lora_recent"
    assert Adapters(since_ns=newest_ns(tmp_path) + 1).value_of(lora) != value
    with pytest.raises(AdapterRefused) as refused:
        reader.value_of(lora)
    assert refused.value.code == "lora_changed"


def test_a_directory_that_is_renamed_after_the_engine_began_is_seen(tmp_path: Path) -> None:
    """Goal: files keep their times when the directory that holds them takes another's place."""
    path = Path(make_adapter(tmp_path / "a"))
    make_adapter(tmp_path / "b", b"2")
    since_ns = newest_ns(tmp_path) + 1
    adapters = Adapters(since_ns=since_ns)
    path.rename(tmp_path / "old")
    (tmp_path / "b").rename(path)
    while path.stat().st_ctime_ns < since_ns:
        path.rename(tmp_path / "b")
        (tmp_path / "b").rename(path)
    with pytest.raises(AdapterRefused) as refused:
        adapters.value_of(Lora(str(path)))
    assert refused.value.code == "lora_recent"


def swapped(live: Path, spare: Path, since_ns: int) -> None:
    """Swap two directories, until the file system's clock says that the one in use is young."""
    away = live.with_name("away")
    live.rename(away)
    spare.rename(live)
    while live.stat().st_ctime_ns < since_ns:
        live.rename(spare)
        spare.rename(live)


@pytest.mark.parametrize("target", ["store/live", "snapshots/1"])
def test_a_directory_behind_links_that_is_renamed_is_seen(tmp_path: Path, target: str) -> None:
    """Goal: an adapter's files are links, and the directory that they lead to is swapped.

    1. It holds files, or links to further files; all is old: accepted. 2. It is swapped: refused
    as young by an engine that has seen neither, as changed by one that has read the first. 3. An
    engine that began later accepts it.
    """
    name = "adapter_model.safetensors"
    for directory in ("adapter", "blobs", "store", "snapshots"):
        (tmp_path / directory).mkdir()
    for place, version in (("live", "1"), ("next", "2")):
        make_adapter(tmp_path / "store" / place, version.encode())
        (tmp_path / "blobs" / version).write_bytes(version.encode())
        (tmp_path / "snapshots" / version).mkdir()
        (tmp_path / "snapshots" / version / name).symlink_to(f"../../blobs/{version}")
    live = tmp_path / target
    (tmp_path / "adapter" / name).symlink_to(live / name)
    lora = Lora(str(tmp_path / "adapter"))
    since_ns = newest_ns(tmp_path) + 1
    reader, waiting = (Adapters(since_ns=since_ns) for _ in range(2))
    value = reader.value_of(lora)
    swapped(live, live.with_name("next" if live.name == "live" else "2"), since_ns)
    for adapters, code in ((waiting, "lora_recent"), (reader, "lora_changed")):
        with pytest.raises(AdapterRefused) as refused:
            adapters.value_of(lora)
        assert refused.value.code == code
    assert Adapters(since_ns=newest_ns(tmp_path) + 1).value_of(lora) != value


def test_a_file_that_comes_beside_a_link_s_target_leaves_a_known_adapter(tmp_path: Path) -> None:
    """Goal: adapters share a directory of blobs. One that was read keeps its name when a blob of
    another comes; one that was not is refused, as the directory may have been swapped."""
    name = "adapter_model.safetensors"
    for directory in ("adapter", "blobs"):
        (tmp_path / directory).mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"1")
    (tmp_path / "adapter" / name).symlink_to("../blobs/1")
    lora = Lora(str(tmp_path / "adapter"))
    since_ns = newest_ns(tmp_path) + 1
    known = Adapters(since_ns=since_ns)
    value = known.value_of(lora)
    while (tmp_path / "blobs").stat().st_ctime_ns < since_ns:
        (tmp_path / "blobs" / "2").write_bytes(b"2")
        (tmp_path / "blobs" / "2").unlink()
    assert known.value_of(lora) == value
    with pytest.raises(AdapterRefused) as refused:
        Adapters(since_ns=since_ns).value_of(lora)
    assert refused.value.code == "lora_recent"
    assert Adapters(since_ns=since_ns, final=True).value_of(lora) == value


@pytest.fixture
def sidecar() -> Iterator[Callable[[int], Path]]:
    """A way to the files of a process whose root the kernel dates after a time."""
    started: list[subprocess.Popen[bytes]] = []

    def start(since_ns: int) -> Path:
        while True:
            started.append(subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE))
            root = Path(f"/proc/{started[-1].pid}/root")
            if root.lstat().st_ctime_ns >= since_ns:
                return root

    yield start
    for process in started:
        process.communicate()


def test_a_link_of_the_kernel_is_no_change(tmp_path: Path, sidecar: Callable[[int], Path]) -> None:
    """Goal: KServe's modelcars lead to an adapter in another container over `/proc/PID/root`.

    1. The kernel dates this link when it is looked at first, here after the engine's start: the
    adapter is accepted. 2. A link behind it moves: refused as young. 3. Behind it, `..` is what the
    kernel takes it for, so that the adapter is found in another process's files.
    """
    for version in "12":
        make_adapter(tmp_path / version, version.encode())
    (tmp_path / "current").symlink_to("1")
    since_ns = newest_ns(tmp_path) + 1
    root = sidecar(since_ns)
    beside, above = (f"{root}{tmp_path}", f"{root}/..{tmp_path}")
    for way in (beside, above):
        assert Adapters(since_ns=since_ns).value_of(Lora(f"{way}/current"))
    moved_to(tmp_path / "current", Path("2"), since_ns)
    for way in (beside, above):
        with pytest.raises(AdapterRefused) as refused:
            Adapters(since_ns=since_ns).value_of(Lora(f"{way}/current"))
        assert refused.value.code == "lora_recent"


def test_a_neighbour_of_an_old_adapter_may_be_young(tmp_path: Path) -> None:
    """Goal: adapters that lay ready when the engine began are cached, as a hub's cache keeps them:
    files are links to blobs. What else comes into the directory above is nothing of theirs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"1")
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_model.safetensors").symlink_to("../../blobs/1")
    (tmp_path / "blobs" / "1").chmod(0o600)
    (tmp_path / "blobs" / "hard").hardlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "blobs" / "2").write_bytes(b"2")
    since_ns = newest_ns(tmp_path) + 1
    make_adapter(tmp_path / "snapshots" / "2", b"2")
    plain = Adapters().value_of(Lora(make_adapter(tmp_path / "same")))
    adapters = Adapters(since_ns=since_ns)
    assert adapters.value_of(Lora(str(snapshot))) == plain
    moved_to(snapshot / "adapter_model.safetensors", tmp_path / "blobs" / "2", since_ns)
    with pytest.raises(AdapterRefused) as refused:
        Adapters(since_ns=since_ns).value_of(Lora(str(snapshot)))
    assert refused.value.code == "lora_recent"


def test_why_an_adapter_is_not_cached_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: an operator learns the reason and the way out, and the log does not fill up."""
    path = make_adapter(tmp_path / "a")
    adapters = Adapters(since_ns=0)
    for lora in (Lora(path), Lora(path), Lora(path, 2), Lora(path, 3, "painter")):
        with pytest.raises(AdapterRefused):
            adapters.value_of(lora)
    assert len(caplog.messages) == 2
    assert "'poet'" in caplog.messages[0]
    assert '"lora_files": "final"' in caplog.messages[0]
    for number in range(4, 2 * WARNED_MAX):
        with pytest.raises(AdapterRefused):
            adapters.value_of(Lora(path, number, f"adapter {number}"))
    assert len(caplog.messages) == WARNED_MAX


def test_final_files_are_read_at_first_sight_and_refused_when_they_change(tmp_path: Path) -> None:
    """Goal: an adapter that comes after the engine's start is cached, if its files stay.

    1. An operator vouches for the files: a young adapter has a name, by its content.
    2. They change all the same: refused, and a reset does not help.
    3. Another version at another path has another name.
    """
    path = make_adapter(tmp_path / "a")
    adapters = Adapters(since_ns=0, final=True)
    value = adapters.value_of(Lora(path))
    assert value == Adapters().value_of(Lora(path))
    adapters.forget()
    assert adapters.value_of(Lora(path, 2)) == value
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"2")
    for number in (1, 3):
        with pytest.raises(AdapterRefused) as refused:
            adapters.value_of(Lora(path, number))
        assert refused.value.code == "lora_changed"
        adapters.forget()
    assert adapters.value_of(Lora(make_adapter(tmp_path / "b", b"2"), 4)) != value


def test_after_a_reset_the_consolidator_hears_of_final_adapters_again(tmp_path: Path) -> None:
    """Goal: a reset has it forget all adapters, whose files are not read again."""
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append, since_ns=0, final=True)
    lora = Lora(make_adapter(tmp_path / "a"))
    for _ in range(2):
        adapters.value_of(lora)
        adapters.forget()
    assert [[one.id for one in each] for each in said] == [[1], [1]]


def test_of_final_adapters_the_oldest_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a trainer that makes one version after the other is cached for the engine's life."""
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.ADAPTERS_MAX", 4)
    said: list[list[Adapter]] = []
    adapters = Adapters(said.append, since_ns=0, final=True)
    paths = [make_adapter(tmp_path / f"v{number}", b"%d" % number) for number in range(6)]
    for number, path in enumerate(paths):
        adapters.value_of(Lora(path, number))
    assert [one.id for one in said[-1]] == [2, 3, 4, 5]
    watched = Adapters()
    for number, path in enumerate(paths[:4]):
        watched.value_of(Lora(path, number))
    with pytest.raises(AdapterRefused) as refused:
        watched.value_of(Lora(paths[4], 4))
    assert refused.value.code == "lora_too_many"


@pytest.mark.parametrize("final", [False, True])
def test_an_adapter_of_the_hub_is_refused_when_its_name_stands_for_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, final: bool
) -> None:
    """Goal: vLLM asks the hub with each load, and no file of the old snapshot tells."""
    snapshots = tmp_path / "models--org--poet" / "snapshots"
    snapshots.mkdir(parents=True)
    make_adapter(snapshots / "1")
    main = tmp_path / "models--org--poet" / "refs" / "main"
    main.parent.mkdir()
    main.write_text("1")
    monkeypatch.setattr("kvbm_connectors.vllm.adapters.resolve", lambda _: snapshots / "1")
    adapters = Adapters(final=final)
    adapters.value_of(Lora("org/poet"))
    main.write_text("22")
    with pytest.raises(AdapterRefused) as refused:
        adapters.value_of(Lora("org/poet"))
    assert refused.value.code == "lora_changed"


# --- generations ----------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_looked_up() -> None:
    """A request that waits is looked up afresh, under other names."""
    side, half = make_side()
    request = Request()
    side.matched(request, 0)
    assert side.reset(NEW)
    assert half.forgotten == ["r"]
    side.matched(request, 0)
    before, after = half.asked
    assert not set(before) & set(after)


def test_a_preempted_request_is_named_afresh() -> None:
    """A forced reset preempts: its blocks are free, what it had on offer is revoked."""
    side, half = make_side()
    request = Request(skip_reading_prefix_cache=True)
    side.matched(request, 0)
    step = Output({"r": 9}, kv_connector_block_state=Blocks())
    side.plan(step)
    request.num_computed_tokens = 9
    side.plan(step)
    request.num_computed_tokens = 0
    side.reset(NEW)
    assert half.revoked == [1]
    assert side.idle


def test_a_request_that_computes_on_is_not_stored() -> None:
    """The engine did not preempt it: its blocks mix what both weights have made."""
    side, half = make_side()
    request = Request(skip_reading_prefix_cache=True)
    side.matched(request, 0)
    step = Output({"r": 9}, kv_connector_block_state=Blocks())
    side.plan(step)
    request.num_computed_tokens = 3
    side.reset(NEW)
    request.num_computed_tokens = 9
    side.plan(step)
    assert not side.finished(request, [[3, 4, 5]])
    assert not half.offers
    assert side.counts["requests_refused.reset"] == 1


def test_a_reset_revokes_what_is_on_offer() -> None:
    """The engine may be about to sleep: a finished request's blocks are held no longer."""
    side, half = make_side()
    request = Request(skip_reading_prefix_cache=True)
    side.matched(request, 0)
    side.plan(Output({"r": 9}, kv_connector_block_state=Blocks()))
    request.num_computed_tokens = 9
    assert side.finished(request, [[3, 4, 5]])
    side.reset(NEW)
    assert half.revoked == [1]


def test_a_load_in_flight_is_told() -> None:
    """Its request goes on with blocks of before: the reset was not complete."""
    side, _ = make_side()
    request = Request()
    assert side.matched(request, 0) == (8, True)
    side.allocated(request, Blocks(), 8)
    assert not side.reset(NEW)


def computed(
    side: SchedulerSide, name: str, hits: int, told: int | None = None
) -> tuple[int | None, bool]:
    """Admit a request of two blocks with device hits, compute the rest, and finish it. Of a hit
    within a block, vLLM has `told` the tokens of whole blocks."""
    request = Request(name)
    found = side.matched(request, hits if told is None else told)
    side.allocated(request, Blocks(), 0)
    request.num_computed_tokens = hits
    step = Output({name: 9 - hits}, kv_connector_block_state=Blocks())
    side.plan(step)
    request.num_computed_tokens = 9
    side.finished(request, [[3, 4, 5]])
    return found


@pytest.mark.parametrize("cleared", [False, None])
def test_after_a_refused_reset_device_hits_are_not_stored(cleared: bool | None) -> None:
    """1. A request runs, so that vLLM keeps its device cache; the connector's generation is new.
    2. A request that hits a block there passes through: old weights may have computed it.
    3. One that hits none is stored. 4. After a reset that succeeds, hits are stored again.
    """
    side, half = make_side()
    running = Request("running", skip_reading_prefix_cache=True)
    side.matched(running, 0)
    running.num_computed_tokens = 3
    assert not side.reset(NEW, cleared=cleared)
    assert computed(side, "hit", 4) == (0, False)
    assert (half.asked, half.offers) == ([], 0)
    assert side.counts["requests_refused.stale_device"] == 1
    assert computed(side, "miss", 0) == (8, True)
    assert half.offers == 1
    assert computed(side, "hit within a block", 2, told=0) == (8, True)
    assert half.offers == 1
    assert side.counts["requests_refused.stale_device"] == 2
    side.finished(running, [[]])
    side.reset("00000000000000f2", cleared=True)
    assert computed(side, "hit again", 4) == (4, True)
    assert half.offers == 2


def test_a_preempted_request_that_hits_stale_blocks_passes_through() -> None:
    """It began after the reset, and is admitted again with blocks that it has not computed."""
    side, half = make_side()
    side.reset(NEW, cleared=False)
    request = Request(skip_reading_prefix_cache=False)
    assert side.matched(request, 0) == (8, True)
    side.plan(Output(preempted_req_ids=["r"]))
    assert side.matched(request, 4) == (0, False)
    side.plan(Output({"r": 5}, kv_connector_block_state=Blocks()))
    request.num_computed_tokens = 9
    side.finished(request, [[3, 4, 5]])
    assert half.offers == 0


def test_a_pool_is_cleared_when_nothing_but_the_null_block_is_in_use() -> None:
    """vLLM has tried to clear it just before it asks the connector."""
    pools = [SimpleNamespace(num_gpu_blocks=4, get_num_free_blocks=lambda n=n: n) for n in (3, 2)]
    assert [is_cleared(pool) for pool in [*pools, None]] == [True, False, None]
