"""The documents: links lead somewhere, commands exist, and every figure is explained."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from kvbm_common import reasons
from kvbm_common.cli import make_app

from benchmarks.harness import Row
from benchmarks.report import DOCUMENT, RESULTS, markdown

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
OPERATING = (ROOT / "docs/operating.md").read_text()


def by_name(path: Path) -> str:
    """A parameter's id."""
    return str(path.relative_to(ROOT))


def documented_metrics() -> set[str]:
    """Every metric of docs/operating.md; `…_x` continues the first name of its line."""
    names: set[str] = set()
    for line in OPERATING.splitlines():
        found = re.findall(r"`(kvbm_\w+)`", line)
        names |= set(found)
        if found:
            prefix = "_".join(found[0].split("_")[:2])
            names |= {prefix + rest for rest in re.findall(r"`…(_\w+)`", line)}
    return names


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_links_lead_somewhere(path: Path) -> None:
    """Goal: no reader meets a dead end inside the project."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_commands_exist(path: Path) -> None:
    """Goal: what a document tells to type can be typed."""
    text = path.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    make = r"(?:^ {4}|`)(?:[A-Z_]+=\S+ )*make ([a-z][a-z-]*)"
    for target in re.findall(make, text, re.MULTILINE):
        assert target in targets, f"make {target}"
    commands = {command.name for command in make_app([]).registered_commands}
    for command in re.findall(r"(?:^ {4}|`)(?:\.venv/bin/)?kvbm ([a-z]+)", text, re.MULTILINE):
        assert command in commands, f"kvbm {command}"


def test_nothing_is_left_to_fill_in() -> None:
    """Goal: the README shows what a run has printed."""
    text = (ROOT / "README.md").read_text()
    assert "DEMO_OUTPUT" not in text
    for shown in ("time to first token", "onboarded blocks compared", "leases left over"):
        assert shown in text


def test_messages_that_are_explained_are_those_that_are_printed() -> None:
    """Goal: whoever searches for a message finds it."""
    section = OPERATING.split("## Troubleshooting")[1].split("\n## ")[0]
    quoted = re.findall(r"`([^`]*(?:…|%d)[^`]*)`", section)
    assert len(quoted) >= 6
    # Adjacent literals are one message, and what stands in braces is any text.
    source = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for path in [*ROOT.glob("services/*/kvbm_*/*.py"), *ROOT.glob("connectors/**/*.py")]
    )
    for message in quoted:
        for part in re.split(r"\s*…\s*", message):
            assert part in source, message


def test_every_error_code_is_explained() -> None:
    """Goal: no code that an operator cannot look up."""
    section = OPERATING.split("## Errors")[1].split("\n## ")[0]
    explained = set(re.findall(r"`([a-z_]+)`", section))
    source = "\n".join(
        path.read_text()
        for folder in ("libs", "services", "connectors")
        for path in ROOT.glob(f"{folder}/**/*.py")
    )
    codes = set(re.findall(r'^    code(?:: str)? = "([a-z_]+)"', source, re.MULTILINE))
    codes |= set(re.findall(r'ErrorBody\(code="([a-z_]+)"', source))
    assert len(codes) > 50
    assert codes - explained == set()


def test_every_count_of_a_core_is_explained() -> None:
    """Goal: no counter without a line that says what it means."""
    names = documented_metrics()
    for path in ROOT.glob("services/*/kvbm_*/*.py"):
        for name in re.findall(r"counts\[f?\"(\w+)[.\"]", path.read_text()):
            family = f"kvbm_{name.removesuffix('_total')}"
            assert {family, f"{family}_total"} & names, f"{name} of {path.name}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_figures_are_those_of_the_results(path: Path) -> None:
    """Goal: no figure in a document that no run has printed."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[Row])
    section = DOCUMENT.read_text().split(f"<!-- {path.stem} -->\n")[1].split("<!-- end -->")[0]
    title = section.split(":\n")[0]
    assert section == markdown(title, rows)
    assert f"ARGS={path.stem}`" in title


def test_every_reason_of_a_miss_is_explained() -> None:
    """Goal: what `kvbm explain` prints is in the guide, and nothing else is."""
    section = OPERATING.split("## Why was this a miss?\n")[1].split("\n## ")[0]
    first, second = section.split("| outcome | meaning |")
    assert re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE) == list(reasons.MEANINGS)
    assert re.findall(r"^\| `(\w+)` \|", second, re.MULTILINE) == list(reasons.OUTCOMES)
