"""GPU: D2H and H2D through our movers, beside plain copies and torch's, in one run of one command.

    python3 benchmarks/gpu.py [FILE.json]

Runs where there is CUDA and cupy, with torch for its rows, with pytest for `tests/gpu` and with
xxhash for its check of checksums; nothing of the project needs to be installed. It takes less than
8 minutes: what does not fit, or has no package here, is left out, and the JSON says so. Without a
GPU it says so, and ends with 2.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "libs/kvbm_common")]

import numpy as np  # noqa: E402
from kvbm_common.cuda.copies import Copies  # noqa: E402
from kvbm_common.cuda.device_sums import DeviceSums  # noqa: E402
from kvbm_common.cuda.device_sums import PlainRegion as Region  # noqa: E402
from kvbm_common.cuda.measure import choose, measure  # noqa: E402
from kvbm_common.cuda.mover import DeviceMover  # noqa: E402
from kvbm_common.cuda.pinning import Pinning  # noqa: E402
from kvbm_common.cuda.reading import DeviceReader, Gpu  # noqa: E402
from kvbm_common.cuda.runtime import CudaError, CudaUnavailable, CupyRuntime, Runtime  # noqa: E402
from kvbm_common.memory.arena import Arena  # noqa: E402
from kvbm_common.nixl.layout import CHUNK_BYTES, chunks_of  # noqa: E402
from kvbm_common.nixl.spans import Spans  # noqa: E402
from kvbm_common.nixl.transfers import Transferred  # noqa: E402

from benchmarks.pieces import device_spans, slot_spans  # noqa: E402

BUDGET_S = 420.0
"""Of the whole run; sections that begin after it are left out."""
TESTS_S = 150.0
ARENA_BYTES = 1 << 30
MOVED_BYTES = 256 << 20
"""Beyond every cache, and 5 ms of a fast bus."""
ROUNDS = 7
BLOCK_KIB = (64, 256, 1024, 4096)
PIECE_KIB = (32, 512)
"""Of a layer of a block: the sizes that goals are said for."""
LAYERS, HEADS = 32, 8
DEADLINE_S = 30.0
ONBOARD_BLOCKS, ONBOARD_BLOCK_BYTES, ONBOARD_ROUNDS = 512, 128 << 10, 50
MATMUL_SIDE, MATMULS = 4096, 200
MATMUL_WARM_UPS, MATMUL_ROUNDS = 20, 15
"""A second until the clocks are those of a busy device; rounds in turn with a device left alone."""


Layout = Callable[[int, int, int], list[Region]]
"""Regions of blocks from an address, the bytes of a block, and the number of blocks."""


def block_outermost(base: int, block_bytes: int, blocks: int) -> list[Region]:
    """BLHNC, BLNHC: a block is one piece."""
    return [Region(base, block_bytes, block_bytes, blocks)]


def layers_of(count: int) -> Layout:
    """LBHNC, LBNHC (MLA: the same with one head): a piece for each layer."""

    def regions(base: int, block_bytes: int, blocks: int) -> list[Region]:
        piece = block_bytes // count // 128 * 128  # Rows of a cache are aligned.
        return [Region(base + i * piece * blocks, piece, piece, blocks) for i in range(count)]

    return regions


def tensor_parallel_part(base: int, block_bytes: int, blocks: int) -> list[Region]:
    """The part of one of two ranks: half of each layer of a whole block."""
    return layers_of(LAYERS)(base, block_bytes // 2, blocks)


LAYOUTS: dict[str, Layout] = {
    "block outermost (BLHNC)": block_outermost,
    f"{LAYERS} layers (LBNHC)": layers_of(LAYERS),
    f"{LAYERS} layers of {HEADS} heads (LHBNC)": layers_of(LAYERS * HEADS),
    "MLA, 61 layers": layers_of(61),
    "one of two tensor-parallel ranks": tensor_parallel_part,
}


class PackageMissing(Exception):
    """A section needs what is not installed here."""


def needed(package: str) -> Any:
    """A package that a section cannot do without."""
    if importlib.util.find_spec(package) is None:
        raise PackageMissing(f"{package} is not installed")
    return importlib.import_module(package)


def unnamed_arena(size_bytes: int) -> Arena:
    """Shared memory as /dev/shm's, which many a container keeps at 64 MB: this has its limit only
    in the machine's memory. Its path is for this process."""
    fd = os.memfd_create("kvbm-gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return Arena(Path(f"/proc/self/fd/{fd}"), fd, size_bytes, owner=False)


class Bench:
    """One device, one pinned arena, one cache of blocks."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.started = time.monotonic()
        self.figures: dict[str, Any] = {"left_out": []}
        self.arena = unnamed_arena(ARENA_BYTES)
        began = time.perf_counter()
        self.pinning = Pinning(runtime, self.arena.address, ARENA_BYTES)
        self.pinning.start().result(DEADLINE_S)
        pin_s = time.perf_counter() - began
        self.figures["pinning"] = {
            "bytes": self.pinning.pinned_bytes, "seconds": round(pin_s, 3),
            "reason": self.pinning.reason,
        }  # fmt: skip
        runtime.use()
        self.cache = runtime.allocate(MOVED_BYTES)
        self.pinned = runtime.pinned(MOVED_BYTES)
        self.stream = runtime.stream(urgent=False)
        self.rates = measure(runtime)
        self.figures["measured_at_start"] = [
            {"direction": r.direction, "piece_bytes": r.piece_bytes, "engine_gb_s": r.engine,
             "kernel_gb_s": r.kernel} for r in self.rates
        ]  # fmt: skip
        self.figures["batches"] = runtime.batches

    def section(self, name: str, run: Callable[[], Any]) -> None:
        """Run a section if there is time. What fails is told, and does not end the others."""
        if time.monotonic() - self.started > BUDGET_S:
            self.figures["left_out"].append(name)
            return
        try:
            self.figures[name] = run()
        except PackageMissing as error:
            self.figures["left_out"].append(f"{name}: {error}")
            self.figures[name] = {"left_out": str(error)}
        except Exception as error:  # A figure that cannot be had is a finding, too.
            self.figures[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(self.figures[name]), flush=True)

    def mover(self, direction: str, below: int) -> DeviceMover:
        """A mover as it is in use; `below`: what the kernel takes."""
        side = 0 if direction == "d2h" else 1
        return DeviceMover(
            self.runtime, name=direction, urgent=side == 1, pinning=self.pinning, host_side=side,
            kernel_below=below,
        )  # fmt: skip

    def seconds(self, put: Callable[[], None]) -> float:
        """Of what is put into our stream."""
        event = self.runtime.event()
        began = time.perf_counter()
        put()
        self.runtime.record(event, self.stream)
        while not self.runtime.is_done(event):
            pass
        return time.perf_counter() - began


def copies_of(
    bench: Bench,
    layout: Layout,
    block_bytes: int,
    direction: str,
    *,
    cache: int = 0,
    arena_offset: int = 0,
) -> tuple[list[Copies], int]:
    """Blocks in a mixed order, cut into chunks as the host tier and the worker do; their bytes."""
    blocks = MOVED_BYTES // block_bytes
    regions: list[Any] = list(layout(cache or bench.cache, block_bytes, blocks))
    part = sum(region.piece_bytes for region in regions)
    order = np.random.default_rng(0).permutation(blocks).tolist()
    found: list[Copies] = []
    for chunk in chunks_of(blocks, block_bytes):
        device = device_spans(regions, order[chunk])
        host = slot_spans(regions, range(blocks)[chunk],
                          arena_address=bench.arena.address + arena_offset,
                          slot_bytes=block_bytes, part_offset=block_bytes - part)  # fmt: skip
        pair = (host, device) if direction == "d2h" else (device, host)
        found.append(Copies.of(pair[0].rows[:, 0], pair[1].rows[:, 0], host.rows[:, 1]))
    return found, part * blocks


def gb_per_s(size: int, seconds: list[float]) -> float:
    return round(size / statistics.median(seconds) / 1e9, 2)


def move_all(*loads: tuple[DeviceMover, list[Copies]]) -> float:
    """Seconds from the first call to the last byte, planning included. Loads of several movers
    begin together."""
    began = time.perf_counter()
    moves = [
        mover.move(chunk, deadline_s=DEADLINE_S)
        for turn in zip_longest(*([(mover, chunk) for chunk in chunks] for mover, chunks in loads))
        for mover, chunk in (load for load in turn if load is not None)
    ]
    for move in moves:
        move.result(DEADLINE_S)
    return time.perf_counter() - began


def plain(bench: Bench, direction: str) -> Callable[[], float]:
    """One cudaMemcpyAsync of all bytes, between pinned memory and the device."""
    pair = (bench.pinned.ctypes.data, bench.cache)
    target, source = pair if direction == "d2h" else pair[::-1]
    return lambda: bench.seconds(
        lambda: bench.runtime.copy(target, source, MOVED_BYTES, bench.stream)
    )


def plain_both(bench: Bench, cache: int) -> float:
    """Seconds of one cudaMemcpyAsync each way at the same time, on two streams."""
    half = MOVED_BYTES // 2
    address, other = bench.pinned.ctypes.data, bench.runtime.stream(urgent=True)
    events = [bench.runtime.event() for _ in range(2)]
    began = time.perf_counter()
    bench.runtime.copy(address, bench.cache, half, bench.stream)
    bench.runtime.copy(cache, address + half, half, other)
    bench.runtime.record(events[0], bench.stream)
    bench.runtime.record(events[1], other)
    while not all(map(bench.runtime.is_done, events)):
        pass
    return time.perf_counter() - began


def pieces(bench: Bench) -> list[dict[str, Any]]:
    """Blocks of layers with pieces of one size, each way and both at once, beside plain copies."""
    second = bench.runtime.allocate(MOVED_BYTES)
    rows: list[dict[str, Any]] = []
    movers = {way: bench.mover(way, choose(bench.rates, way)) for way in ("d2h", "h2d")}
    for kib in PIECE_KIB:
        block_bytes = LAYERS * kib << 10
        layout = layers_of(LAYERS)
        down, size = copies_of(bench, layout, block_bytes, "d2h")
        up, _ = copies_of(bench, layout, block_bytes, "h2d", cache=second,
                          arena_offset=ARENA_BYTES // 2)  # fmt: skip
        loads = {"d2h": (movers["d2h"], down), "h2d": (movers["h2d"], up)}
        arms: dict[str, tuple[int, Callable[[], float]]] = {
            "d2h": (size, partial(move_all, loads["d2h"])),
            "h2d": (size, partial(move_all, loads["h2d"])),
            "both": (2 * size, partial(move_all, *loads.values())),
            "plain_d2h": (MOVED_BYTES, plain(bench, "d2h")),
            "plain_h2d": (MOVED_BYTES, plain(bench, "h2d")),
            "plain_both": (MOVED_BYTES, partial(plain_both, bench, second)),
        }
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name, (_, run) in arms.items():
                taken[name].append(run())
        rates = {f"{name}_gb_s": gb_per_s(arms[name][0], taken[name]) for name in arms}
        rows.append({"piece_kib": kib, **rates})
    for mover in movers.values():
        mover.close()
    return rows


def torch_copy(direction: str) -> Callable[[], float] | None:
    """torch's copy of a pinned tensor, all bytes at once; None without torch."""
    try:
        torch = needed("torch")
    except PackageMissing:
        return None
    host = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(MOVED_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (host, device) if direction == "d2h" else (device, host)

    def run() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return run


def copy_rates(bench: Bench) -> list[dict[str, Any]]:
    """Every direction, layout and size, by turns with the references."""
    rows: list[dict[str, Any]] = []
    for direction in ("d2h", "h2d"):
        threshold = choose(bench.rates, direction)
        arms = {"ours": threshold, "engine": 0, "kernel": 1 << 40}
        movers = {name: bench.mover(direction, below) for name, below in arms.items()}
        references = {"plain": plain(bench, direction), "torch": torch_copy(direction)}
        for (name, layout), kib in _cases():
            chunks, size = copies_of(bench, layout, kib << 10, direction)
            seconds: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for arm, mover in movers.items():
                    seconds.setdefault(arm, []).append(move_all((mover, chunks)))
                for arm, run in references.items():
                    if run is not None:
                        seconds.setdefault(arm, []).append(run())
            rates = {
                f"{arm}_gb_s": gb_per_s(size if arm in arms else MOVED_BYTES, taken)
                for arm, taken in seconds.items()
            }
            rows.append({"direction": direction, "layout": name, "block_kib": kib, **rates})
            print(json.dumps(rows[-1]), flush=True)
            if time.monotonic() - bench.started > BUDGET_S:
                bench.figures["left_out"].append("some copy rates")
                break
        for mover in movers.values():
            mover.close()
    return rows


def _cases() -> Iterator[tuple[tuple[str, Layout], int]]:
    for item in LAYOUTS.items():
        for kib in BLOCK_KIB:
            yield item, kib


def same_bytes(bench: Bench) -> dict[str, bool]:
    """Goal: no rate of wrong bytes. Every layout there and back, into a slot that was emptied."""
    found: dict[str, bool] = {}
    content = bench.arena.array[:MOVED_BYTES]
    expected = np.random.default_rng(1).integers(0, 255, MOVED_BYTES, dtype=np.uint8)
    for name, layout in LAYOUTS.items():
        good = True
        for below in (0, 1 << 40):
            there, _ = copies_of(bench, layout, 64 << 10, "h2d")
            back, size = copies_of(bench, layout, 64 << 10, "d2h")
            up, down = bench.mover("h2d", below), bench.mover("d2h", below)
            content[:] = expected
            move_all((up, there))
            content[:] = 0
            move_all((down, back))
            up.close()
            down.close()
            moved = content != 0
            good &= bool((content[moved] == expected[moved]).all())
            good &= int(np.count_nonzero(moved)) >= 0.99 * size  # Of noise, 1 in 255 is 0.
        found[name] = good
    return found


def stolen(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a matmul on its own stream: alone, and while blocks are offloaded."""
    torch = needed("torch")
    side = torch.randn(MATMUL_SIDE, MATMUL_SIDE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(side)
    compute = torch.cuda.Stream()

    def matmuls() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            begin.record()
            for _ in range(MATMULS):
                torch.matmul(side, side, out=out)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / MATMULS

    chunks, _ = copies_of(bench, layers_of(LAYERS), 256 << 10, "d2h")
    for _ in range(MATMUL_WARM_UPS):
        matmuls()
    arms = {"engine": 0, "kernel": 1 << 40}
    taken: dict[str, list[float]] = {"alone_ms": []}
    copying = dict.fromkeys((f"{arm}_still_copying" for arm in arms), True)
    for _ in range(MATMUL_ROUNDS):
        for arm, below in arms.items():
            taken["alone_ms"].append(matmuls())
            mover = bench.mover("d2h", below)
            moves = [mover.move(c, deadline_s=DEADLINE_S) for _ in range(20) for c in chunks]
            taken.setdefault(f"{arm}_ms", []).append(matmuls())
            copying[f"{arm}_still_copying"] &= not moves[-1].done()
            for move in moves:
                move.result(DEADLINE_S)
            mover.close()
    medians = {name: round(statistics.median(times), 4) for name, times in taken.items()}
    lost = {
        f"{arm}_percent": round(100 * (medians[f"{arm}_ms"] / medians["alone_ms"] - 1), 2)
        for arm in arms
    }
    return medians | lost | copying


def onboard(bench: Bench) -> dict[str, Any]:
    """Milliseconds from asking for 512 blocks to having them, through the worker's reader."""
    gpu = Gpu(bench.runtime)
    reader = DeviceReader(gpu, arena_path=bench.arena.path, arena_address=bench.arena.address)
    reader._pinning._done.result(DEADLINE_S)
    figures: dict[str, Any] = {"bytes": ONBOARD_BLOCKS * ONBOARD_BLOCK_BYTES}
    for name, layout in LAYOUTS.items():
        chunks, _ = copies_of(bench, layout, ONBOARD_BLOCK_BYTES, "h2d")
        wanted = chunks[: max(1, ONBOARD_BLOCKS * ONBOARD_BLOCK_BYTES // CHUNK_BYTES)]
        spans = [(_spans(c.targets, c.lengths), _spans(c.sources, c.lengths)) for c in wanted]
        taken = sorted(_ask(reader, spans) * 1e3 for _ in range(ONBOARD_ROUNDS))
        figures[name] = {"p50_ms": round(taken[len(taken) // 2], 3), "p90_ms": round(
            taken[int(0.9 * len(taken))], 3)}  # fmt: skip
    reader.close()
    return figures


def _spans(addresses: Any, lengths: Any) -> Spans:
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, lengths
    return Spans(rows)


def _ask(reader: DeviceReader, spans: list[tuple[Spans, Spans]]) -> float:
    began = time.perf_counter()
    reads: list[Any] = [reader.read(t, s, deadline_s=DEADLINE_S) for t, s in spans]
    for read in reads:
        moved: Transferred = read.result(DEADLINE_S)
        assert moved.bytes > 0
    return time.perf_counter() - began


def sums(bench: Bench) -> dict[str, float]:
    """GB/s of the checksum kernels: many blocks of 128 KiB in layers, and one chunk of a load in
    blocks of 1 MiB, from asking for its sums to having them."""
    found: dict[str, float] = {}
    shapes = {"gb_s": (layers_of(LAYERS), ONBOARD_BLOCK_BYTES, 1024),
              "chunk_gb_s": (block_outermost, 1 << 20, CHUNK_BYTES >> 20)}  # fmt: skip
    for name, (layout, block_bytes, count) in shapes.items():
        regions: list[Any] = layout(bench.cache, block_bytes, count)
        summer = DeviceSums(bench.runtime, [regions])
        summer(range(count))
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            summer(range(count))
            seconds.append(time.perf_counter() - began)
        found[name] = gb_per_s(count * block_bytes, seconds)
    return found


def right_sums(bench: Bench) -> bool:
    """Goal: no rate of wrong sums. Those of the kernel beside the library's."""
    xxhash = needed("xxhash")
    regions: list[Any] = layers_of(LAYERS)(bench.cache, ONBOARD_BLOCK_BYTES, 8)
    content = np.random.default_rng(2).integers(0, 255, 8 * ONBOARD_BLOCK_BYTES, dtype=np.uint8)
    bench.pinned[: content.nbytes] = content
    source = bench.pinned.ctypes.data
    bench.seconds(lambda: bench.runtime.copy(bench.cache, source, content.nbytes, bench.stream))
    blocks = content.reshape(LAYERS, 8, -1).swapaxes(0, 1)
    found = DeviceSums(bench.runtime, [regions])(range(8))
    return bool(found == [xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks])


def contract_tests() -> dict[str, Any]:
    """The tests of tests/gpu, in a process of their own."""
    needed("pytest")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "tests/gpu"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S, check=False,
        env=os.environ | {"KVBM_TEST_GPU": "1"},
    )  # fmt: skip
    return {"exit": ended.returncode, "tail": ended.stdout[-3000:] + ended.stderr[-1000:]}


def machine(runtime: CupyRuntime) -> dict[str, Any]:
    """What this was measured on."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(runtime.device)
    return {
        "gpu": properties["name"].decode(), "cupy": cupy.__version__,
        "driver": cupy.cuda.runtime.driverGetVersion(), "python": sys.version.split()[0],
        "bus_id": runtime.bus_id(), "pins_read_only": runtime.pins_read_only,
        "kernels_reach_host": runtime.kernels_reach_host,
    }  # fmt: skip


def main() -> int:
    """Run everything; 1 when bytes were wrong or a test has failed, 2 without a GPU."""
    try:
        runtime = CupyRuntime()
    except CudaUnavailable as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 2
    try:
        bench = Bench(runtime)
    except CudaError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    try:
        bench.section("machine", lambda: machine(runtime))
        bench.section("tests", contract_tests)
        bench.section("same_bytes", lambda: same_bytes(bench))
        bench.section("onboard_512_blocks", lambda: onboard(bench))
        bench.section("stolen_from_matmul", lambda: stolen(bench))
        bench.section("right_sums", lambda: right_sums(bench))
        bench.section("checksum_kernel", lambda: sums(bench))
        bench.section("pieces", lambda: pieces(bench))
        bench.section("copies", lambda: copy_rates(bench))
    finally:
        bench.pinning.close()
        bench.arena.close()
    bench.figures["seconds"] = round(time.monotonic() - bench.started, 1)
    text = json.dumps(bench.figures, indent=1)
    Path(sys.argv[1] if len(sys.argv) > 1 else "gpu.json").write_text(text + "\n")
    return 0 if passed(bench.figures) else 1


def passed(figures: dict[str, Any]) -> bool:
    """Every check that could be made here was; none has failed."""
    tests, sums = figures["tests"], figures.get("right_sums", {"left_out": "no time"})
    return (
        ("left_out" in tests or tests.get("exit") == 0)
        and (sums is True or (isinstance(sums, dict) and "left_out" in sums))
        and all(same is True for same in figures["same_bytes"].values())
    )


if __name__ == "__main__":
    sys.exit(main())
