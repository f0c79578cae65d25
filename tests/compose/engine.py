"""A Docker engine for the tests, and a base image: what is there, or made here.

Without an engine one is started, by root, with a socket and data of its own. Where no image can be
pulled the base is made with debootstrap; pip's certificate and index, as this machine has them, go
into that image and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.waiting import wait_for

PULLED_BASE = "python:3.11-slim-bookworm"
MADE_BASE = "kvbm-test-base:bookworm"
MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
START_DEADLINE_S = 30.0
PULL_DEADLINE_S = 120.0
BOOTSTRAP_DEADLINE_S = 600.0
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class NoEngine(Exception):
    """There is no Docker engine, and none can be started; the text says why."""


def docker(*arguments: str, deadline_s: float = 60.0) -> str:
    """Run a docker command and return what it prints; raises CalledProcessError."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=deadline_s, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, done.args, done.stdout, done.stderr[-2000:]
        )
    return done.stdout.strip()


def compose_command() -> list[str]:
    """Compose v2 where it is installed, else docker-compose; raises NoEngine."""
    if shutil.which("docker") and _succeeds(["docker", "compose", "version"]):
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise NoEngine("neither docker compose nor docker-compose is installed")


def _succeeds(command: list[str], *, deadline_s: float = 30.0) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=deadline_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


class DockerEngine:
    """The engine that is there, or one of our own. Use it in `with`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    def __enter__(self) -> DockerEngine:
        if shutil.which("docker") is None:
            raise NoEngine("docker is not installed")
        compose_command()
        if not _succeeds(["docker", "info"]):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.environ.pop("DOCKER_HOST", None)
        if self._directory is not None:
            for mounted in self._directory.glob("exec/netns/*"):  # dockerd leaves it behind.
                subprocess.run(["umount", str(mounted)], check=False, capture_output=True)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        if os.getuid() != 0 or shutil.which("dockerd") is None:
            raise NoEngine("no docker engine answers; root with dockerd could start one")
        self._directory = Path(tempfile.mkdtemp(prefix="kvbm-docker-"))
        socket = f"unix://{self._directory}/docker.sock"
        log_path = self._directory / "dockerd.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd", f"--host={socket}", f"--data-root={self._directory}/data",
                    f"--exec-root={self._directory}/exec", f"--pidfile={self._directory}/pid",
                ],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        os.environ["DOCKER_HOST"] = socket
        process = self._process
        with contextlib.suppress(AssertionError):
            wait_for(
                lambda: process.poll() is not None or _succeeds(["docker", "info"]),
                deadline_s=START_DEADLINE_S, poll_s=0.2,
            )  # fmt: skip
            if process.poll() is None:
                return
        text = log_path.read_text(errors="replace")[-500:]
        self.__exit__()
        raise NoEngine(f"dockerd does not start here: …{text}")


def base_image() -> str:
    """The name of an image that can be BASE; raises NoEngine."""
    chosen = os.environ.get("COMPOSE_TEST_BASE")
    if chosen:
        return chosen
    for image in (MADE_BASE, PULLED_BASE):
        if _succeeds(["docker", "image", "inspect", image]):
            return image
    if _succeeds(["docker", "pull", "--quiet", PULLED_BASE], deadline_s=PULL_DEADLINE_S):
        return PULLED_BASE
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        raise NoEngine(f"{PULLED_BASE} cannot be pulled; root with debootstrap could make a base")
    with tempfile.TemporaryDirectory(prefix="kvbm-base-") as directory:
        _make_base(Path(directory) / "root")
    return MADE_BASE


def _make_base(root: Path) -> None:
    packages = "--include=python3,python3-venv,ca-certificates"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, SUITE, str(root), MIRROR],
        capture_output=True, text=True, timeout=BOOTSTRAP_DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NoEngine(f"debootstrap failed: …{done.stdout[-500:]}")
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    (root / "etc/pip.conf").write_text(_pip_configuration())
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(
            ["docker", "import", "-", MADE_BASE], stdin=archive.stdout, check=True,
            capture_output=True, timeout=BOOTSTRAP_DEADLINE_S,
        )  # fmt: skip


def _pip_configuration() -> str:
    """This machine's pip configuration, as far as a container can use it."""
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False)
    lines = ["[global]", f"cert = {CERTIFICATES}"] if CERTIFICATES.exists() else ["[global]"]
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        addresses = [part for part in value.strip("'").split() if part.startswith("http")]
        if name in ("global.index-url", "global.extra-index-url") and addresses:
            lines.append(f"{name.removeprefix('global.')} = {' '.join(addresses)}")
    return "\n".join(lines) + "\n"
