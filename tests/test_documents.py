"""The documents: links lead somewhere, commands exist, and every figure is explained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kvbm_cli.main import make_app
from kvbm_common.tier import reasons

from benchmarks.harness import Row
from benchmarks.report import DOCUMENT, RESULTS, markdown
from tests.test_words import BANNED_PATTERN

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
OPERATING = (ROOT / "docs/operating.md").read_text()
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
DECISIONS = ROOT / "docs/decisions.md"
WALKTHROUGH = ROOT / "docs/walkthrough.md"
CHANGELOG = ROOT / "CHANGELOG.md"

COLUMNS_MAX = 100
ARCHITECTURE_LINES_MAX = 250
STOPS_MAX = 12
LINES_WITHOUT_LANDMARK_MAX = 15
SENTENCE_WORDS_MAX = 25
WITH_LANDMARKS = [
    ROOT / "README.md", ARCHITECTURE, ROOT / "CONTRIBUTING.md", DECISIONS, WALKTHROUGH,
]  # fmt: skip
GIVES_UP = (
    "services/host_tier", "services/disk_tier", "libs/kvbm_common/kvbm_common/tier",
    "libs/kvbm_common/kvbm_common/nixl",
)  # fmt: skip
"""Where the reasons of `kvbm_dropped_total` come from."""
GENERATED = {"docs/configuration.md", "docs/benchmarks.md"}


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
def test_packages_go_into_an_environment(path: Path) -> None:
    """Goal: the line works where the system's Python takes no packages, as Debian's does."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("    ") and "pip install --find-links" in line:
            assert "-m venv" in lines[number - 1], line


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
    typed = r"(?:^ {4}|`)(?:\.venv/bin/)?kvbm ([a-z][a-z-]*)"
    for command in re.findall(typed, text, re.MULTILINE):
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
        for path in [*ROOT.glob("services/*/kvbm_*/**/*.py"), *ROOT.glob("connectors/**/*.py")]
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
    counted = 0
    for path in ROOT.glob("services/*/kvbm_*/**/*.py"):
        for name in re.findall(r"counts\[f?\"(\w+)[.\"]", path.read_text()):
            family = f"kvbm_{name.removesuffix('_total')}"
            assert {family, f"{family}_total"} & names, f"{name} of {path.name}"
            counted += 1
    assert counted > 50, "the counters have moved to where this test does not look"


RUNS = [*sorted(RESULTS.glob("*.json")), *sorted(RESULTS.glob("*_cores/*.json"))]
"""Here and on machines with more cores."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_figures_are_those_of_the_results(path: Path) -> None:
    """Goal: no figure in a document that no run has printed."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[Row])
    mark = f"<!-- {path.relative_to(RESULTS).with_suffix('')} -->\n"
    section = DOCUMENT.read_text().split(mark)[1].split("<!-- end -->")[0]
    title = section.split(":\n")[0]
    assert section == markdown(title, rows)
    assert f"ARGS={path.stem}`" in title


def test_every_reason_of_a_miss_is_explained() -> None:
    """Goal: what `kvbm explain` prints is in the guide, and nothing else is."""
    section = OPERATING.split("## Why was this a miss?\n")[1].split("\n## ")[0]
    first, second = section.split("| outcome | meaning |")
    assert re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE) == list(reasons.MEANINGS)
    assert re.findall(r"^\| `(\w+)` \|", second, re.MULTILINE) == list(reasons.OUTCOMES)


