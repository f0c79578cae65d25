"""The sizes in docs/scaling.md are reckoned from the run in benchmarks/results/fleet.json."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCKS, EVENTS = 8_000_000, 500
"""Of a host: held by eight engines and its tiers; a second, of 16 blocks each."""
REPLICA_GB, REPLICA_CORES = 16, 0.5
"""What a replica may take."""
KEPT_S = 600
"""How long streams keep events."""
HOSTS = (10, 100, 400)


def measured() -> tuple[float, float, float]:
    """Events per CPU-second, bytes of memory for each block, bytes of a stream for each block."""
    rows = {
        row["name"]: row["value"]
        for row in json.loads((ROOT / "benchmarks/results/fleet.json").read_text())
    }
    applied = next(value for name, value in rows.items() if "events applied" in name)
    memory, room = (
        next(value for name, value in rows.items() if name.startswith(begin))
        for begin in ("memory of a replica", "room in the streams")
    )
    return applied * 1_000, memory, room


def expected(hosts: int) -> str:
    """Return the row of a fleet."""
    applied, memory, room = measured()
    gb, cores = hosts * BLOCKS * memory / 1e9, hosts * EVENTS / applied
    partitions = max(1, math.ceil(gb / REPLICA_GB), math.ceil(cores / REPLICA_CORES))
    kept_gb = hosts * EVENTS * 16 * room * KEPT_S / 1e9
    return (
        f"| {hosts} | {hosts * BLOCKS // 1_000_000:,} M | {partitions} "
        f"| {gb / partitions:.1f} GB | {cores / partitions:.2f} | {kept_gb:.1f} GB |"
    )


def test_the_table_of_sizes_is_reckoned_from_the_run() -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    found = re.findall(r"^\| \d+ \| [\d,]+ M \|.*$", text, re.MULTILINE)
    assert found == [expected(hosts) for hosts in HOSTS]
