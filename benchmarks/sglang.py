"""SGLang's HiCache storage: KVBM beside SGLang's own `file` back end, same pages, same run.

`make bench-sglang`. All are made by SGLang's factory over a real host pool on CPU, each in a
process of its own, and take turns. A round stores 256 pages of 2 MiB in two batches, asks whether
each batch exists and loads it; then a second engine of either side asks for the same pages, of
which it has not heard. Medians of the rounds; the first one warms up and does not count. `file` has
its default options; its files go with their round. Our loads are verified as by default.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Row, rate_row
from tests.sglang.conversation import Pool
from tests.sglang.harness import RankProcess, keys_of, pages
from tests.vllm.harness import LiveStack, live_stack

POOL = Pool(layers=32, heads=8, head_dim=128, page_size=16, pages=132)
"""The KV heads of an 8-billion model in bfloat16: 2 MiB a page."""
PAGES, BATCH = 256, 128
ROUNDS = 5
STACK_GB = 6.0
ELSEWHERE = "exists, of pages that another engine has stored"
WHAT = {"set": "GB/s", "get": "GB/s", "exists": "thousand keys/s", ELSEWHERE: "thousand keys/s"}


def run() -> list[Row]:
    """Rows with the peer as reference."""
    directory = Path(tempfile.mkdtemp(prefix="kvbm-bench-"))
    try:
        with live_stack({"cpu_cache_gb": STACK_GB}, ("consolidator", "host-tier")) as stack:
            return _measure(stack, directory)
    finally:
        shutil.rmtree(directory)


def _measure(stack: LiveStack, directory: Path) -> list[Row]:
    files = directory / "files"
    files.mkdir()
    with ExitStack() as ranks:
        ours = [_ours(ranks, stack, directory / f"ours-{n}.log") for n in range(2)]
        theirs = [_peer(ranks, files, directory / f"peer-{n}.log") for n in range(2)]
        found: list[dict[str, float]] = []
        reference: list[dict[str, float]] = []
        for number in range(ROUNDS + 1):
            for rank in (ours[0], theirs[0]):
                rank.ask("fill", pages=pages(0, BATCH), seeds=pages(number * BATCH, BATCH))
            keys = keys_of(f"round-{number}", PAGES)
            found.append(_round(ours, "dynamic", keys))
            reference.append(_round(theirs, "file", keys))
            for path in files.iterdir():
                path.unlink()
    return [
        rate_row(f"{name}, batches of {BATCH} pages of 2 MiB", _median(found, name), unit=unit,
                 reference=_median(reference, name), target=1.0)
        for name, unit in WHAT.items()
    ]  # fmt: skip


def _round(ranks: list[RankProcess], backend: str, keys: list[str]) -> dict[str, float]:
    """One stores, asks and loads; the other one asks."""
    writer, reader = ranks
    rates = writer.ask("bench", backend=backend, keys=keys).rates
    return rates | {ELSEWHERE: reader.ask("bench_exists", keys=keys).rates["exists"]}


def _ours(ranks: ExitStack, stack: LiveStack, log: Path) -> RankProcess:
    rank = ranks.enter_context(_rank(log))
    extra = {"verify_host_reads": stack.settings.verify_host_reads}
    rank.attach(stack.settings, {"kv": POOL}, extra=extra)
    return rank


def _peer(ranks: ExitStack, files: Path, log: Path) -> RankProcess:
    rank = ranks.enter_context(_rank(log))
    place = {"file_storage_path": str(files)}
    rank.ask("attach", backend="file", pools={"kv": POOL}, extra=place)
    return rank


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(rates[name] for rates in rounds[1:])


@contextmanager
def _rank(log: Path) -> Iterator[RankProcess]:
    rank = RankProcess(log)
    try:
        yield rank
    finally:
        rank.stop()
