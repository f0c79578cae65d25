"""What is mutated, and the tests that must notice: of each module those that need no server."""

from __future__ import annotations

from dataclasses import dataclass

HOST_TIER = "tests/services/host_tier/core"
DISK_TIER = "tests/services/disk_tier/core"
CONNECTORS = "tests/connectors/core"
VLLM = "tests/connectors/vllm"
TIER = "tests/libs/kvbm_common/tier"


@dataclass(frozen=True, slots=True)
class Subject:
    """One module, by its path below the directory of its package, and its tests."""

    root: str
    path: str
    tests: tuple[str, ...]


SUBJECTS = {
    "slots": Subject(
        "libs/kvbm_common", "kvbm_common/tier/slots.py", (f"{TIER}/test_slots.py",)
    ),
    "blocks": Subject(
        "libs/kvbm_common",
        "kvbm_common/tier/blocks.py",
        tuple(f"{TIER}/test_{part}.py" for part in ("blocks", "slots")),
    ),
    "block_columns": Subject(
        "libs/kvbm_common",
        "kvbm_common/tier/block_columns.py",
        tuple(f"{TIER}/test_{part}.py" for part in ("block_columns", "slots")),
    ),
    "leases": Subject(
        "libs/kvbm_common", "kvbm_common/tier/leases.py", (f"{TIER}/test_leases.py",)
    ),
    **{
        name: Subject(
            "connectors",
            f"kvbm_connectors/core/{name}.py",
            tuple(f"{CONNECTORS}/test_core{part}.py"
                  for part in ("", "_attach", "_offers", "_outcomes", "_states", "_edges")),
        )
        for name in ("core", "lookups", "offers", "outbox", "attachment")
    },
    **{
        name: Subject(
            "connectors",
            f"kvbm_connectors/vllm/{name}.py",
            tuple(f"{VLLM}/test_{part}.py"
                  for part in ("calendar", "tracked", "steps", "scheduler_side", "device_offers",
                               "kv_groups", "window_steps", "draft_offers", "stream_marks",
                               "block_holds", "names", "image_names")),
        )
        for name in ("calendar", "tracked", "device_offers", "kv_groups", "stream_marks",
                     "block_holds")
    },
    "offload": Subject(
        "services/host_tier",
        "kvbm_host_tier/core/offload.py",
        tuple(f"{HOST_TIER}/test_{part}.py"
              for part in ("offload", "offload_failures", "offload_edges", "core")),
    ),
    "onboard": Subject(
        "services/host_tier",
        "kvbm_host_tier/core/onboard.py",
        tuple(f"{HOST_TIER}/test_{part}.py"
              for part in ("onboard", "onboard_edges", "peers", "explain", "load_cost", "core")),
    ),
    "fills": Subject(
        "services/host_tier",
        "kvbm_host_tier/core/fills.py",
        tuple(f"{HOST_TIER}/test_{part}.py"
              for part in ("onboard", "onboard_edges", "explain", "core")),
    ),
    "writes": Subject(
        "services/disk_tier",
        "kvbm_disk_tier/core/writes.py",
        tuple(f"{DISK_TIER}/test_{part}.py"
              for part in ("writes", "writes_edges", "writes_in_flight", "pending",
                           "core", "core_health")),
    ),
    "reads": Subject(
        "services/disk_tier",
        "kvbm_disk_tier/core/reads.py",
        tuple(f"{DISK_TIER}/test_{part}.py" for part in ("reads", "reads_edges", "core",
                                                         "core_health")),
    ),
    "groups": Subject(
        "libs/kvbm_common", "kvbm_common/tier/kv_groups.py", (f"{TIER}/test_kv_groups.py",)
    ),
    "follow": Subject(
        "libs/kvbm_common", "kvbm_common/tier/follow.py", (f"{TIER}/test_follow.py",)
    ),
}  # fmt: skip
