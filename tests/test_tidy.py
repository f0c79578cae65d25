"""House rules that no reviewer should have to look for."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.private_names import private_names

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvbm_common": ROOT / "libs/kvbm_common/kvbm_common",
    "kvbm_cli": ROOT / "libs/kvbm_cli/kvbm_cli",
    "kvbm_index": ROOT / "services/index/kvbm_index",
    "kvbm_host_tier": ROOT / "services/host_tier/kvbm_host_tier",
    "kvbm_disk_tier": ROOT / "services/disk_tier/kvbm_disk_tier",
    "kvbm_metrics": ROOT / "services/metrics/kvbm_metrics",
    "kvbm_connectors": ROOT / "connectors/kvbm_connectors",
}
MODULE_LINES_MAX = 400
"""Most are under 300; a longer one hides a second noun."""

PURE_FOLDERS = ("core", "tier", "eviction")
CORES = [
    *(
        path
        for package in PACKAGES.values()
        for path in sorted(package.rglob("*.py"))
        if set(path.relative_to(package).parts[:-1]) & set(PURE_FOLDERS)
    ),
    PACKAGES["kvbm_common"] / "identity.py",
    PACKAGES["kvbm_common"] / "registry/presence.py",
    PACKAGES["kvbm_common"] / "access/roles.py",
    PACKAGES["kvbm_common"] / "access/grants.py",
    PACKAGES["kvbm_common"] / "nats/streams.py",
    PACKAGES["kvbm_connectors"] / "sim/paged.py",
]
"""Modules without clock, socket, file, thread, event loop or random source: the folder says so."""
SETTINGS = [
    PACKAGES["kvbm_common"] / f"config/{name}.py" for name in ("settings", "declarations", "schema")
]
"""Cores take the record of the settings; reading files and variables is in the same modules."""
PURE_IMPORTS = {
    "__future__", "array", "binascii", "bisect", "builtins", "collections", "contextlib",
    "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "json", "math", "mmap",
    "msgspec", "numpy", "operator", "pydantic", "re", "struct", "types", "typing", "xxhash",
}  # fmt: skip
"""What a core may import besides modules of ours; those follow the same rule. `mmap` is for memory
in small pages: without `open` it maps no file."""
IMPURE_NAMES = {"open", "print", "input", "exec", "eval", "__import__", "hash", "id"}
"""Builtins that do IO, or whose result is another one in every process."""

ONE_PLACE = {
    "nixl_cu12": {"kvbm_common/nixl/library.py"},
    "xxhash": {"kvbm_common/checksum.py"},
    "boto3": {"kvbm_disk_tier/objects/shell/s3_client.py"},
    "botocore": {
        "kvbm_disk_tier/objects/shell/bucket.py",
        "kvbm_disk_tier/objects/shell/s3_client.py",
    },
    "cryptography": {
        "kvbm_common/access/nkeys.py",
        "kvbm_disk_tier/shell/cipher.py",
        "kvbm_cli/creds/certificates.py",
    },
    "prometheus_client": {
        "kvbm_common/runtime/metrics.py",
        "kvbm_common/service/http_port.py",
        "kvbm_metrics/shell/exposition.py",
    },
    "opentelemetry": {"kvbm_common/service/tracing.py"},
    "nats": {
        "kvbm_common/nats/bus.py",
        "kvbm_common/nats/direct_client.py",
        "kvbm_common/nats/verb_server.py",
    },
    "etcd3": {"kvbm_common/registry/etcd_client.py"},
    "grpc": {"kvbm_common/registry/etcd_client.py"},
}
"""A dependency is imported in one place; the rest of the code sees our own type."""

ENGINE_SAFE = {"msgspec", "numpy", "zmq", "xxhash", "nixl_cu12", "kvbm_common", "kvbm_connectors"}
ENGINE_SIDE = [
    *sorted((PACKAGES["kvbm_connectors"] / "core").glob("*.py")),
    *(
        PACKAGES["kvbm_connectors"] / f"client/{name}.py"
        for name in ("link", "link_thread", "scheduler", "worker")
    ),
]


def sources() -> Iterator[Path]:
    """Every module of the product."""
    for package in PACKAGES.values():
        yield from sorted(package.rglob("*.py"))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """The full names of all modules that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return frozenset(names)


