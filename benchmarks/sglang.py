"""SGLang's HiCache storage: KVBM beside SGLang's own `file` back end, same pages, same run.

`make bench-sglang`. Both are made by SGLang's factory over a real host pool on CPU, each in a
process of its own, and take turns. A round stores 256 pages of 2 MiB in two batches, asks whether
each batch exists and loads it. Medians of the rounds; the first one warms up and does not count.
`file` has its default options; its files go with their round. Our loads are verified as by default.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Row, info_row, rate_row
from tests.sglang.conversation import Pool
from tests.sglang.harness import RankProcess, keys_of, pages
from tests.vllm.harness import LiveStack, live_stack

POOL = Pool(layers=32, heads=8, head_dim=128, page_size=16, pages=132)
"""The KV heads of an 8-billion model in bfloat16: 2 MiB a page."""
PAGES, BATCH = 256, 128
ROUNDS = 5
STACK_GB = 6.0
WHAT = {"set": "GB/s", "get": "GB/s", "exists": "thousand keys/s"}


def run() -> list[Row]:
    """Three rows with the peer as reference, and what a question costs that nobody has asked."""
    directory = Path(tempfile.mkdtemp(prefix="kvbm-bench-"))
    try:
        with live_stack({"cpu_cache_gb": STACK_GB}, ("consolidator", "host-tier")) as stack:
            return _measure(stack, directory)
    finally:
        shutil.rmtree(directory)


def _measure(stack: LiveStack, directory: Path) -> list[Row]:
    files = directory / "files"
    files.mkdir()
    with _rank(directory / "ours.log") as ours, _rank(directory / "peer.log") as peer:
        extra = {"verify_host_reads": stack.settings.verify_host_reads}
        ours.attach(stack.settings, {"kv": POOL}, extra=extra)
        place = {"file_storage_path": str(files)}
        peer.ask("attach", backend="file", pools={"kv": POOL}, extra=place)
        found: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for number in range(ROUNDS + 1):
            keys = keys_of(f"round-{number}", PAGES)
            for rank in (ours, peer):
                rank.ask("fill", pages=pages(0, BATCH), seeds=pages(number * BATCH, BATCH))
            found.append(ours.ask("bench", keys=keys).rates)
            theirs.append(peer.ask("bench", backend="file", keys=keys).rates)
            for path in files.iterdir():
                path.unlink()
        ours.ask("detach")
        ours.attach(stack.settings, {"kv": POOL}, extra=extra)
        first = [
            ours.ask("bench_exists", keys=keys_of(f"round-{number}", PAGES)).rates["exists"]
            for number in range(ROUNDS + 1)
        ]
    rows = [
        rate_row(f"{name}, batches of {BATCH} pages of 2 MiB", _median(found, name), unit=unit,
                 reference=_median(theirs, name), target=1.0)
        for name, unit in WHAT.items()
    ]  # fmt: skip
    return [
        *rows,
        info_row(
            "exists, pages that this engine has not stored, found or read in the last 5 s",
            statistics.median(first[1:]),
            unit=WHAT["exists"],
        ),
    ]


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(rates[name] for rates in rounds[1:])


@contextmanager
def _rank(log: Path) -> Iterator[RankProcess]:
    rank = RankProcess(log)
    try:
        yield rank
    finally:
        rank.stop()
