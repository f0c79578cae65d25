"""The compose file under a real engine: it comes up, verifies, scales, and survives kills."""

from __future__ import annotations

import os
import signal

import pytest

from tests.compose.engine import docker
from tests.compose.project import SERVICES, Demo, Project, wait_until

USERS = dict.fromkeys(("consolidator", "host-tier", "disk-tier"), "10001")
CONTROL = "10002"
"""The user of what shares no memory or socket with engines."""
REQUESTS = 300
"""Some ten seconds of traffic: enough to be hit in the middle."""


def test_every_container_is_healthy_and_nobody_is_root(stack: Project) -> None:
    """Goal: the health checks say what /readyz says; no service runs as root."""
    for service in SERVICES:
        [container] = stack.containers(service)
        wait_until(lambda name=container: stack.health(name) == "healthy", service)  # type: ignore[misc]
        assert docker("exec", container, "id", "-u") == USERS.get(service, CONTROL), service


def test_demo_verifies_every_block(stack: Project) -> None:
    """Goal: blocks go device, host, disk and back between containers, and are what they must be."""
    demo = Demo(stack, requests=REQUESTS)
    output = demo.wait_passed()
    assert "host → disk" in output
    assert stack.figure("kvbm_onboard_blocks_h2d") > 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_costs_nobody_a_wrong_block(stack: Project, service: str) -> None:
    """Goal: `docker kill` in the middle of traffic, and a start; engines go on, all is consistent.

    Method: 1. traffic; 2. kill one service and start it again; 3. the demo passes: no mismatch, no
    failed request, no lease left, the index says what tiers and engines hold; 4. all is ready.
    """
    demo = Demo(stack, requests=REQUESTS)
    demo.wait_traffic()
    assert demo.runs, "it ended before anything was killed"
    [container] = stack.containers(service)
    docker("kill", container)
    docker("start", container)
    demo.wait_passed()
    stack.wait_ready()


def test_a_crash_is_mended_by_the_engine(stack: Project) -> None:
    """Goal: a process that dies by itself is started again without an operator."""
    if os.getuid() != 0 or os.environ.get("DOCKER_HOST", "unix:").startswith("tcp"):
        pytest.skip("only root on the engine's own machine can make a crash")
    [container] = stack.containers("index")
    os.kill(int(docker("inspect", "-f", "{{.State.Pid}}", container)), signal.SIGKILL)
    wait_until(lambda: docker("inspect", "-f", "{{.RestartCount}}", container) != "0", "a restart")
    stack.wait_ready()


def test_scales_up_and_down_under_traffic(stack: Project) -> None:
    """Goal: replicas join, share the work and leave, and only cached blocks are lost.

    Method: 1. traffic; 2. three indexes, two disk tiers, two host tiers; 3. both disk tiers write;
    4. back to one of each; 5. the demo passes.
    """
    demo = Demo(stack, requests=2 * REQUESTS)
    demo.wait_traffic()
    scale = ["--scale", "index=3", "--scale", "disk-tier=2", "--scale", "host-tier=2"]
    stack.compose("up", "-d", "--no-recreate", *scale)
    wait_until(lambda: stack.instances("index") == 3, "three indexes")
    wait_until(lambda: stack.instances("disk-tier") == 2, "two disk tiers")
    wait_until(lambda: stack.instances("host-tier") == 2, "two host tiers")
    demo.wait_passed()
    again = Demo(stack, requests=REQUESTS)

    def second_writes() -> bool:
        return stack.figure("kvbm_tier_slots", tier="disk", instance="1", state="inactive") > 0

    wait_until(second_writes, "the second disk tier has blocks")
    again.wait_traffic()
    stack.compose("up", "-d", "--no-recreate")
    wait_until(lambda: stack.instances("index") == 1, "one index")
    wait_until(lambda: stack.instances("disk-tier") == 1, "one disk tier")
    wait_until(lambda: stack.instances("host-tier") == 1, "one host tier")
    again.wait_passed()
    stack.wait_ready()


def test_of_two_host_tiers_one_may_be_killed(stack: Project) -> None:
    """Goal: engines of the one that is killed go to the other, and come back."""
    stack.compose("up", "-d", "--no-recreate", "--scale", "host-tier=2")
    try:
        wait_until(lambda: stack.instances("host-tier") == 2, "two host tiers")
        demo = Demo(stack, requests=3 * REQUESTS)  # The killed one is back before its end.
        demo.wait_traffic()
        victim = sorted(stack.containers("host-tier"))[0]
        docker("kill", victim)
        docker("start", victim)
        demo.wait_passed()
    finally:
        stack.compose("up", "-d", "--no-recreate", "--scale", "host-tier=1")
    wait_until(lambda: stack.instances("host-tier") == 1, "one host tier")
    stack.wait_ready()
