"""How lines of the command end: codes, and one line of text."""

from __future__ import annotations

import doctest
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from kvbm_cli import admin, command_line, printing
from kvbm_common.errors import ConfigError, KvbmError


def ended(act: Callable[[], None], *arguments: str) -> int:
    """Run a command that does this, and return its exit code."""
    app = typer.Typer()
    app.command("act")(act)
    app.command("other")(lambda: None)
    with pytest.raises(SystemExit) as end:
        command_line.run_line(app, ["act", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def raising(error: BaseException) -> Callable[[], None]:
    """Return a command that raises this."""

    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--slots", "x", "a number"), 2, "kvbm: --slots is 'x', but accepts a number"),
        (KvbmError("the tier\nis away"), 1, "kvbm: the tier is away"),
        (typer.BadParameter("no", param_hint="--tier"), 2,
         "kvbm act: Invalid value for --tier: no; see `kvbm act --help`"),
        (typer.Abort(), 1, "kvbm act: not done"),
        (FileNotFoundError(errno.ENOENT, "x", "/no/file"), 2,
         "kvbm act: /no/file: No such file or directory"),
        (OSError("no room"), 1, "kvbm act: no room"),
        (typer.Exit(3), 3, ""),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_a_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(error)) == code
    assert capsys.readouterr().err == (f"{said}\n" if said else "")


def test_a_file_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    """Goal: a run that fails later leaves no empty file, and none that was there is touched."""
    command_line.require_writable(tmp_path / "new", option="--json")
    (tmp_path / "old").write_text("figures")
    command_line.require_writable(tmp_path / "old", option="--json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "figures")]


def test_a_line_that_is_done_ends_with_0() -> None:
    assert ended(lambda: None) == 0


def test_a_wrong_line_is_followed_by_the_help_that_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Goal: one sentence, and a help that does not fail in the same way."""
    app = typer.Typer()
    app.command("act")(lambda: None)
    app.command("other")(lambda: None)
    for line, said in (
        (["nosuch"], "kvbm: No such command 'nosuch'; see `kvbm --help`\n"),
        (["act", "x"], "kvbm act: Got unexpected extra argument(s) (x); see `kvbm act --help`\n"),
        (["act", "--no"], "kvbm act: No such option: --no; see `kvbm act --help`\n"),
    ):
        with pytest.raises(SystemExit) as end:
            command_line.run_line(app, line)
        assert end.value.code == 2
        assert capsys.readouterr().err == said


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: None, "--no-such") == 2
    assert "--no-such" in capsys.readouterr().err


def test_figures_are_printed_as_the_examples_say() -> None:
    """Goal: 12.2 k and 1.6 GB/s, never 1.223e+04."""
    for module in (printing, command_line, admin):
        assert doctest.testmod(module).failed == 0
    for exponent in range(18):
        assert "e+" not in printing.count(1.223 * 10**exponent)
        assert "e+" not in printing.size(1.223 * 10**exponent)
