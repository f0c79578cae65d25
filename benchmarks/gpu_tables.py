"""The tables of docs/gpu.md, from what `benchmarks/gpu.py FILE.json` has written.

python3 benchmarks/gpu_tables.py FILE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def goals(figures: dict[str, Any]) -> list[tuple[str, float, str, float, bool]]:
    """Return the figures that have a goal: what, value, unit, goal, whether it is met."""
    by_piece = {row["piece_kib"]: row for row in figures["pieces"]}
    stolen, copied = figures["stolen_from_matmul"], by_piece[512]["plain_d2h_gb_s"]
    at_least: list[tuple[str, float, float]] = [
        ("device → host, pieces of 512 KiB", by_piece[512]["d2h_gb_s"], 50),
        ("host → device, pieces of 512 KiB", by_piece[512]["h2d_gb_s"], 50),
        ("both at once, pieces of 512 KiB", by_piece[512]["both_gb_s"], 80),
        ("device → host, pieces of 32 KiB", by_piece[32]["d2h_gb_s"], 45),
        ("host → device, pieces of 32 KiB", by_piece[32]["h2d_gb_s"], 45),
        ("checksums on the device", figures["checksum_kernel"]["gb_s"], round(0.9 * copied, 1)),
    ]
    rows = [(what, value, "GB/s", goal, value >= goal) for what, value, goal in at_least]
    lost = stolen["engine_percent"]
    return [*rows, ("what a matmul loses beside the copy engine", lost, "%", 2.0, lost <= 2)]


def tables(figures: dict[str, Any]) -> str:
    """Return the Markdown tables of a run: goals, plain copies, layouts."""
    machine, plain = figures["machine"], figures["pieces"][-1]
    lines = [
        f"`benchmarks/gpu.py` on {machine['gpu']}, driver's CUDA {machine['driver'] // 1000}, "
        f"cupy {machine['cupy']}:", "",
        "| what | value | goal | met |", "| --- | --- | --- | --- |",
        *(f"| {what} | {value} {unit} | {goal} | {'yes' if met else 'no'} |"
          for what, value, unit, goal, met in goals(figures)),
        f"| one plain copy, device → host | {plain['plain_d2h_gb_s']} GB/s | | |",
        f"| one plain copy, host → device | {plain['plain_h2d_gb_s']} GB/s | | |",
        f"| one plain copy each way at once | {plain['plain_both_gb_s']} GB/s | | |",
        f"| what a matmul loses beside the kernel | "
        f"{figures['stolen_from_matmul']['kernel_percent']} % | | |",
        "",
    ]  # fmt: skip
    sizes = sorted({row["block_kib"] for row in figures["copies"]})
    heads = " | ".join(f"{size} KiB" for size in sizes)
    for direction, words in (("d2h", "Device → host"), ("h2d", "Host → device")):
        lines += [f"| {words}, GB/s of blocks of | {heads} |", "| --- |" + " --- |" * len(sizes)]
        for layout in dict.fromkeys(row["layout"] for row in figures["copies"]):
            rates = {
                row["block_kib"]: row["ours_gb_s"]
                for row in figures["copies"]
                if (row["direction"], row["layout"]) == (direction, layout)
            }
            cells = " | ".join(str(rates.get(size, "")) for size in sizes)
            lines.append(f"| {layout} | {cells} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