def top(names: Iterable[str]) -> set[str]:
    """The top-level packages."""
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_the_common_library_and_themselves_only(package: str) -> None:
    """Services meet on the wire, never in an import."""
    allowed = {"kvbm_common", package}
    if package == "kvbm_cli":
        allowed |= {"kvbm_connectors"}  # The demo's engines.
    for path in PACKAGES[package].rglob("*.py"):
        ours = top(imports_of(path)) & PACKAGES.keys()
        assert ours <= allowed, f"{path} imports {ours - allowed}"


@functools.cache
def modules_of(path: Path) -> frozenset[str]:
    """Return the full name of each module that a module imports at run time."""
    names: set[str] = set()
    typing_only: set[int] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing_only |= {id(inner) for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if id(node) not in typing_only}
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            assert not node.level, f"{path} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if file_of(inner) else str(node.module))
    return frozenset(names)


def file_of(module: str) -> Path | None:
    """Return the file of a module of ours."""
    package = PACKAGES.get(module.split(".")[0])
    if package is None:
        return None
    path = package.joinpath(*module.split(".")[1:])
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if found.exists() else None


@functools.cache
def pure_modules() -> dict[Path, Path | None]:
    """Return the cores and every module of ours that they reach, with the one that imports it."""
    found: dict[Path, Path | None] = {}
    todo: list[tuple[Path, Path | None]] = [(path, None) for path in CORES]
    while todo:
        path, importer = todo.pop()
        if path in found or path in SETTINGS:
            continue
        found[path] = importer
        todo += [(file, path) for name in modules_of(path) if (file := file_of(name))]
    return found


IMPURE_NUMPY = tuple(
    f"{module}.{name}" for module in ("np", "numpy")
    for name in ("random", "fromfile", "load", "memmap", "datetime64", "save", "genfromtxt")
)  # fmt: skip
"""What numpy has of chance, files and clocks."""


def impurities(path: Path) -> Iterator[str]:
    """Yield what a pure module must not have."""
    yield from {name.split(".")[0] for name in modules_of(path)} - PURE_IMPORTS - PACKAGES.keys()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"line {node.lineno}: {type(node).__name__}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in IMPURE_NAMES:  # Called, or handed to `map`.
                yield f"line {node.lineno}: {node.id}()"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if ast.unparse(node).startswith(IMPURE_NUMPY):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "numpy":
            yield f"line {node.lineno}: names of numpy, which are not looked at"


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cores_are_pure(path: Path) -> None:
    """A core reads no clock, does no IO and draws no chance."""
    assert not list(impurities(path))


def test_what_cores_reach_is_pure() -> None:
    """A core imports no shell, and no module of ours that is not pure itself."""
    found = {
        f"{path.relative_to(ROOT)} (by {importer.relative_to(ROOT)})": list(impurities(path))
        for path, importer in pure_modules().items()
        if importer is not None
    }
    assert not {path: what for path, what in found.items() if what}
    assert not [path for path in found if "/shell/" in path]


IMPURE_CORE = """
import ctypes, http.client
from kvbm_common.nats import bus
async def turn(): ...
def now(): return open("/proc/uptime"), print(1), map(hash, "a"), np.random.default_rng()
def load(): return np.fromfile("/dev/urandom", np.uint8), [id(now)]
if not TYPE_CHECKING:
    import time
"""


def test_an_impure_module_is_found(tmp_path: Path) -> None:
    """Each way out of a core is seen: libraries, coroutines, builtins, chance, imports of ours."""
    planted = tmp_path / "core.py"
    planted.write_text(IMPURE_CORE)
    found = " ".join(impurities(planted))
    for what in ("ctypes", "http", "AsyncFunctionDef", "open()", "print()", "hash()", "random",
                 "np.fromfile", "id()", "time"):  # fmt: skip
        assert what in found
    assert "kvbm_common.nats.bus" in set(modules_of(planted))


def test_only_the_command_package_installs_a_command() -> None:
    """An engine's environment has kvbm_common, and no `kvbm` that cannot run there."""
    found = [
        path.parent.name
        for path in (*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml"),
                     ROOT / "connectors/pyproject.toml")
        if "scripts" in tomllib.loads(path.read_text())["project"]
    ]  # fmt: skip
    assert found == ["kvbm_cli"]


