"""The command `kvbm simulate`: what an eviction policy would hit on a recorded load."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import typer
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_connectors.sim.workload import BadTrace, BlockIds, read_trace

from kvbm_cli.command_line import code_of, exit_with, require_writable
from kvbm_cli.replay import Requests, bound_of, hits_of, requests_of

COLUMNS = ("capacity", "of distinct", "policy", "hit rate", "bound", "to bound", "µs/block")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one capacity. Rates are parts of all blocks asked for."""

    capacity_blocks: int
    capacity_share: float
    """The capacity as a part of the distinct blocks."""
    policy: str
    hits: int
    hit_rate: float
    bound: float
    distance: float
    """`bound` minus `hit_rate`."""
    us_per_block: float


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """All that `--json` writes."""

    trace: str
    requests: int
    references: int
    distinct_blocks: int
    bound_unlimited: float
    rows: list[Row]


def simulate(
    trace: Path = typer.Option(  # noqa: B008
        ..., help="A trace in Mooncake's format: JSON lines, hash_ids."
    ),
    capacity: str = typer.Option(
        "1%,2%,5%,10%,20%",
        help="Slots of the tier: N or N% of the distinct blocks, commas between.",
    ),
    policy: str = typer.Option(",".join(POLICIES), help="Eviction policies, commas between."),
    requests: int = typer.Option(0, min=0, help="Only the first requests; 0: all."),
    json: Path | None = typer.Option(None, dir_okay=False, help="Write the figures here."),  # noqa: B008
) -> None:
    """Replay a trace through the tiers' eviction policies; hit rates beside the best possible."""
    if not os.path.exists(trace) or os.path.isdir(trace):  # Unlike Path's they take any name.
        raise typer.BadParameter(f"file '{trace}' does not exist", param_hint="--trace")
    if json is not None:
        require_writable(json, option="--json")
    try:
        policies = [name.strip() for name in policy.split(",")]
        for name in policies:
            if name not in POLICIES:
                raise ConfigError("--policy", name, f"{', '.join(POLICIES)}, commas between")
        lines = read_trace(trace, BlockIds, requests=requests or None)
        load = requests_of(line.hash_ids for line in lines)
        if not load.references:
            raise BadTrace(f"{trace} has no request for a block")
        capacities = capacities_of(capacity, load.block_count)
    except KvbmError as error:
        exit_with(f"kvbm: {error}", code_of(error))
    result = simulation(str(trace), load, capacities, policies, show=_table(load))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def capacities_of(text: str, block_count: int) -> list[int]:
    """Parse capacities into blocks, at least one block each; raises ConfigError.

    >>> capacities_of("100, 2%,0.1%", 5000)
    [100, 100, 5]
    """
    found: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"\s*(\d{1,15}|\d{1,3}(?:\.\d{1,15})?(%))\s*", part)
        if not matched:
            raise ConfigError("--capacity", part.strip(), "a number of blocks, or a percentage")
        if matched[2]:
            found.append(max(1, math.floor(float(matched[1][:-1]) / 100 * block_count)))
        else:
            found.append(max(1, int(matched[1])))
    return found


def simulation(
    trace: str,
    load: Requests,
    capacities: list[int],
    policies: list[str],
    *,
    show: Callable[[Row], None] = lambda row: None,
) -> Simulation:
    """Replay a load; every row is shown as soon as it is there."""
    rows: list[Row] = []
    for row in _rows(load, capacities, policies):
        show(row)
        rows.append(row)
    references = load.references
    unlimited = bound_of(load, load.block_count) / max(1, references)
    return Simulation(
        trace=trace, requests=len(load.chains), references=references,
        distinct_blocks=load.block_count, bound_unlimited=round(unlimited, 6), rows=rows,
    )  # fmt: skip


def _rows(load: Requests, capacities: list[int], policies: list[str]) -> Iterator[Row]:
    references = max(1, load.references)
    for slot_count in capacities:
        bound = bound_of(load, slot_count)
        for name in policies:
            started = time.process_time()
            hits = hits_of(load, make_policy(name, slot_count), slot_count)
            seconds = time.process_time() - started
            yield Row(
                capacity_blocks=slot_count,
                capacity_share=round(slot_count / max(1, load.block_count), 6),
                policy=name,
                hits=hits,
                hit_rate=round(hits / references, 6),
                bound=round(bound / references, 6),
                distance=round((bound - hits) / references, 6),
                us_per_block=round(seconds / references * 1e6, 3),
            )


def _table(load: Requests) -> Callable[[Row], None]:
    """Print a heading now, and a line for every row."""
    print(f"{len(load.chains)} requests, {load.references} blocks asked for, "
          f"{load.block_count} distinct")  # fmt: skip
    print(f"{COLUMNS[0]:>10} {COLUMNS[1]:>12}  {COLUMNS[2]:<10}"
          f"{COLUMNS[3]:>9}{COLUMNS[4]:>9}{COLUMNS[5]:>10}{COLUMNS[6]:>10}")  # fmt: skip

    def show(row: Row) -> None:
        print(f"{row.capacity_blocks:>10} {row.capacity_share:>12.2%}  {row.policy:<10}"
              f"{row.hit_rate:>9.2%}{row.bound:>9.2%}{row.distance:>10.2%}"
              f"{row.us_per_block:>10.2f}", flush=True)  # fmt: skip

    return show
