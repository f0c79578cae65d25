"""One engine, one set of images, one running project for all tests of this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine import DockerEngine, NoEngine, base_image
from tests.compose.project import BUILD_DEADLINE_S, Project

WANTED = os.environ.get("COMPOSE_TESTS") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this takes minutes and an engine: `make test-compose` says that it is wanted."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(BUILD_DEADLINE_S))
            if not WANTED:
                item.add_marker(pytest.mark.skip(reason="make test-compose runs it"))


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """A Docker engine; without one the tests are skipped."""
    try:
        with DockerEngine() as running:
            yield running
    except NoEngine as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def images(engine: DockerEngine) -> dict[str, str]:
    """The variables with which compose finds the images, all of which are built."""
    try:
        base = base_image()
    except NoEngine as error:
        pytest.skip(str(error))
    variables = {
        "KVBM_BASE_IMAGE": base,
        "KVBM_BUILD_NETWORK": "host",
        "KVBM_VERSION": "test",
    }
    project = Project("kvbm-build", variables)
    project.compose("--profile", "demo", "build", "--quiet", deadline_s=BUILD_DEADLINE_S)
    return variables


@pytest.fixture(scope="session")
def stack(images: dict[str, str]) -> Iterator[Project]:
    """`docker compose up` as it comes, with small caches."""
    project = Project("kvbm-test", images)
    try:
        project.compose("up", "-d")
        project.wait_ready()
        yield project
    finally:
        project.down()