@pytest.mark.parametrize("dependency", ONE_PLACE)
def test_a_dependency_is_imported_in_one_place(dependency: str) -> None:
    """Found by reading every import."""
    found = {
        str(path.relative_to(root.parent))
        for root in PACKAGES.values()
        for path in root.rglob("*.py")
        if dependency in top(imports_of(path))
    }
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
        for name in modules_of(path):
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


PACED = {
    "tests/waiting.py": "the only place that looks again until something holds",
    "tests/libs/kvbm_common/registry/test_etcd.py": "measures how long the event loop stood still",
    "tests/services/disk_tier/objects/odd_server.py": "an answer that drips",
    "tests/services/disk_tier/s3_server.py": "a slow bucket",
    "tests/services/index/test_kills.py": "the pace of changes, and a kill at a random time",
    "tests/services/index/test_replicas.py": "the pace of changes, and a kill at a random time",
    "tests/connectors/consolidator/shell/test_service.py": "an engine's beat",
    "tests/integration/test_live_page.py": "the pace of events",
    "tests/integration/test_prometheus.py": "the pace of requests",
    "tests/soak/census.py": "the pace of censuses",
    "tests/soak/clock.py": "the pace at which a process looks at its clock",
    "tests/soak/faults.py": "the times of the plan, and how long a fault lasts",
    "tests/soak/onlooker.py": "the pace of lookups",
    "tests/soak/run.py": "the pace of samples",
    "tests/soak/traffic.py": "the pace of requests and of engines",
    "tests/vllm/engine_process.py": "holds a load back, and steps the engine until it is idle",
    "tests/vllm/fuzz/engine.py": "steps the engine until it is idle",
}
"""The test modules that sleep, each with its reason; `sleep(0)` gives a turn and is no wait."""


def test_no_test_sleeps() -> None:
    """A test waits for what it waits for, with a deadline: `tests/waiting.py` has the ways."""
    sleeping = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if "sleep" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "sleep"
        and [ast.unparse(argument) for argument in node.args] != ["0"]
    }
    assert sleeping == PACED.keys()


