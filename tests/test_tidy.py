"""House rules that no reviewer should have to look for."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvbm_common": ROOT / "libs/kvbm_common/kvbm_common",
    "kvbm_index": ROOT / "services/index/kvbm_index",
    "kvbm_host_tier": ROOT / "services/host_tier/kvbm_host_tier",
    "kvbm_disk_tier": ROOT / "services/disk_tier/kvbm_disk_tier",
    "kvbm_metrics": ROOT / "services/metrics/kvbm_metrics",
    "kvbm_connectors": ROOT / "connectors/kvbm_connectors",
}
MODULE_LINES_MAX = 520
"""Most are under 300; a longer one hides a second noun."""

CONSOLIDATOR_SHELLS = (
    "service", "streams", "registrar", "connector_socket", "router_sockets", "tier_feed",
)  # fmt: skip
DISK_TIER_SHELLS = (
    "service", "mover", "store", "disk_medium", "depth", "file_backend", "sealing", "sealed_mover",
    "bounce",
)  # fmt: skip
CORES = [
    *(
        PACKAGES["kvbm_common"] / f"{n}.py"
        for n in (
            "slots",
            "leases",
            "announcer",
            "registry_roster",
            "tier_admin",
            "breaker",
            "fates",
        )
    ),
    *PACKAGES["kvbm_common"].glob("eviction/*.py"),
    *(PACKAGES["kvbm_metrics"] / f"{name}.py" for name in ("collector", "flows", "rates")),
    *(
        PACKAGES["kvbm_host_tier"] / f"{name}.py"
        for name in (
            "core",
            "tier",
            "engines",
            "offload",
            "onboard",
            "answers",
            "explain",
            "kept",
            "reason_of",
            "disk_view",
            "messages",
            "peers",
            "peer_messages",
        )
    ),
    *(
        path
        for path in PACKAGES["kvbm_disk_tier"].glob("*.py")
        if path.stem not in DISK_TIER_SHELLS
    ),
    *(
        PACKAGES["kvbm_disk_tier"] / f"objects/{name}.py"
        for name in ("core", "listing", "messages", "names")
    ),
    *(
        path
        for path in PACKAGES["kvbm_index"].glob("*.py")
        if path.stem not in ("service", "keeper", "command")
    ),
    *(PACKAGES["kvbm_connectors"] / f"{name}.py" for name in ("core", "messages")),
    *(
        path
        for path in PACKAGES["kvbm_connectors"].glob("consolidator/*.py")
        if path.stem not in CONSOLIDATOR_SHELLS
    ),
    PACKAGES["kvbm_connectors"] / "sim/paged.py",
]
IMPURE = {"asyncio", "time", "datetime", "random", "os", "threading", "socket", "zmq", "nats"}

ONE_PLACE = {
    "nixl_cu12": {"kvbm_common/nixl_library.py"},
    "xxhash": {"kvbm_common/checksum.py"},
    "boto3": {"objects/bucket.py"},
    "botocore": {"objects/bucket.py"},
    "cryptography": {"kvbm_disk_tier/sealing.py"},
    "opentelemetry": {"kvbm_common/tracing.py"},
    "nats": {"kvbm_common/bus.py", "kvbm_common/nats_client.py", "kvbm_common/verb_server.py"},
    "etcd3": {"kvbm_common/etcd_client.py"},
    "grpc": {"kvbm_common/etcd_client.py"},
}
"""A dependency is imported in one place; the rest of the code sees our own type."""

ENGINE_SAFE = {"msgspec", "numpy", "zmq", "xxhash", "nixl_cu12", "kvbm_common", "kvbm_connectors"}
ENGINE_SIDE = [
    PACKAGES["kvbm_connectors"] / f"{name}.py"
    for name in ("core", "messages", "link", "scheduler", "worker")
]


def sources() -> Iterator[Path]:
    """Every module of the product."""
    for package in PACKAGES.values():
        yield from sorted(package.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """The full names of all modules that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def top(names: set[str]) -> set[str]:
    """The top-level packages."""
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_the_common_library_and_themselves_only(package: str) -> None:
    """Services meet on the wire, never in an import."""
    allowed = {"kvbm_common", package}
    for path in PACKAGES[package].rglob("*.py"):
        ours = top(imports_of(path)) & PACKAGES.keys()
        assert ours <= allowed, f"{path} imports {ours - allowed}"


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cores_are_pure(path: Path) -> None:
    """A core reads no clock and does no IO."""
    impure = top(imports_of(path)) & IMPURE
    assert not impure, f"{path} imports {impure}"
    assert "await " not in path.read_text()


@pytest.mark.parametrize("dependency", ONE_PLACE)
def test_a_dependency_is_imported_in_one_place(dependency: str) -> None:
    """Found by reading every import."""
    found = {"/".join(path.parts[-2:]) for path in sources() if dependency in top(imports_of(path))}
    assert found <= ONE_PLACE[dependency], found


def test_what_engines_import_needs_little() -> None:
    """Goal: the engine's environment decides protobuf, torch and the rest.

    Follows the imports of the connector, and of the common modules that it reaches.
    """
    seen: set[Path] = set()
    todo = list(ENGINE_SIDE)
    outside: dict[str, Path] = {}
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports_of(path):
            package = PACKAGES.get(name.split(".")[0])
            if package is None:
                outside.setdefault(name.split(".")[0], path)
                continue
            module = package.joinpath(*name.split(".")[1:])
            todo.append(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
    foreign = {name for name in outside if name not in sys.stdlib_module_names} - ENGINE_SAFE
    assert not foreign, {name: str(outside[name]) for name in foreign}


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_and_open_with_a_sentence(path: Path) -> None:
    """A module is one noun and says which."""
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "no docstring"
    assert docstring.splitlines()[0].rstrip().endswith((".", ":", ",")) or "." in docstring


def test_locks_name_no_addresses() -> None:
    """Packages, versions and hashes."""
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"https?://|index-url", path.read_text()), path
