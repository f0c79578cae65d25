"""`kvbm index`: questions from a terminal, over a real NATS."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from kvbm_cli.index_questions import print_reply, request_of
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

from tests.services.index.shell.test_service import (
    CHAIN,
    NAMESPACE,
    TOKENS,
    Source,
    living,
    settings_of,
    wait_held,
    wait_ready,
)


@pytest.fixture
async def holding(nats_server: NatsServer, bus: Bus) -> AsyncIterator[None]:
    """An index, and a host tier with the first four blocks."""
    async with living(settings_of(nats_server)):
        await wait_ready(bus)
        async with Source.living(bus) as source:
            source.store(CHAIN[:4])
            await wait_held(bus, source)
            yield


async def kvbm(url: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbm_cli.main", "index", *arguments, "--nats", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@pytest.mark.slow
@pytest.mark.usefixtures("holding")
async def test_questions_are_answered(nats_url: str, tmp_path: Path) -> None:
    names = [block.hex() for block in CHAIN]
    code, text, _ = await kvbm(nats_url, "where", names[1][:12])
    assert (code, text.split()[-6]) == (0, names[1])
    code, _, errors = await kvbm(nats_url, "where", "0" * 31)
    assert (code, errors) == (1, f"kvbm: no holder has a block whose name begins with {'0' * 31}\n")
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    space = json.dumps(msgspec.to_builtins(NAMESPACE))
    code, text, _ = await kvbm(nats_url, "match", *names)
    assert (code, text.split()[-6:]) == (0, ["h", "host-tier-0", "host", "0", "0", "4"])
    code, text, _ = await kvbm(
        nats_url, "score", "--tokens", f"@{tokens}", "--namespace", space, "--weights",
        "host=0.5", "--json",
    )  # fmt: skip
    assert (code, json.loads(text)["scores"][0]["score"]) == (0, 2.0)
    code, text, _ = await kvbm(nats_url, "where", names[1])
    assert (code, names[1] in text, "host-tier-0" in text) == (0, True, True)
    code, text, _ = await kvbm(nats_url, "holders")
    assert (code, "host-tier-0" in text) == (0, True)


@pytest.mark.slow
@pytest.mark.usefixtures("holding")
async def test_refusals_name_the_field(nats_url: str) -> None:
    code, _, errors = await kvbm(nats_url, "match", "x" * 32)
    assert (code, errors) == (
        2, f"kvbm: hash is '{'x' * 32}', but accepts 32 hex digits, or the first 4 or more of a "
        "hash\n",
    )  # fmt: skip
    code, _, errors = await kvbm(nats_url, "match", "abc")
    assert (code, "hash is 'abc', but accepts 32 hex digits" in errors) == (2, True)


def test_what_cannot_be_read_is_refused() -> None:
    for question, options in (
        ("nothing", {}),
        ("match", {"tokens": "1,x"}),
        ("match", {"tokens": "1", "namespace": "{"}),
        ("score", {"weights": "host=much"}),
    ):
        with pytest.raises((ValueError, OSError)):
            request_of(question, [], **options)
    for options in ({}, {"weights": "host=1"}):
        with pytest.raises(ValueError, match="route needs hashes of blocks, or --tokens"):
            request_of("route", [], **options)
    with pytest.raises(ValueError, match="--salt needs --tokens beside it"):
        request_of("match", ["00" * 16], salt="blue")
    with pytest.raises(ValueError, match="not both"):
        request_of("match", ["00"], tokens="1")


def test_what_a_question_would_ignore_is_refused() -> None:
    """Goal: nobody takes an answer for that of the prompt, salt or weights in the line."""
    for given in ("tokens", "namespace", "salt", "lora"):
        with pytest.raises(ValueError, match=f"holders lists all of them, without --{given}"):
            request_of("holders", [], **{given: "1"})
    name = "ab" * 16
    with pytest.raises(ValueError, match=f"without {name}: ask match or where"):
        request_of("holders", [name], salt="y")
    for question in ("match", "where", "holders"):
        with pytest.raises(ValueError, match="--weights is for score and route"):
            request_of(question, [] if question == "holders" else [name], weights="host=1")
    assert request_of("holders", []) == {}


def test_requests_are_what_the_wire_wants() -> None:
    assert request_of("score", ["ABcd"], weights="device=1,host=0.5") == {
        "hashes": ["abcd"], "weights": {"device": 1.0, "host": 0.5},
    }  # fmt: skip


def test_a_reply_is_a_table_like_those_of_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a service says is no markup, and no terminal obeys it; a pipe has no padding."""
    holders = [
        {"source": "host-tier-0", "tier": "host", "rank": None, "blocks": 12_345},
        {"source": "[bold]\x1b[2J", "tier": "disk", "rank": 1, "blocks": 3},
    ]
    print_reply("holders", {"holders": holders})
    headings, first, second = capsys.readouterr().out.splitlines()
    assert headings.split() == ["source", "tier", "rank", "blocks"]
    assert first.split() == ["host-tier-0", "host", "12.3", "k"]
    assert second.split() == ["[bold]\\x1b[2J", "disk", "1", "3"]
    print_reply("where", {"blocks": []})
    assert capsys.readouterr().out == "nothing\n"
