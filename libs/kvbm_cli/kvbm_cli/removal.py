"""Preview of a removal: `--dry-run` shows it, and `--everything` asks before it starts."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer
from kvbm_common.errors import ConfigError
from kvbm_common.wire.operator_verbs import Given, OperatorVerb, either

from kvbm_cli.admin_client import Client
from kvbm_cli.asking import Json, Rows, asked, cells_of, only, picked, print_cells, run
from kvbm_cli.command_line import REFUSED, WRONG, exit_with

YES = typer.Option(False, "--yes", help="With --everything: do not ask.")
DRY_RUN = typer.Option(False, "--dry-run", help="Show where it would remove; remove nothing.")
FIELDS = ("tier", "host", "instance", "bytes_used", "slots")
COMMITTED = ("active", "inactive")
"""States of slots that hold a block (`kvbm_common.tier.slot_states`)."""


def is_removal(verb: OperatorVerb) -> bool:
    """Return whether a verb can empty tiers."""
    return any(one.name == "everything" for one in verb.given)


def agreed(
    verb: OperatorVerb, body: Json, url: str, *, yes: bool, dry_run: bool, as_json: bool
) -> bool:
    """Return whether to go on: not after `--dry-run`, and for everything only if that is agreed."""
    if dry_run:
        require_right(verb, body)
        run(lambda api: touched(api, body), lambda rows: [rows], url, as_json)
        return False
    if yes or not body.get("everything"):
        return True
    if not sys.stdin.isatty():
        text = "--everything asks, and standard input is no terminal: add --yes, or --dry-run"
        exit_with(f"kvbm {verb.command}: {text}", WRONG)
    print_cells(asked(lambda api: cells_of([touched(api, body)]), url))
    if not typer.confirm(f"{verb.command} all of these blocks?", err=True):
        exit_with(f"kvbm {verb.command}: nothing was removed", REFUSED)
    return True


def require_right(verb: OperatorVerb, body: Json) -> None:
    """Raise ConfigError for what the route would refuse: a dry run asks another one."""
    for one in verb.given:
        if body.get(one.name) is None:
            continue
        kind = verb.type_of(one)
        try:
            msgspec.convert(body[one.name], kind)
        except msgspec.ValidationError as error:
            is_choice = get_origin(kind) is Literal
            accepted = either(get_args(kind)) if is_choice else f"what the API does: {error}"
            raise ConfigError(_option(one), body[one.name], accepted) from error
    if sum(bool(body.get(name)) for name in verb.exactly_one_of) != 1:
        options = [_option(one) for one in verb.given if one.name in verb.exactly_one_of]
        accepted = f"exactly one of {either(options)}"
        raise ConfigError(f"kvbm {verb.command}", _selected(verb, body), accepted)


def _option(one: Given) -> str:
    return one.argument or f"--{one.name}"


def _selected(verb: OperatorVerb, body: Json) -> str:
    return " ".join(_option(one) for one in verb.given
                    if one.name in verb.exactly_one_of and body.get(one.name))  # fmt: skip


def touched(api: Client, body: Json) -> Rows:
    """Return the instances that a removal is for, and how much each of them holds."""
    wanted = {name: body.get(name) for name in ("tier", "host", "instance")}
    if wanted["tier"] == "all":
        wanted["tier"] = None
    return [
        only(one, ("tier", "host", "instance", "bytes_used")) | _blocks(one, body)
        for one in picked(api.get("/v1/tiers"), FIELDS)
        if all(value in (None, one[name]) for name, value in wanted.items())
    ]


def _blocks(tier: dict[str, Any], body: Json) -> dict[str, Any]:
    """Return the blocks of an instance, and which of them are meant."""
    held = sum(number for state, number in tier["slots"].items() if state in COMMITTED)
    if body.get("everything"):
        return {"blocks": held, "of these": "all"}
    if names := body.get("hashes"):
        return {"blocks": held, "of these": f"{len(names)} by name, where held"}
    kind = "prefix" if body.get("prefix") else "namespace"
    return {"blocks": held, "of these": f"those of {kind} {body.get(kind)}"}
