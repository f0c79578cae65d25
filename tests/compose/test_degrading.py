"""What a container may forbid: io_uring, and reading another process's memory. Both do without."""

from __future__ import annotations

import json
from pathlib import Path

from tests.compose.engine import docker
from tests.compose.project import Demo, Project

NO_IO_URING = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {
            "names": ["io_uring_setup", "io_uring_enter", "io_uring_register"],
            "action": "SCMP_ACT_ERRNO",
        }
    ],
}
"""What Docker's own profile does since version 25."""
PROBE = "from kvbm_common.nixl.library import probe_posix; print(probe_posix())"


def doctor(images: dict[str, str], *options: str) -> dict[str, dict[str, str]]:
    """What `kvbm doctor` finds in a container with these options, by check."""
    image = f"kvbm/tools:{images['KVBM_VERSION']}"
    script = "kvbm doctor --json || true"  # Without NATS something is wrong for sure.
    output = docker("run", "--rm", *options, "--entrypoint", "sh", image, "-c", script)
    return {row["check"]: row for row in json.loads(output)}


def test_without_io_uring_disks_use_aio(images: dict[str, str], tmp_path: Path) -> None:
    """Goal: the mover takes what is allowed, and the doctor says what is missed."""
    profile = tmp_path / "seccomp.json"
    profile.write_text(json.dumps(NO_IO_URING))
    options = ["--security-opt", f"seccomp={profile}"]
    image = f"kvbm/tools:{images['KVBM_VERSION']}"
    probe = docker("run", "--rm", *options, "--entrypoint", "python3", image, "-c", PROBE)
    assert probe == "use_aio"
    found = doctor(images, *options)["io_uring"]
    assert found["level"] == "better"
    assert "Linux AIO" in found["found"]


def test_doctor_knows_containers(images: dict[str, str]) -> None:
    """Goal: a container with 64 MB of shared memory is told so; one with the host's is not."""
    small = doctor(images, "-e", "DYN_KVBM_CPU_CACHE_GB=1")["shared memory"]
    assert small["level"] == "wrong"
    assert "--ipc=host" in small["advice"]
    large = doctor(images, "-e", "DYN_KVBM_CPU_CACHE_GB=0.05", "--ipc=host")["shared memory"]
    assert large["level"] == "ok"


def test_without_a_shared_process_namespace_ucx_uses_tcp(images: dict[str, str]) -> None:
    """Goal: `KVBM_PID=` costs speed and nothing else: every block is what it must be."""
    project = Project("kvbm-apart", {**images, "KVBM_PID": ""})
    try:
        project.compose("up", "-d")
        project.wait_ready()
        Demo(project, requests=100).wait_passed()
    finally:
        project.down()
