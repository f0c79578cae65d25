"""What commands print of the API's answers."""

from __future__ import annotations

import pytest
from kvbm_cli import admin, asking
from kvbm_cli.stack_processes import without_size
from kvbm_common.config.settings import Settings


def shown(*tables: asking.Rows) -> None:
    """Print tables."""
    asking.print_cells(asking.cells_of(tables))


def test_a_row_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: what reads a pipe gets whole values; the text is no markup."""
    shown([{"reasons": "[bold]" + 300 * "x", "blocks": 12_230, "pid": 12_230}])
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["reasons", "blocks", "pid"]
    assert row.split() == ["[bold]" + 300 * "x", "12.2", "k", "12230"]


def test_no_text_of_a_service_reaches_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in a cell nor in a heading; a row stays one row."""
    verb = "x\x1b]0;owned\x07\x1b[2J"
    shown([{"verb": verb, "say\n": "a\nb\tc"}, {"verb": "\udcff\x9b", "say\n": "é"}])
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["verb", "say\\n"]
    assert [row.split() for row in rows] == [
        ["x\\x1b]0;owned\\x07\\x1b[2J", "a\\nb\\tc"], ["\\udcff\\x9b", "é"],
    ]  # fmt: skip


def test_a_long_cell_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does it fill the other rows with blanks."""
    long = "x" * 12_000
    shown([{"reason": long, "tier": "host"}, {"reason": "y", "tier": "disk"}])
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == [long, "host"]
    assert second.split() == ["y", "disk"]
    assert len(second) < 100


def test_a_terminal_gets_the_same_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    shown([{"verb": "[bold]\x1b[2J", "more": "z" * 100}])
    printed = capsys.readouterr().out
    assert "[bold]\\x1b[2J" in printed
    assert "\x1b[2J" not in printed
    assert printed.count("z") == 100


def test_a_job_that_is_waited_for_says_how_far_it_has_come() -> None:
    job = {"verb": "evict", "id": "4f", "progress": {"removed": 12_230, "kept": 1}}
    assert asking.job_line(job, 10.2) == "evict runs for 10 s, job 4f: removed=12.2 k kept=1"
    assert asking.job_line(job | {"progress": {}}, 5) == "evict runs for 5 s, job 4f"


@pytest.mark.parametrize(
    ("request_text", "shown"),
    [
        ('{"actor":"me","hashes":["ab","cd"],"prefix":null}', "hashes=ab,cd"),
        ('{"slots":3,"tier":"disk"}', "slots=3 tier=disk"),
        ('{"actor":"me","enabled":false}', "enabled=false"),
        ('{"hashes":["ab","c', '{"hashes":["ab","c'),
        ("", ""),
        ("\x1b[2J", "\\x1b[2J"),
    ],
)
def test_an_entry_of_the_audit_has_its_parameters(request_text: str, shown: str) -> None:
    """A request that was cut, or is no JSON, is shown as it came, and no terminal obeys it."""
    assert admin.parameters_of(request_text) == shown


def test_tiers_without_a_size_are_named() -> None:
    """Goal: a stack that caches nothing says so when it starts."""
    assert [line.split(":")[0] for line in without_size(Settings.load({}))] == [
        "the host tier keeps no blocks", "the disk tier keeps no blocks", "no tier keeps blocks",
    ]  # fmt: skip
    sized = Settings.load({}, {"cpu_cache_gb": 1.0})
    assert without_size(sized) == ["the disk tier keeps no blocks: DYN_KVBM_DISK_CACHE_GB is 0"]
    assert without_size(Settings.load({}, {"cpu_cache_gb": 1.0, "disk_cache_gb": 1.0})) == []
    by_count = {"cpu_cache_override_num_blocks": 5, "disk_cache_override_num_blocks": 5}
    assert without_size(Settings.load({}, by_count)) == []
