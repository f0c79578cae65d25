"""The command `kvbm index`: ask the index from a terminal."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import typer
from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.block_names import is_beginning, names_with, only_one
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.verbs import verb_subject

from kvbm_cli.asking import cells_of, print_cells
from kvbm_cli.block_names import readable
from kvbm_cli.command_line import WRONG, code_of, exit_with

QUESTIONS = ("match", "score", "route", "where", "holders")
CONNECT_DEADLINE_S = 2.0
ANSWER_DEADLINE_S = 5.0
COLUMNS: Mapping[str, str] = {
    "match": "matches",
    "score": "scores",
    "route": "engines",
    "holders": "holders",
}
"""Question → the list of its reply that becomes the table."""


def index(
    question: str = typer.Argument(help="match, score, route, where or holders"),
    hashes: list[str] = typer.Argument(  # noqa: B008 - what typer understands.
        None, help="Hashes of blocks, 32 hex digits, prefix first."
    ),
    tokens: str = typer.Option("", help="Token ids instead: 1,2,3 or @FILE with a JSON list."),
    namespace: str = typer.Option("", help='With tokens: JSON or @FILE, {"model": …}.'),
    salt: str = typer.Option("", help="Cache salt of the request, with tokens."),
    lora: str = typer.Option("", help="LoRA name of the request, with tokens."),
    weights: str = typer.Option("", help="For score and route: device=1,host=0.8,disk=0.5."),
    as_json: bool = typer.Option(False, "--json", help="Print the reply as JSON."),
    nats: str = typer.Option("", help="Ask on this NATS instead of the configured one."),
) -> None:
    """Ask the index: who has how much of a prompt, who should take it, who has a block."""
    try:
        request = request_of(question, hashes or [], tokens=tokens, namespace=namespace,
                             salt=salt, lora=lora, weights=weights)  # fmt: skip
        settings = Settings.load(overrides={"nats_url": nats} if nats else None)
        reply = asyncio.run(_ask(nats_access(settings, ADMIN), question, request))
    except (ValueError, OSError) as error:
        exit_with(f"kvbm: {error}", WRONG)
    except KvbmError as error:
        exit_with(f"kvbm: {error}", code_of(error))
    if as_json:
        print(json.dumps(reply, indent=2))
    else:
        print_reply(question, reply)


def request_of(
    question: str,
    hashes: list[str],
    *,
    tokens: str = "",
    namespace: str = "",
    salt: str = "",
    lora: str = "",
    weights: str = "",
) -> dict[str, Any]:
    """Build the request as it travels; raises ValueError, ConfigError for what cannot be read."""
    if question not in QUESTIONS:
        raise ValueError(f"no question {question!r}; there are {', '.join(QUESTIONS)}")
    prompt = {"--tokens": tokens, "--namespace": namespace, "--salt": salt, "--lora": lora}
    if question == "holders":
        named = [*hashes[:1], *(option for option, text in prompt.items() if text)]
        if named:
            raise ValueError(f"holders lists all of them, without {named[0]}: ask match or where")
    if weights and question not in ("score", "route"):
        raise ValueError(f"--weights is for score and route, not for {question}")
    if question == "holders":
        return {}
    for option, text in prompt.items():
        if text and not tokens:
            raise ValueError(f"{option} needs --tokens beside it: hashes say what it would")
    if tokens:
        request = {
            "tokens": _json_of("--tokens", tokens if tokens[0] == "@" else f"[{tokens}]"),
            "namespace": _json_of("--namespace", namespace or "null"),
            "salt": salt or None,
            "lora": lora or None,
        }
        if hashes:
            raise ValueError("give hashes of blocks or --tokens, not both")
    elif not hashes:
        raise ValueError(f"{question} needs hashes of blocks, or --tokens with --namespace")
    else:
        request = {"hashes": [readable(name, "hash") for name in hashes]}
    if weights:
        request["weights"] = _weights_of(weights)
    return request


async def _ask(access: NatsAccess, question: str, request: Mapping[str, Any]) -> dict[str, Any]:
    bus = await Bus.connect(access, "kvbm-index-command", deadline_s=CONNECT_DEADLINE_S)

    async def ask(verb: str, payload: bytes) -> bytes:
        return await bus.request(verb_subject("index", verb), payload, deadline_s=ANSWER_DEADLINE_S)

    try:
        hashes = [
            only_one(name, await names_with(ask, name), "hashes") if is_beginning(name) else name
            for name in request.get("hashes", ())
        ]
        payload = await ask(
            question,
            msgspec.json.encode(dict(request) | ({"hashes": hashes} if hashes else {})),
        )
    finally:
        await bus.close()
    reply: dict[str, Any] = msgspec.json.decode(payload)
    return reply


def print_reply(question: str, reply: Mapping[str, Any]) -> None:
    """Print the table of a reply, as other commands print theirs."""
    print_cells(cells_of([_rows(question, reply)]))
    if missing := reply.get("missing"):
        numbers = ", ".join(map(str, missing))
        print(f"not in it: hosts of the partitions without an answer: {numbers}", file=sys.stderr)


def _rows(question: str, reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    if question != "where":
        rows: list[dict[str, Any]] = reply[COLUMNS[question]]
        return rows
    return [
        {"hash": block["hash"], **holder}
        for block in reply["blocks"]
        for holder in block["holders"]
    ]


def _json_of(option: str, text: str) -> Any:
    """Parse JSON, or `@` and a file with JSON; raises ValueError, which names the option."""
    try:
        return json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{option} is not JSON, or @FILE with JSON: {error}") from error


def _weights_of(text: str) -> dict[str, float]:
    """Parse the weights of tiers; raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        tier, _, number = part.partition("=")
        if not tier or not re.fullmatch(r"\d+(\.\d+)?", number):
            raise ValueError(f"--weights has {part!r}, but accepts TIER=NUMBER, as host=0.8")
        found[tier] = float(number)
    return found
