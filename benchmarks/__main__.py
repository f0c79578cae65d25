"""`python -m benchmarks [NAME …]`: run benchmarks, print tables, write results/NAME.json.

The tables of docs/benchmarks.md are renewed, too.
"""

from __future__ import annotations

import importlib
import sys

from rich.console import Console

from benchmarks.report import report

NAMES = (
    *("identity", "kv_groups", "eviction", "admission", "overload"),
    *("host_path", "disk_path", "latency", "misses", "operators", "tenants"),
)
ON_DEMAND = (
    *("vllm", "sglang", "index", "disk", "restart", "scale", "anatomy", "objects", "waste", "idle"),
    *("secured", "load_or_compute", "route", "step", "registry", "fleet", "peers", "multi_round"),
    *("hints", "resume", "pauses", "memory"),
)
"""Take longer, or need environments of their own: `make bench-vllm`, `make bench-index`, `make
bench-disk`, `make bench-scale`, `make bench-objects`, `make bench-idle`, `make bench-step`, `make
bench-peers`, `make bench-pauses`. `hints` needs recorded agents (`benchmarks/hints.py`), `resume` a
vLLM."""
OWN_TABLES = ("peers",)
"""Have more columns than value and reference, and keep their figures themselves."""


def main() -> int:
    """Run the named benchmarks, or all; 1 when a target was missed."""
    chosen = sys.argv[1:] or list(NAMES)
    unknown = [name for name in chosen if name not in NAMES + ON_DEMAND]
    if unknown:
        print(
            f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES + ON_DEMAND)}",
            file=sys.stderr,
        )
        return 2
    console = Console(width=140)
    met = [_met(name, console) for name in chosen]
    return 0 if all(met) else 1


def _met(name: str, console: Console) -> bool:
    module = importlib.import_module(f"benchmarks.{name}")
    if name in OWN_TABLES:
        return bool(module.measured(console))
    return report(name, module.run(), console)


if __name__ == "__main__":
    sys.exit(main())
