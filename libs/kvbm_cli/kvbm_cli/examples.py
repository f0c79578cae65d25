"""Examples of every command, for the end of its `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_BLOCK = "ee47acab818fb0f368c71c5e228d1221"
EXAMPLES: Mapping[str, Sequence[str]] = {
    "up": ("kvbm up", "kvbm up --only host-tier,disk-tier --nats nats://10.0.0.5:4222"),
    "serve": ("kvbm serve index",),
    "config": ("kvbm config", "kvbm config --json"),
    "doctor": ("kvbm doctor", "kvbm doctor --live --json"),
    "audit": ("kvbm audit --last 50",),
    "block": (f"kvbm block {_BLOCK}",),
    "creds": ("kvbm creds", "kvbm creds admin-token"),
    "demo": ("kvbm demo", "kvbm demo --requests 200 --engines 3 --host-gb 0.2 --disk-gb 1"),
    "drain": ("kvbm drain --tier disk --host gpu-a",),
    "undrain": ("kvbm undrain --tier disk --host gpu-a",),
    "events": (
        "kvbm events tail --kind removed",
        "kvbm events tail --since 10m --no-follow --json",
    ),
    "evict": (
        f"kvbm evict {_BLOCK} --tier host",
        f"kvbm evict --prefix {_BLOCK} --tier all --dry-run",
    ),
    "explain": ("kvbm explain --missed --last 50", "kvbm explain cmpl-42"),
    "filter": ("kvbm filter --tier disk --off", "kvbm filter --tier disk --pass-count 3"),
    "forget": ("kvbm forget gpu-a",),
    "index": ("kvbm index holders", f"kvbm index where {_BLOCK}"),
    "jobs": ("kvbm jobs", "kvbm jobs 0f3a9c5d12e4b678 --cancel"),
    "kube-secrets": ("kvbm kube-secrets --out kvbm-creds --nodes gpu-a,gpu-b --namespace kvbm",),
    "loglevel": ("kvbm loglevel debug --kind host-tier",),
    "nats-config": ("kvbm nats-config --out nats --hosts gpu-a,gpu-b --names nats.example",),
    "nats-streams": ("kvbm nats-streams --follow",),
    "pin": (f"kvbm pin {_BLOCK} --tier host --ttl-s 600",),
    "pins": ("kvbm pins",),
    "unpin": ("kvbm unpin 7 --tier host --host gpu-a",),
    "policy": ("kvbm policy prefix --tier host",),
    "prefetch": (f"kvbm prefetch {_BLOCK} --host gpu-a",),
    "reset": (
        "kvbm reset --everything --tier host --dry-run",
        "kvbm reset --everything --tier all --yes",
    ),
    "resize": ("kvbm resize 20000 --tier disk --host gpu-a --instance 0",),
    "services": ("kvbm services",),
    "simulate": ("kvbm simulate --trace trace.jsonl --capacity 1%,5%,20000 --policy lru,prefix",),
    "status": ("kvbm status", "kvbm status --url http://10.0.0.5:6880 --json"),
    "tiers": ("kvbm tiers",),
    "workers": ("kvbm workers",),
}


def epilog_of(command: str) -> str | None:
    """Return the lines after the options of a command's help, if there are examples."""
    lines = EXAMPLES.get(command, ())
    return "\n\n".join(["Examples:", *lines]) if lines else None
