"""The `kvbm …` lines of a document, and whether the command takes them."""

from __future__ import annotations

import re
import shlex

import typer
import typer.core
from kvbm_cli.main import make_app

_VARIABLE = r"(?:[A-Z][A-Z0-9_]*=\S+ )*"
_BLOCK = re.compile(rf"^ {{4}}({_VARIABLE})(?:\.venv/bin/)?(kvbm [a-z].*)$", re.MULTILINE)
_CODE = re.compile(rf"`({_VARIABLE})(kvbm [a-z][^` ]* [^`]*)`")


def commands_of(text: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return variables and words of every `kvbm …` in blocks and code of a document's text.

    Code of one word in a sentence is a command's name, not a line to type.
    """
    text = re.sub(r" \\\n +", " ", text)
    found = [*_BLOCK.findall(text), *_CODE.findall(" ".join(text.split("\n")))]
    return [
        (dict(word.split("=", 1) for word in before.split()), shlex.split(line, comments=True)[1:])
        for before, line in found
    ]


def named_in(text: str) -> set[str]:
    """Return the commands that a sentence or a cell of a table names without anything after."""
    return set(re.findall(r"`kvbm ([a-z][a-z-]*)`", text))


def wrong_with(words: list[str]) -> str:
    """Return what the command line says against the words of a command; nothing: they are right."""
    group = typer.main.get_command(make_app(words))
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands.get(words[0])
    if command is None:
        return f"there is no command {words[0]}"
    try:
        command.make_context(words[0], words[1:])
    except typer.TyperException as error:
        return str(error) or type(error).__name__
    return ""
