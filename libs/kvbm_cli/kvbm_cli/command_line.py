"""Command lines of `kvbm`: each ends with an exit code, and one line if something is wrong.

| code | meaning |
|---|---|
| 0 | done |
| 1 | refused, away or failed, though the line was right |
| 2 | the line or a setting is wrong; the text names the argument, option or variable |
| 130 | ended by Ctrl-C |
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from typing import TYPE_CHECKING, NoReturn

from kvbm_common.errors import ConfigError, KvbmError

if TYPE_CHECKING:
    from pathlib import Path

    import typer

REFUSED, WRONG = 1, 2
COMPLETION = ("--show-completion", "--install-completion")
TAKES_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""A variable of typer's: its options for completion take the name of a shell, and require it."""


def run_line(app: typer.Typer, arguments: list[str]) -> NoReturn:
    """Run a command, and exit with its code."""
    import typer

    name = "kvbm" if not arguments or arguments[0].startswith("-") else f"kvbm {arguments[0]}"
    try:
        code = app(args=arguments or ["--help"], prog_name="kvbm", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        exit_with(f"{name}: not done", REFUSED)
    except typer.TyperException as error:
        text = getattr(error, "format_message", error.__str__)().rstrip(".")
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else name
        exit_with(f"{name}: {text}; see `{name} --help`", getattr(error, "exit_code", WRONG))
    except KvbmError as error:
        exit_with(f"kvbm: {error}", code_of(error))
    except BrokenPipeError:
        drop_output()
        sys.exit(REFUSED)
    except OSError as error:
        if error.filename is None:  # Standard output may be full.
            drop_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        text = os.strerror(error.errno) if error.errno else str(error)
        exit_with(f"{name}: {where}{text}", WRONG if error.filename is not None else REFUSED)


def drop_output() -> None:
    """Write no more: Python flushes standard output at its end, and would report it again."""
    with contextlib.suppress(io.UnsupportedOperation):  # It is no file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Have all three streams, where some are closed, and none that refuses a character."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for the life of the process.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def require_text(arguments: list[str]) -> None:
    """Refuse an argument that is no UTF-8: the command exits with 2."""
    before = "kvbm"
    for number, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        is_option = option.startswith("--") and option.isprintable()
        if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
            name, text = (option, value) if is_option else (before, argument)
            exit_with(f"kvbm: {ConfigError(name, text, 'text, as UTF-8')}", WRONG)
        before = option if is_option else before if number else f"kvbm {argument}"


def require_writable(path: Path, *, option: str) -> None:
    """Refuse a file that could not be written after minutes of work; raises BadParameter.

    Only to write nothing tells: root may open what is in `/proc`. A pipe stays open to the end of
    the process, or its reader would leave before there is anything to read.
    """
    import typer

    is_new = not os.path.lexists(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # A pipe without a reader fails.
    try:
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
        with open(descriptor, "wb", buffering=0) as file:
            file.write(b"")
    except OSError as error:
        text = f"'{path}' cannot be written: {error.strerror}"
        raise typer.BadParameter(text, param_hint=option) from error
    if is_new:
        path.unlink()


def take_shell(arguments: list[str]) -> None:
    """Have the shell that follows an option for completion count, or be refused.

    Typer looks for the shell that runs the command, and would ignore another's name.
    """
    option, _, value = arguments[0].partition("=") if arguments else ("", "", "")
    if option in COMPLETION and (value or arguments[1:]):
        os.environ[TAKES_SHELL] = "1"


def code_of(error: KvbmError) -> int:
    """Return the exit code of an error."""
    return WRONG if isinstance(error, ConfigError) else REFUSED


def exit_with(text: str, code: int) -> NoReturn:
    """Print one line to standard error, whatever the text has in it, and exit."""
    print(one_line(text), file=sys.stderr)
    sys.exit(code)


def one_line(text: str) -> str:
    r"""Return a text as one line that no terminal interprets.

    >>> one_line("a\n  b\x1b[2J")
    'a b\\x1b[2J'
    """
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    r"""Return a text whose control characters are escaped: no terminal obeys it.

    >>> printable("a\n  b\x1b[2J")
    'a\\n  b\\x1b[2J'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
