"""The wheels, in an environment that knows nothing of the repository: `make test-wheels`.

Dependencies come from where pip is configured to look.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from release.packages import PACKAGES, ROOT, project_of, version
from release.wheels import FILTER, build
from tests.vllm.make_env import packages_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OURS = ("KVBM_", "DYN_", "PYTHON", "VIRTUAL_ENV")
VLLM = ROOT / ".venv-vllm"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distributions and wheels of all packages."""
    directory = tmp_path_factory.mktemp("dist")
    build(directory)
    return directory


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executables of an environment with `kvbm-stack` alone.

    Of torch it has an empty wheel: NIXL's names it, nothing of ours imports it, and the real one
    brings five gigabytes.
    """
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory, with_pip=True)
    links = "--find-links", str(dist), "--find-links", str(empty_torch(directory))
    pip(directory / "bin", "install", *links, f"kvbm-stack=={version()}")
    return directory / "bin"


def empty_torch(directory: Path) -> Path:
    """Make a wheel of torch with nothing in it, of the highest version; return where it lies."""
    release = "9999.0"
    with zipfile.ZipFile(directory / f"torch-{release}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{release}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return directory


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A working directory that stays empty."""
    directory = tmp_path / "empty"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def pip(executables: Path, *arguments: str) -> None:
    """Run pip with the configuration of this machine."""
    subprocess.run([executables / "python", "-m", "pip", "--quiet", *arguments], check=True)


def environ(**more: str) -> dict[str, str]:
    """The variables of this process, without what would lead to the repository or its stack."""
    return {name: text for name, text in os.environ.items() if not name.startswith(OURS)} | more


