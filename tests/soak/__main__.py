"""`python -m tests.soak --minutes 4 --seed 7`: a soak, its table, its JSON, its plot."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from pathlib import Path

import msgspec

from tests.soak.plants import PLANTS
from tests.soak.plot import plot
from tests.soak.run import Report, soak

MIB = 1 << 20


def main() -> int:
    """Run one soak; the exit code is 1 where something is red, or a plant is not found."""
    arguments = _arguments()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 31)
    print(f"seed {seed}: python -m tests.soak --minutes {arguments.minutes:g} --seed {seed}",
          flush=True)  # fmt: skip
    os.environ.setdefault("UCX_HANDLE_ERRORS", "bt")  # Else an assertion of UCX says no more.
    if arguments.plant:
        os.environ["KVBM_SOAK_PLANT"] = arguments.plant
    report = asyncio.run(soak(seconds=60 * arguments.minutes, seed=seed, logs=arguments.logs))
    if arguments.json:
        encoded = msgspec.json.encode(report)
        arguments.json.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    if arguments.plot:
        arguments.plot.write_text(plot(report))
    print(table(report))
    if arguments.plant:
        found = f"{PLANTS[arguments.plant].red} grew" in report.red
        print(f"the plant {arguments.plant} was {'found' if found else 'not found'}")
        return 0 if found else 1
    return 1 if report.red else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--logs", type=Path, help="a directory that keeps all logs")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a leak that must be found")
    return parser.parse_args()


def table(report: Report) -> str:
    """Return the report for people."""
    lines = [
        f"{report.engines} engines, {report.requests} requests, {report.lookups} lookups in "
        f"{report.seconds / 60:g} minutes; {report.mismatches} wrong blocks",
        "faults: " + ", ".join(f"{n} {what}" for what, n in sorted(report.faults.items())),
        "troubles of engines: " + ", ".join(f"{n} {w}" for w, n in sorted(report.troubles.items())),
        "",
        f"{'':44}{'first':>12}{'last':>12}{'growth':>12}{'allowed':>12}",
    ]
    for one in report.findings:
        scale = MIB if "memory" in one.what or one.what.endswith(("bytes", "streams")) else 1
        unit = " MiB" if scale == MIB else ""
        figures = (one.first, one.last, one.growth, one.allowed)
        cells = "".join(f"{figure / scale:12,.2f}" for figure in figures)
        lines.append(f"{one.what + unit:44}{cells}{'  RED' if one.is_red else ''}")
    pings = [(t.ping_p50_ms, t.ping_p99_ms) for t in (report.second, report.last)]
    shown = "; ".join(f"p50 {p50:.3f} ms, p99 {p99:.3f} ms" for p50, p99 in pings)
    lines.append(f"a byte through another process, second and last tenth: {shown}")
    works = f"{report.second.work_us:.0f} and {report.last.work_us:.0f} µs"
    lines.append(f"processor time of the same work of Python: {works}")
    lines.append(
        "processor time a request, ms: "
        + ", ".join(
            f"{name} {report.second.cpu_ms_by_service.get(name, 0):.1f} and {last_ms:.1f}"
            for name, last_ms in report.last.cpu_ms_by_service.items()
        )
    )
    lines += ["", *(f"{name} {value:,.0f}" for name, value in sorted(report.streams.items()))]
    lines += [f"bound of {name}: {value / MIB:.0f} MiB" for name, value in report.bounds.items()]
    return "\n".join([*lines, "", *(report.red or ["passed"])])


if __name__ == "__main__":
    sys.exit(main())
