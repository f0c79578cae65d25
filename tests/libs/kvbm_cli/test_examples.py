"""The examples at the end of each command's help."""

from __future__ import annotations

import re

import pytest
import typer
from kvbm_cli.examples import EXAMPLES
from kvbm_cli.main import make_app

from tests.document_commands import commands_of, wrong_with


def test_every_command_has_examples() -> None:
    group = typer.main.get_command(make_app([]))
    assert isinstance(group, typer.core.TyperGroup)
    assert group.commands.keys() == EXAMPLES.keys()
    for name, command in group.commands.items():
        assert command.epilog, name
        assert all(line in command.epilog for line in EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_typed(name: str) -> None:
    """Goal: an option that changes its name changes it here, too."""
    text = "\n".join(f"    {line}" for line in EXAMPLES[name])
    found = commands_of(text)
    assert len(found) == len(EXAMPLES[name])
    for _, words in found:
        assert words[0] == name
        assert wrong_with(words) == "", words
        hashes = [word for word in words if re.fullmatch("[0-9a-f]{20,}", word)]
        assert all(len(word) == 32 for word in hashes)