def call(directory: Path, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=directory, env=environ(**more), capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip


def wheel_of(dist: Path, package: Path) -> Path:
    """The wheel of a package."""
    [found] = dist.glob(f"{project_of(package)['name'].replace('-', '_')}-*.whl")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_wheel_holds_every_file_of_its_package(dist: Path, package: Path) -> None:
    """Goal: a page, a source in C or a marker of types is not left behind."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=package, capture_output=True, text=True, check=True
    )
    files = {name for name in tracked.stdout.split("\0") if name.startswith("kvbm_")}
    with zipfile.ZipFile(wheel_of(dist, package)) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert files - names == set()
    assert f"Version: {version()}\n" in metadata
    assert "License-File: LICENSE\n" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_wheel_with_the_library_names_its_platform(dist: Path, tmp_path: Path) -> None:
    """And one that is built without a compiler has no library, and is for all platforms."""
    compiled = wheel_of(dist, ROOT / "libs/kvbm_common")
    with zipfile.ZipFile(compiled) as wheel:
        assert "kvbm_common/copying/_native.so" in wheel.namelist()
    assert "-py3-none-linux_" in compiled.name
    [archive] = dist.glob("kvbm_common-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, **FILTER)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    done = call(
        source, sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path,
        CC="/no/compiler",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [plain] = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(plain) as wheel:
        assert not any(name.endswith(".so") for name in wheel.namelist())


def test_the_command_tells_its_version(installed: Path, empty: Path) -> None:
    done = call(empty, installed / "kvbm", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvbm {version()}\n", "")


def test_nothing_comes_from_the_repository(installed: Path, empty: Path) -> None:
    """Goal: the other tests here are about the wheels."""
    names = [
        "kvbm_common", "kvbm_cli", "kvbm_index", "kvbm_host_tier", "kvbm_disk_tier",
        "kvbm_metrics", "kvbm_connectors",
    ]  # fmt: skip
    code = f"import {', '.join(names)}; print(*[m.__file__ for m in ({', '.join(names)})])"
    done = call(empty, installed / "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(installed.parent)) for path in done.stdout.split())


def test_the_demo_runs(installed: Path, empty: Path) -> None:
    done = call(empty, installed / "kvbm", "demo", "--requests", "60", "--disk-gb", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("passed\n")


async def test_the_stack_starts_and_stops(installed: Path, empty: Path, tmp_path: Path) -> None:
    """With the page of the metrics service, whose files are data of a package."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        installed / "kvbm", "up",
        cwd=empty,
        env=environ(
            KVBM_RUNTIME_DIR=str(tmp_path / "run"), KVBM_STATE_DIR=str(tmp_path / "state"),
            KVBM_NATS_URL=f"nats://127.0.0.1:{free_port()}", DYN_KVBM_METRICS_PORT=str(port),
            KVBM_HOST="wheels", DYN_KVBM_CPU_CACHE_GB="0.05", KVBM_SERVICE_PORT="0",
            KVBM_ROUTER_ENDPOINT="off", KVBM_ROUTER_REPLAY_ENDPOINT="off",
        ),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"Ctrl-C" not in (line := await process.stdout.readline()):
            assert line, "the stack has ended"
        for page in ("", "live/live.js", "live/live.css", "docs"):
            read = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/{page}')"
            done = await asyncio.to_thread(call, empty, installed / "python", "-c", read)
            assert done.returncode == 0, f"{page}: {done.stderr}"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


def test_an_adapter_without_its_engine_says_what_to_install(installed: Path, empty: Path) -> None:
    """Its package is imported without the engine; its class is not."""
    for engine, name in (("vllm", "KvbmConnector"), ("sglang", "KvbmHiCacheStorage")):
        module = f"kvbm_connectors.{engine}"
        done = call(empty, installed / "python", "-c", f"import {module} as m; m.{name}")
        assert f"pip install 'kvbm-stack[{engine}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "extra", "variables"),
    [
        ("object-tier", "s3", {"KVBM_OBJECT_URL": "s3://bucket"}),
        ("index", "etcd", {"KVBM_REGISTRY_URL": "etcd://127.0.0.1:1"}),
        ("host-tier", "otel", {"KVBM_OTLP_ENDPOINT": "http://127.0.0.1:1"}),
    ],
)
def test_a_service_without_its_extra_says_which(
    installed: Path, empty: Path, tmp_path: Path, kind: str, extra: str, variables: dict[str, str]
) -> None:
    """One line names the setting and the extra, and the start has failed."""
    done = call(
        empty, installed / "kvbm", "up", "--only", kind,
        KVBM_RUNTIME_DIR=str(tmp_path / "run"), KVBM_STATE_DIR=str(tmp_path / "state"),
        KVBM_NATS_URL=f"nats://127.0.0.1:{free_port()}", KVBM_SERVICE_PORT="0",
        DYN_KVBM_CPU_CACHE_GB="0.05", KVBM_HOST="wheels", **variables,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert len(said) == 1, done.stderr
    assert f"pip install 'kvbm-stack[{extra}]'" in said[0]
    assert "Traceback" not in done.stderr


def test_the_demo_on_a_gpu_without_cupy_names_the_extra(installed: Path, empty: Path) -> None:
    done = call(empty, installed / "kvbm", "demo", "--device", "cuda")
    assert done.returncode == 1
    assert "pip install 'kvbm-stack[cuda12]'" in done.stdout + done.stderr


@pytest.mark.skipif(not VLLM.exists(), reason="make test-vllm makes the environment of vLLM")
def test_a_real_vllm_offloads_and_loads_with_the_wheels(dist: Path, tmp_path: Path) -> None:
    """The engine's environment has vLLM and two wheels; the smoke test drives it."""
    directory = tmp_path / "vllm"
    venv.create(directory, with_pip=True)
    own, others = packages_of(directory), packages_of(VLLM.resolve())
    (own / "beside.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    wheels = [wheel_of(dist, ROOT / name) for name in ("libs/kvbm_common", "connectors")]
    pip(directory / "bin", "install", "--no-deps", "--ignore-installed", *map(str, wheels))
    code = "import kvbm_connectors.vllm as m; print(m.__file__); m.KvbmConnector"
    done = call(tmp_path, directory / "bin/python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(own))
    command = [sys.executable, "-m", "pytest", "-q", "tests/vllm/test_smoke.py", "-k", "full"]
    smoke = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'smoke'}"], cwd=ROOT,
        env=os.environ | {"KVBM_TEST_VLLM": str(directory)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert smoke.returncode == 0, smoke.stdout
    assert "1 passed" in smoke.stdout
