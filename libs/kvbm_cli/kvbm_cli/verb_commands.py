"""The commands of operators' verbs, one for each entry of their table."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from kvbm_common.nats.block_names import DIGITS_MIN
from kvbm_common.wire.operator_verbs import (
    HOST,
    INSTANCE,
    OPERATOR_VERBS,
    REQUIRED,
    Given,
    OperatorVerb,
)

from kvbm_cli.asking import (
    AS_JSON,
    DEADLINE,
    NO_EFFECT,
    URL,
    WAIT,
    Effect,
    Json,
    Rows,
    picked,
    run,
    run_change,
    run_job,
)
from kvbm_cli.block_names import whole, with_whole_names
from kvbm_cli.command_line import WRONG, exit_with
from kvbm_cli.removal import DRY_RUN, YES, agreed, is_removal

Command = Callable[..., None]
EFFECTS: Mapping[str, Effect] = {
    "pin": Effect("pinned", "nothing was pinned: these tiers have none of the blocks"),
    "forget": Effect("forgotten", "nothing was forgotten: no service of this host is lost"),
    "unpin": Effect("ended", "no such pin; `kvbm pins` lists all"),
}
"""Changes that may be carried out and change nothing."""


def commands() -> dict[str, Command]:
    """Return the function of each verb's command, by its name."""
    return {verb.command: BY_HAND.get(verb.name) or _command_of(verb) for verb in OPERATOR_VERBS}


def _command_of(verb: OperatorVerb) -> Command:
    """Return a function that typer makes a command of: it sends what was given to the route."""

    def command(
        as_json: bool, url: str, wait: bool = False, deadline_s: float = 0.0, **given: Any
    ) -> None:
        yes, dry_run = given.pop("yes", False), given.pop("dry_run", False)
        body = {
            one.name: value
            for one in verb.given
            if (value := given[_placeholder(one)]) not in (None, [], one.default)
        }
        body = with_whole_names(body, url)
        if is_removal(verb) and not agreed(
            verb, body, url, yes=yes, dry_run=dry_run, as_json=as_json
        ):
            return
        if verb.job:
            run_job(verb.route, body, url, as_json, deadline_s if wait else 0.0)
        else:
            run_change(verb.route, body, url, as_json, EFFECTS.get(verb.name, NO_EFFECT))

    parameters = [_parameter(verb, one) for one in verb.given]
    if verb.job:
        parameters += [_keyword("wait", bool, WAIT), _keyword("deadline_s", float, DEADLINE)]
    if is_removal(verb):
        parameters += [_keyword("yes", bool, YES), _keyword("dry_run", bool, DRY_RUN)]
    parameters += [_keyword("as_json", bool, AS_JSON), _keyword("url", str, URL)]
    command.__doc__ = verb.help
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _placeholder(one: Given) -> str:
    return one.argument or one.name


def _parameter(verb: OperatorVerb, one: Given) -> inspect.Parameter:
    kind = _plain(verb.type_of(one))
    default = one.default if one.command_default is REQUIRED else one.command_default
    wanted = ... if default is REQUIRED else default
    if one.argument:
        shown = typer.Argument(wanted, help=one.help)
    else:
        shown = typer.Option(wanted, *filter(None, [one.flags]), help=one.help)
    return _keyword(_placeholder(one), kind | None if default is None else kind, shown)


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _plain(kind: Any) -> Any:
    """Return the type without bounds and choices: the admin API is the one that refuses."""
    match get_origin(kind):
        case origin if origin is Annotated:
            return _plain(get_args(kind)[0])
        case origin if origin is Literal:
            return str
        case origin if origin is list:
            return list[_plain(*get_args(kind))]  # type: ignore[misc]
        case _:
            return kind


# --- by hand --------------------------------------------------------------------------------


def prefetch(
    hashes: list[str] | None = typer.Argument(  # noqa: B008
        None, help="Hashes of blocks, 32 hex digits, prefix first."
    ),
    tokens: str = typer.Option("", help="Token ids instead: 1,2,3 or @FILE with a JSON list."),
    namespace: str = typer.Option("", help='With tokens: JSON or @FILE, {"model": …}.'),
    salt: str | None = typer.Option(None, help="Cache salt of the request, with tokens."),
    lora: str | None = typer.Option(None, help="LoRA name of the request, with tokens."),
    host: str | None = typer.Option(None, help=HOST.help),
    instance: str | None = typer.Option(None, help=INSTANCE.help),
    wait: bool = WAIT,
    deadline_s: float = DEADLINE,
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Bring a run of blocks from disk or bucket into host memory."""
    where = {"host": host, "instance": instance, "salt": salt, "lora": lora}
    body: dict[str, Any] = {name: value for name, value in where.items() if value is not None}
    try:
        if tokens:
            body["tokens"] = _json_of(tokens if tokens.startswith("@") else f"[{tokens}]")
            body["namespace"] = _json_of(namespace or "null")
        else:
            body["hashes"] = hashes or []
    except (ValueError, OSError, RecursionError) as error:
        option = "--namespace" if "tokens" in body else "--tokens"
        exit_with(f"kvbm prefetch: {option} is not JSON, or @FILE with JSON: {error}", WRONG)
    body = with_whole_names(body, url)
    run_job("/v1/prefetch", body, url, as_json, deadline_s if wait else 0.0)


def block(
    block_hash: str = typer.Argument(
        metavar="HASH", help=f"Hash of a block: 32 hex digits, or the first {DIGITS_MIN} or more."
    ),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Show one block: where it is, what holds it there, and what has happened to it."""
    run(
        lambda api: api.get(f"/v1/blocks/{whole(api, block_hash, 'hash')}"),
        _block_tables,
        url,
        as_json,
    )


def _block_tables(told: Json) -> list[Rows]:
    columns = ("tier", "host", "instance", "held", "slot", "bytes", "pins")
    leases = [
        {"tier": tier["tier"], "instance": tier["instance"], **lease}
        for tier in told["tiers"]
        for lease in tier["leases"]
    ]
    story = [
        {"ago": f"{entry['ago_ms'] / 1000:.1f} s", "tier": tier["tier"], "what": entry["what"],
         "ago_ms": entry["ago_ms"]}
        for tier in told["tiers"]
        for entry in tier["story"]
    ]  # fmt: skip
    story.sort(key=lambda entry: -entry.pop("ago_ms"))
    silent = [{"silent": one} for one in told["silent"]]
    return [told["holders"], picked(told["tiers"], columns), leases, story, silent]


def pins(as_json: bool = AS_JSON, url: str = URL) -> None:
    """List every pin of every tier."""
    run(lambda api: api.get("/v1/pins"), lambda told: [told["pins"]], url, as_json)


def _json_of(text: str) -> Any:
    return json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)


BY_HAND: Mapping[str, Command] = {"block": block, "pins": pins, "prefetch": prefetch}
"""Commands that do more than to send what was given, or print more than what became of it."""
