"""Compares a real vLLM with our connector against the same vLLM alone, on drawn programs.

`python -m tests.vllm.fuzz --seeds 0:200 --shapes chunked,lora --minutes 10 --jobs 2`
`python -m tests.vllm.fuzz --replay '{"seed":…}'` runs one program again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from tests.vllm.fuzz import plants
from tests.vllm.fuzz.campaign import Campaign, Tally, Wishes
from tests.vllm.fuzz.program import Program
from tests.vllm.fuzz.shapes import SHAPES
from tests.vllm.fuzz.show import Board

PROGRESS_S = 10.0


def main() -> int:
    """Run, print, and say with the exit code whether something failed."""
    arguments = parse()
    if arguments.job:
        return job(arguments)
    board = Board(arguments.quiet)
    workers = [start(arguments, number) for number in range(arguments.jobs)]
    threads = [threading.Thread(target=listen, args=(worker, board)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [worker.wait() for worker in workers]
    if arguments.plants:
        print(board.table())
        return 0 if board.all_found else 1
    print(board.summary())
    return 1 if board.failures or any(codes) else 0


def start(arguments: argparse.Namespace, number: int) -> subprocess.Popen[bytes]:
    """One job: it has a share of the shapes, or of the seeds where there is one shape."""
    command = [sys.executable, "-m", "tests.vllm.fuzz", *sys.argv[1:], "--job", str(number + 1)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])


def listen(worker: subprocess.Popen[bytes], board: Board) -> None:
    """Take its tallies as they come."""
    assert worker.stdout is not None
    for line in worker.stdout:
        board.take(worker.pid, msgspec.json.decode(line, type=Tally))


def job(arguments: argparse.Namespace) -> int:
    """The work itself; one line of JSON for every program."""
    number = arguments.job - 1
    shapes = [name for name in arguments.shapes.split(",") if name]
    first, _, end = arguments.seeds.partition(":")
    programs = [Program.of(line) for line in arguments.replay]
    if programs:
        shapes = sorted({program.shape for program in programs})
    programs *= arguments.times
    names = list(plants.PLANTS) if arguments.plants == "all" else arguments.plants.split(",")
    names = [name for name in names if name][number :: arguments.jobs]
    if len(shapes) > 1 or programs:
        shapes = shapes[number :: arguments.jobs]
    low, high = int(first), int(end or int(first) + 1)
    if len(shapes) > 1 or arguments.jobs > 1:
        low, high = _share(low, high, number, arguments)

    def report(tally: Tally) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")
        sys.stdout.buffer.flush()

    directory = Path(arguments.work or tempfile.mkdtemp(prefix="kvbm-fuzz-"))
    wishes = Wishes(
        shapes=shapes, first=low, end=high, plant=arguments.plant,
        shrink_s=arguments.shrink, failures_max=arguments.failures, programs=programs,
        until_s=time.monotonic() + 60 * arguments.minutes, work=directory / f"job{number}",
        report=report, plants=names, plant_s=arguments.plant_seconds,
    )  # fmt: skip
    Campaign(wishes).run() if shapes or names else None
    return 0


def _share(low: int, high: int, number: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """A part of the seeds."""
    size = -(-(high - low) // arguments.jobs)
    return low + number * size, min(high, low + (number + 1) * size)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="A:B, shared out among shapes and jobs")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--replay", action="append", default=[], metavar="PROGRAM")
    parser.add_argument("--times", type=int, default=1, help="how often to replay")
    parser.add_argument("--plant", default="", choices=["", *plants.PLANTS])
    parser.add_argument("--plants", default="", help="a table: `all`, or names")
    parser.add_argument("--plant-seconds", type=float, default=120.0, help="for each of a table")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds per failure")
    parser.add_argument("--failures", type=int, default=5, help="per shape, then it stops")
    parser.add_argument("--work", default="", help="where logs are kept")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