def texts_of(*folders: str) -> tuple[set[str], set[str]]:
    """Return the string constants of the code, and what f-strings begin with."""
    constants: set[str] = set()
    beginnings: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                beginnings.add(str(node.values[0].value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
    return constants, beginnings


def test_every_reason_of_a_drop_exists() -> None:
    """Goal: the table of `kvbm_dropped_total` has what the tiers count, and nothing else.

    A reason is a key of its own, or the code of a failure after a beginning such as `offer_`.
    """
    section = OPERATING.split("### Reasons for work given up\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE)
    constants, beginnings = texts_of(*GIVES_UP)
    keys = {text.removeprefix("dropped.") for text in constants if text.startswith("dropped.")}
    groups = {text.removeprefix("dropped.") for text in beginnings if text.startswith("dropped.")}
    families = {"fill", "peer"}
    assert families < keys, "for `reason_key`, which puts a reason after each"
    keys -= families | groups
    groups |= {f"{family}_" for family in families}
    all_names: set[str] = set()
    for names_text, meaning in rows:
        names = re.findall(r"`(\w+…?)`", names_text)
        behind = {name.rstrip("…") for name in names if name.endswith("…")}
        assert behind <= groups, names_text
        whole = [name for name in names if not name.endswith("…")]
        said = re.findall(r"`([a-z_]+)`", meaning)
        for name in [*whole, *(word for word in said if word not in constants)]:
            in_group = {name.removeprefix(group) for group in groups if name.startswith(group)}
            known = {name, *(group + name for group in behind)} & keys
            assert known or in_group & constants, f"no tier counts {name}: {names_text}"
        all_names.update(names)
    rest = tuple(name.rstrip("…") for name in all_names if name.endswith("…"))
    unsaid = {key for key in keys - all_names if not key.startswith(rest)}
    unsaid |= {group for group in groups if not any(name.startswith(group) for name in all_names)}
    assert unsaid == set(), "the table does not say what these are"


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a document that are not in a code block."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def headings(text: str) -> list[tuple[int, str]]:
    """Return level and title of every heading."""
    found = (re.fullmatch(r"(#+) (.*)", line) for _, line in prose_lines(text))
    return [(len(match[1]), match[2]) for match in found if match]


def anchor(title: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs and lists, without tables and headings."""
    lines = [line.strip() for _, line in prose_lines(text)]
    prose = "\n".join("" if line.startswith(("|", "#")) else line for line in lines)
    for paragraph in re.split(r"\n\n+|\n(?=- |\d+\. )", prose):
        yield from re.split(r"(?<=[.:;?!*]) (?=[A-Z`*\[])", " ".join(paragraph.split()))


def functions_of(path: Path) -> set[str]:
    """Return the functions of a module, methods as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (child.name for child in node.body if isinstance(child, kinds))
            names |= {f"{node.name}.{name}" for name in inner}
    return names


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_anchors_of_links_are_headings(path: Path) -> None:
    """Goal: a link into a page ends at the section that it means."""
    for target, name in re.findall(r"\]\(([^)#]*)#([^)]+)\)", path.read_text()):
        page = path.parent / target if target else path
        if not target.startswith("http"):
            anchors = {anchor(title) for _, title in headings(page.read_text())}
            assert name in anchors, f"{target}#{name}"


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if by_name(path) not in GENERATED], ids=by_name
)
def test_lines_outside_of_tables_fit(path: Path) -> None:
    """Goal: a document can be read beside the code; a table cell cannot be broken."""
    text = path.read_text()
    long = [n for n, line in prose_lines(text) if len(line) > COLUMNS_MAX and line[0] != "|"]
    assert not long, f"lines {long}"


def test_architecture_is_short() -> None:
    """Goal: the map is read as a whole."""
    lines = ARCHITECTURE.read_text().splitlines()
    assert len(lines) <= ARCHITECTURE_LINES_MAX
    assert max(map(len, lines)) <= COLUMNS_MAX


@pytest.mark.parametrize("path", WITH_LANDMARKS, ids=by_name)
def test_a_heading_or_table_comes_every_few_lines(path: Path) -> None:
    """Goal: an eye that looks for something finds a place to stop."""
    since = 0
    for number, line in prose_lines(path.read_text()):
        since = 0 if line.startswith(("#", "|")) else since + 1
        assert since <= LINES_WITHOUT_LANDMARK_MAX, f"line {number}"


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if by_name(path) not in GENERATED], ids=by_name
)
def test_sentences_are_short(path: Path) -> None:
    """Goal: a sentence is understood at the first reading."""
    for sentence in sentences(path.read_text()):
        assert len(sentence.split()) <= SENTENCE_WORDS_MAX, sentence


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if by_name(path) not in GENERATED], ids=by_name
)
def test_the_subject_is_the_thing(path: Path) -> None:
    """Goal: documents follow the same list as docstrings; printed output is not theirs."""
    prose = " ".join(" ".join(line for _, line in prose_lines(path.read_text())).split())
    assert BANNED_PATTERN.findall(prose) == []


def test_every_decision_has_context_decision_and_cost() -> None:
    """Goal: a reader learns what a decision was for, and what it costs."""
    sections = re.split(r"^### ", DECISIONS.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) > 50
    for section in sections:
        parts = re.findall(r"^\*\*(\w+)\.\*\*", section, re.MULTILINE)
        assert parts == ["Context", "Decision", "Cost"], section.splitlines()[0]


def test_every_decision_is_listed() -> None:
    """Goal: the list of each subject, and its number in the contents, are complete."""
    text = DECISIONS.read_text()
    numbers = dict(re.findall(r"^\| \[([^]]+)\]\([^)]+\) \| (\d+) \|", text, re.MULTILINE))
    subjects = re.split(r"^## ", text, flags=re.MULTILINE)[2:]
    assert [subject.splitlines()[0] for subject in subjects] == list(numbers)
    for subject in subjects:
        listed = re.findall(r"^- \[(.+)\]\(", subject, re.MULTILINE)
        assert listed == re.findall(r"^### (.+)$", subject, re.MULTILINE)
        assert len(listed) == int(numbers[subject.splitlines()[0]])


def test_walkthrough_names_functions_that_exist() -> None:
    """Goal: each stop leads to the function that it speaks of."""
    stops = re.split(r"^\d+\. ", WALKTHROUGH.read_text(), flags=re.MULTILINE)[1:]
    assert 8 <= len(stops) <= STOPS_MAX
    for stop in stops:
        named = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", stop)
        assert named, stop
        for name, target in named:
            assert name in functions_of(WALKTHROUGH.parent / target), f"{name} in {target}"


def test_changelog_keeps_its_sections() -> None:
    """Goal: a user finds what was added, changed and fixed, as keepachangelog.com has it."""
    found = headings(CHANGELOG.read_text())
    assert found[0] == (1, "Changelog")
    releases = [title for level, title in found if level == 2]
    assert releases[0] == "[Unreleased]"
    for release in releases[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release)
    kinds = {title for level, title in found if level == 3}
    assert {"Added", "Changed", "Fixed"} <= kinds
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Goal: a module that has moved takes its mentions along."""
    named = re.findall(r"`((?!/)[\w./]+\.(?:py|yml|conf))`", path.read_text())
    named += [name + "/" for name in re.findall(r"`(kvbm_\w+(?:/\w+)+)`", path.read_text())]
    folders = ("libs", "services", "connectors", "tests", "compose", "examples")
    product = [ROOT / name for name in folders]
    for name in named:
        found = (ROOT / name).exists() or any(any(top.rglob(name)) for top in product)
        assert found, name