IN_ENGINE = "runs inside the engine's process: from its objects only private names lead to ours"
BREAKS = "a plant: it breaks the product inside, to see that this is noticed"
AGES = "begins counters where no run of a test could count to"
HURRIES_EXIT = "`os._exit`: torch's and vLLM's own exit takes seconds"
NO_GPU = "the calls of a runtime without a GPU: its constructor needs one"
RACE = "takes away the check before the allocation, as a race would"
PRIVATE_ALLOWED = {
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_copy_rows"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_cuda"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_cupy"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_streams"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_sum_parts"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_cupy_calls.py", "_sum_kibs"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_driver_calls.py", "_cuda"): NO_GPU,
    ("tests/libs/kvbm_common/cuda/test_driver_calls.py", "_driver"): NO_GPU,
    ("tests/libs/kvbm_common/memory/test_arena.py", "_mapped"): "a mapping that fails late",
    ("tests/libs/kvbm_common/memory/test_arena_space.py", "_check_space"): RACE,
    ("tests/libs/kvbm_common/nats/test_event_subscription.py", "_horizon"): (
        "publishes on when the reader has looked: how far it has is told to no caller"
    ),
    ("tests/libs/kvbm_common/nats/test_direct_client.py", "_direct"): "a client without a server",
    ("tests/libs/kvbm_common/nats/test_guarded_bus.py", "_connect_command"): "nats-py's own",
    ("tests/libs/kvbm_common/nats/test_direct_client.py", "_ps"): "nats-py's parser",
    ("tests/libs/kvbm_common/nats/test_direct_client.py", "_send_ping"): "nats-py's own name",
    ("tests/libs/kvbm_common/nats/test_public_client.py", "_direct"): "must be empty after a test",
    ("tests/libs/kvbm_common/nats/test_public_client.py", "_process_msg"): "nats-py's own method",
    ("tests/libs/kvbm_common/nats/test_public_client.py", "_raw"): "a message of nats-py as ours",
    ("tests/libs/kvbm_common/nats/test_stream_positions.py", "_Delivered"): (
        "the two numbers of a consumer, as the server sends them"
    ),
    ("tests/libs/kvbm_common/nixl/test_mover_thread.py", "_call"): "asks the pump for its pause",
    ("tests/libs/kvbm_common/nixl/test_mover_thread.py", "_start"): (
        "the order in which the pump starts transfers"
    ),
    (
        "tests/libs/kvbm_common/runtime/test_processes.py",
        "_next_number",
    ): "makes chance a known one",
    ("tests/libs/kvbm_common/runtime/test_processes.py", "_KERNELS_PORTS"): "another kernel's file",
    ("tests/libs/kvbm_common/tier/test_block_columns.py", "_nodes"): (
        "two ways to build a policy must leave the same nodes"
    ),
    ("tests/libs/kvbm_common/tier/test_follow.py", "_move"): (
        "a move outside the table, which no message reaches"
    ),
    ("tests/services/disk_tier/shell/test_mover.py", "_put"): "the hook that subclasses override",
    ("tests/services/host_tier/shell/test_service_space.py", "_check_space"): RACE,
    ("tests/services/metrics/shell/test_api.py", "_transport"): "httpx's own name",
    ("tests/services/metrics/shell/test_event_feed.py", "_now_s"): "the clock of the feed",
    ("tests/services/metrics/shell/test_event_feed.py", "_pause"): "the clock of the feed",
    ("tests/sglang/plants.py", "*"): BREAKS,
    ("tests/sglang/rank_process.py", "*"): IN_ENGINE,
    ("tests/sim/ages.py", "*"): AGES,
    ("tests/sim/plants.py", "*"): BREAKS,
    ("tests/sim/plants_engines.py", "*"): BREAKS,
    ("tests/sim/plants_month.py", "*"): BREAKS,
    ("tests/sim/plants_tiers.py", "*"): BREAKS,
    ("tests/vllm/device/engine.py", "*"): IN_ENGINE,
    ("tests/vllm/device/live.py", "*"): IN_ENGINE,
    ("tests/vllm/device/live_process.py", "*"): HURRIES_EXIT,
    ("tests/vllm/engine_process.py", "*"): IN_ENGINE,
    ("tests/vllm/fields_process.py", "*"): HURRIES_EXIT,
    ("tests/vllm/fuzz/engine.py", "*"): IN_ENGINE,
    ("tests/vllm/fuzz/plants.py", "*"): BREAKS,
    ("tests/vllm/fuzz/offer_plants.py", "*"): BREAKS,
    ("tests/vllm/fuzz/processes.py", "_process"): "the standard library's executor",
    ("tests/vllm/kv_layout_process.py", "*"): HURRIES_EXIT,
    ("tests/vllm/multimodal_process.py", "*"): HURRIES_EXIT,
    ("tests/vllm/namespace_process.py", "*"): HURRIES_EXIT,
    ("tests/vllm/versions_process.py", "*"): HURRIES_EXIT,
}
"""(file, name) → why a test may use this private name; `*`: every name in that file."""


def test_no_test_reads_a_private_attribute_of_the_product() -> None:
    """A test knows what an operator can know: effects, views, statistics, replies, metrics."""
    used = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "tests").rglob("*.py")
        for _, name in private_names(path.read_text())
    }
    whole = {(file, "*") for file, _ in used} & PRIVATE_ALLOWED.keys()
    used = {(file, name) for file, name in used if (file, "*") not in whole} | whole
    assert used == PRIVATE_ALLOWED.keys()


PRIVATE_READS = """
from kvbm_common.nats.bus import _pack
class Fake:
    def __init__(self): self._own = 1
    def made(self): return self._own, Fake()._own, self._theirs
class Engine(Fake):
    def again(self): return self._own
def test(monkeypatch, host):
    assert host.core._held.table, host.__class__
    host.core._draining = True
    monkeypatch.setattr(host, "_step", None)
    return Fake()._own
class Local:
    def hides(self, core): _table = core._table; patch.object(core, "_door"); patch("a.b._name")
import kvbm_common._inside
"""


def test_a_private_read_is_found() -> None:
    """Reads, writes, imports and names in text are seen; a class may use what it defines."""
    found = [(line, name) for line, name in private_names(PRIVATE_READS)]
    assert found == [
        (2, "_pack"), (5, "_theirs"), (9, "_held"), (10, "_draining"), (11, "_step"), (12, "_own"),
        (14, "_table"), (14, "_door"), (14, "_name"), (15, "_inside"),
    ]  # fmt: skip
