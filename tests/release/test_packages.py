"""The packages: one version, and what a package index shows of each."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from release.packages import (
    CHART,
    PACKAGES,
    PIN,
    ROOT,
    chart_with_version,
    project_of,
    version,
    with_version,
)
from release.wheels import require_ours

EXTRAS = {"vllm", "sglang", "s3", "cuda12", "cuda13", "otel", "etcd"}
by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def test_every_package_is_released() -> None:
    """Goal: a new package is not forgotten. The root holds tools' settings and no package."""
    places = (*ROOT.glob("[!.]*/pyproject.toml"), *ROOT.glob("[!.]*/[!.]*/pyproject.toml"))
    assert {path.parent for path in places} == set(PACKAGES)


@by_name
def test_a_package_has_the_version_of_the_stack(package: object) -> None:
    """Its siblings too: two versions in one environment would not fit each other."""
    text = (ROOT / str(package) / "pyproject.toml").read_text()
    assert with_version(text, version()) == text
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {}).values()
    wanted = [*project["dependencies"], *(one for extra in extras for one in extra)]
    ours = [name for name in wanted if name.startswith("kvbm")]
    assert all(PIN.fullmatch(f'"{name}"') for name in ours), ours


def test_a_version_is_written_everywhere() -> None:
    """Goal: one command changes the version of a package and of what it needs."""
    text = (ROOT / "libs/kvbm_stack/pyproject.toml").read_text()
    project = tomllib.loads(with_version(text, "12.0.3"))["project"]
    assert project["version"] == "12.0.3"
    assert all(name.endswith("==12.0.3") for name in project["dependencies"])
    assert project["optional-dependencies"]["s3"] == ["kvbm-disk-tier[s3]==12.0.3"]


def test_the_chart_has_the_version_of_the_stack() -> None:
    """Its own, and that of the images without a tag: `release version` writes both."""
    text = CHART.read_text()
    assert chart_with_version(text, version()) == text
    changed = chart_with_version(text, "12.0.3")
    for name in ("version", "appVersion"):
        assert f"\n{name}: {version()}\n" in text
        assert f"\n{name}: 12.0.3\n" in changed


@pytest.mark.parametrize("wrong", ["", "1", "1.2", "1.2.3rc1", "v1.2.3", "1.2.3\n", "٠.٢.١"])
def test_a_version_of_another_form_is_refused(wrong: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "release", "version", wrong],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "accepts three numbers" in done.stderr


@pytest.mark.parametrize("foreign", ["notes.txt", "numpy-2.0-py3-none-any.whl", "kvbm_cli"])
def test_a_directory_with_foreign_files_is_kept(tmp_path: Path, foreign: str) -> None:
    """Goal: `release wheels DIR` replaces wheels of a run before, and removes nothing else."""
    (tmp_path / "kvbm_cli-0.0.1-py3-none-any.whl").touch()
    (tmp_path / "kvbm_stack-0.0.1.tar.gz").touch()
    require_ours(tmp_path)
    require_ours(tmp_path / "missing")
    (tmp_path / foreign).touch()
    done = subprocess.run(
        [sys.executable, "-m", "release", "wheels", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert foreign in done.stderr
    assert len(list(tmp_path.iterdir())) == 3


@by_name
def test_a_package_says_what_it_is(package: object) -> None:
    """Readme, licence, authors, classifiers; addresses of a project would be invented."""
    directory = ROOT / str(package)
    project = project_of(directory)
    assert project["readme"] == "README.md"
    assert (
        f"# {project['name']}" in (text := (directory / "README.md").read_text())
        or "# KVBM" in text
    )
    assert (directory / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["license-files"] == ["LICENSE"]
    assert project["authors"] == [{"name": "The KVBM authors"}]
    assert any(
        one.startswith("Operating System :: POSIX :: Linux") for one in project["classifiers"]
    )
    assert "urls" not in project


def test_the_stack_brings_every_package_and_names_its_extras() -> None:
    """`pip install kvbm-stack` installs all of it."""
    project = project_of(ROOT / "libs/kvbm_stack")
    names = {re.split(r"[\[=]", one)[0] for one in project["dependencies"]}
    assert names == {project_of(package)["name"] for package in PACKAGES} - {"kvbm-stack"}
    assert project["optional-dependencies"].keys() == EXTRAS
    readme = (ROOT / "libs/kvbm_stack/README.md").read_text()
    assert all(f"`{extra}`" in readme for extra in EXTRAS)


def test_the_engines_are_those_that_the_readme_names() -> None:
    """Goal: the extras ask for no version that was not tested."""
    extras = project_of(ROOT / "libs/kvbm_stack")["optional-dependencies"]
    readme = (ROOT / "README.md").read_text()
    assert extras["vllm"] == ["vllm>=0.29,<0.34"]
    assert "| vLLM | 0.29 to 0.33 |" in readme
    assert extras["sglang"] == ["sglang==0.5.23"]
    assert "| SGLang | 0.5.23 |" in readme


def test_setup_says_what_it_installs() -> None:
    """Goal: half a minute of downloads is not silent, also where the output is a pipe."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert len(lines) >= 3
    assert [line for line in lines if "--quiet" in line] == []
