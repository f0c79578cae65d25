"""The documents for newcomers: no name in them is invented, and no figure."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from kvbm_common.config.declarations import all_settings

from benchmarks.harness import Row
from benchmarks.report import RESULTS
from tests.document_commands import commands_of, wrong_with
from tests.test_documents import documented_metrics

DOCS = Path(__file__).parent.parent / "docs"
INDEX = (DOCS / "index.md").read_text()
MIGRATION = (DOCS / "migration.md").read_text()
CONFIGURATION = (DOCS / "configuration.md").read_text()
WITH_COMMANDS = ("index", "migration", "operating", "security")
FOREIGN = ("NVIDIA's KVBM", "LMCache", "in the engine", "`lmcache server`")
"""The headings of columns whose names are another project's."""

VARIABLE = r"\b((?:DYN_)?KVBM_[A-Z0-9_]+)\b"
SETTINGS = {setting.variable for setting in all_settings()}
WITHOUT_EFFECT = set(re.findall(r"^- `(DYN_KVBM_\w+)\*?`", CONFIGURATION, re.MULTILINE))

Table = list[dict[str, str]]


def tables(text: str) -> list[Table]:
    """Return the tables of a document, each row by the headings of its columns."""
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


def section(text: str, name: str) -> Table:
    """Return the table between a mark and its end."""
    return tables(text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0])[0]


def cells(*, foreign: bool) -> str:
    """Return the cells of the page's tables that hold foreign names, or all others."""
    return "\n".join(
        text
        for table in tables(MIGRATION)
        for row in table
        for heading, text in row.items()
        if (heading in FOREIGN) is foreign
    )


def test_every_document_is_on_the_map() -> None:
    """Goal: a new page can be found from the first one."""
    linked = set(re.findall(r"\]\((\w+\.(?:md|yaml))", INDEX))
    assert {path.name for path in DOCS.iterdir() if path.is_file()} - linked == {"index.md"}


def test_variables_of_this_project_exist() -> None:
    """Goal: what stands beside a foreign variable can be set."""
    prose = re.sub(r"^\|.*$", "", MIGRATION, flags=re.MULTILINE)
    used = set(re.findall(VARIABLE, cells(foreign=False) + prose))
    assert len(used) > 40
    assert used - SETTINGS - {"KVBM_CONFIG_FILE"} == set()
    assert "KVBM_CONFIG_FILE" in CONFIGURATION


def test_every_variable_of_nvidias_kvbm_is_on_the_page() -> None:
    """Goal: who comes with a file of variables finds each of them, and no other name."""
    foreign = set(re.findall(VARIABLE, cells(foreign=True)))
    nvidias = set(re.findall(VARIABLE, MIGRATION.split("## From LMCache")[0]))
    known = {name for name in SETTINGS if name.startswith("DYN_")}
    assert foreign - known - WITHOUT_EFFECT == set()
    assert (known | WITHOUT_EFFECT) - nvidias - {"DYN_KVBM_NIXL_BACKEND_"} == set()


def test_equal_names_stand_beside_each_other() -> None:
    """Goal: a row of variables with one name says the same name on both sides."""
    for table in tables(MIGRATION):
        for row in table:
            theirs = re.fullmatch(r"`(DYN_KVBM_\w+)`", row.get("NVIDIA's KVBM", ""))
            if theirs and row["here"] != "–":
                assert row["here"] == f"`{theirs[1]}`"


def test_metrics_exist() -> None:
    """Goal: what stands beside a foreign metric is explained in the guide."""
    used = set(re.findall(r"`(kvbm_\w+)`", MIGRATION)) - {"kvbm_connectors"}
    assert len(used) >= 20
    assert used - documented_metrics() == set()


def test_figures_of_nvidias_kvbm_are_all_on_the_page() -> None:
    """Goal: a dashboard's panels are found, each of them."""
    operating = (DOCS / "operating.md").read_text()
    own = operating.split("## KVBM's figures")[1].split("\n## ")[0]
    assert set(re.findall(r"`(kvbm_\w+)`", own)) <= set(re.findall(r"`(kvbm_\w+)`", MIGRATION))


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_take_their_options(name: str) -> None:
    """Goal: a line that is copied from a document is not refused."""
    found = commands_of((DOCS / f"{name}.md").read_text())
    assert found
    for variables, words in found:
        assert wrong_with(words) == "", " ".join(words)
        assert variables.keys() <= SETTINGS


def test_a_wrong_command_is_noticed() -> None:
    """Goal: the test above sees options and arguments that are not there."""
    ((variables, words),) = commands_of("`KVBM_HOST=a kvbm reset --anything`")
    assert variables == {"KVBM_HOST": "a"}
    assert "--anything" in wrong_with(words)
    assert "kvbmx" in wrong_with(["kvbmx"])
    assert wrong_with(["pin"]) != ""


def test_engines_lines_are_those_of_their_pages() -> None:
    """Goal: the quick start has no line of its own that could grow old."""
    start = INDEX.split("## Quick start")[1].split("\n## ")[0]
    for page in re.findall(r"\n```\n.*?```\n.*?\((\w+)\.md", start, re.DOTALL):
        line = start.split("```\n")[1]
        start = start.split("```\n", 2)[2]
        assert line in (DOCS / f"{page}.md").read_text(), page


def test_sizes_are_those_of_the_formula() -> None:
    """Goal: bytes of a token follow from the shape that stands beside them."""
    shapes = section(INDEX, "shapes")
    assert len(shapes) > 8
    for row in shapes:
        shape = re.fullmatch(r"(?:(\d+) ×|(latent)) (\d+)", row["KV heads × head size"])
        assert shape, row
        heads, latent, each = shape.groups()
        layers = int(row["layers"])
        size = layers * int(each) * 2 * (1 if latent else 2 * int(heads))
        assert row["bytes of a token"] == f"{size:,}"
        assert row["a prompt of 32,768 tokens"] == f"{size * 32768 / 1e9:.2f} GB"
        assert row["tokens in 100 GB"] == f"{100_000_000_000 // size:,}"


def result(name: str, beginning: str) -> Row:
    """Return the only row of a benchmark's result that begins so."""
    rows = msgspec.json.decode((RESULTS / f"{name}.json").read_bytes(), type=list[Row])
    (found,) = (row for row in rows if row.name.startswith(beginning))
    return found


def test_rates_are_those_of_the_results() -> None:
    """Goal: what a medium gives was measured."""
    for row in section(INDEX, "media"):
        named = re.fullmatch(r"`(\w+)`: (.+)", row["row"])
        assert named, row
        measured = result(named[1], named[2]).value
        assert row["GB/s"] == f"{measured:g}"
        assert row["tokens in a second"] == f"{int(measured * 1e9 // 131_072):,}"


def test_costs_are_those_of_the_results() -> None:
    """Goal: what it costs, and what it gains, was measured."""
    cold, loaded = section(INDEX, "costs")
    stored = result("vllm", "TTFT cold, storing, 1,000 tokens, beside no connector")
    assert (cold["with KVBM"], cold["without"]) == (f"{stored.value} ms", f"{stored.reference} ms")
    host = result("vllm", "TTFT loaded from the host tier, beside the hit on the device")
    again = result("vllm", "TTFT recomputed after eviction")
    assert (loaded["with KVBM"], loaded["without"]) == (f"{host.value} ms", f"{again.value} ms")
