"""`kvbm creds`, `kvbm nats-config` and `kvbm nats-streams`, as they are typed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from kvbm_cli.main import make_app
from kvbm_common.access.roles import ADMIN, ROLES, Role
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS
from typer.testing import CliRunner, Result

from tests.security.guarded_nats import guarded_nats

DOCUMENT = Path(__file__).parents[4] / "docs" / "security.md"


def typed(directory: Path, *words: str, **variables: str) -> Result:
    """Run a command of `kvbm` with an empty state directory."""
    environ = {"KVBM_STATE_DIR": str(directory)} | variables
    return CliRunner().invoke(make_app([]), list(words), env=environ)


def test_creds_lists_every_role_and_names_a_file(tmp_path: Path) -> None:
    """1. All roles. 2. A file that is there. 3. One that is not: 1. 4. No role: 2."""
    listed = typed(tmp_path, "creds")
    assert listed.exit_code == 0
    assert all(role.name in listed.output for role in ROLES)
    made = tmp_path / "creds" / "consumer.creds"
    assert typed(tmp_path, "creds", "consumer").exit_code == 1
    made.parent.mkdir()
    made.write_text("consumer:a-secret")
    assert typed(tmp_path, "creds", "consumer").output.strip() == str(made)
    wrong = typed(tmp_path, "creds", "nobody")
    assert wrong.exit_code == 2
    assert "a-secret" not in listed.output + wrong.output


def test_creds_makes_keys_for_tcp_once(tmp_path: Path) -> None:
    """A second run leaves them: clients have them by then."""
    first = typed(tmp_path, "creds", "curve").output.split()
    texts = [Path(name).read_text() for name in first]
    assert typed(tmp_path, "creds", "curve").output.split() == first
    assert [Path(name).read_text() for name in first] == texts


def test_creds_adds_a_client_to_a_server_that_has_keys(tmp_path: Path) -> None:
    """Goal: engines that have the first client's file are let in as before.

    1. The client's file has moved to another host: a second one is made for the same server.
    2. The server's file has moved: nothing is made, and the text says what is missing.
    3. A server's file that cannot be read is left as it is.
    """
    server_file, client_file = map(Path, typed(tmp_path, "creds", "curve").output.split())
    before, first = (json.loads(file.read_text()) for file in (server_file, client_file))
    client_file.unlink()
    assert typed(tmp_path, "creds", "curve").exit_code == 0
    now, second = (json.loads(file.read_text()) for file in (server_file, client_file))
    assert now == before | {"clients": [first["public"], second["public"]]}
    assert second["server"] == before["public"]

    server_file.unlink()
    refused = typed(tmp_path, "creds", "curve")
    assert refused.exit_code == 2
    assert "a directory with server.curve beside client.curve" in refused.output
    assert json.loads(client_file.read_text()) == second

    client_file.unlink()
    server_file.write_text("{}")
    assert typed(tmp_path, "creds", "curve").exit_code == 1
    assert server_file.read_text() == "{}"


def test_nats_config_prints_the_servers_file(tmp_path: Path) -> None:
    """And refuses what cannot be a name with 2."""
    told = typed(tmp_path, "nats-config", "--out", str(tmp_path / "out"), "--hosts", "a,b")
    assert told.output.strip() == str(tmp_path / "out" / "server" / "nats-server.conf")
    assert (tmp_path / "out" / "kvbm" / "b" / "disk-tier.creds").exists()
    assert typed(tmp_path, "nats-config", "--out", str(tmp_path), "--hosts", "a.b").exit_code == 2


async def test_nats_streams_makes_what_is_missing(tmp_path: Path) -> None:
    """Goal: the streams are those that services expect, made by the role admin alone."""
    async with guarded_nats(tmp_path) as nats, nats.bus(ADMIN) as admin:
        await call_api(admin, f"STREAM.DELETE.{EVENTS.name}")
        shown = str(nats.creds_of(ADMIN))
        words = ("nats-streams", "--nats", nats.url)
        told = await asyncio.to_thread(typed, tmp_path, *words, KVBM_NATS_CREDS_FILE=shown)
        assert told.exit_code == 0, told.output
        await call_api(admin, f"STREAM.INFO.{EVENTS.name}")


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_document_has_the_table_of_roles(role: Role) -> None:
    """Goal: docs/security.md says of each role what its credentials are for."""
    found = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE))
    place = "one host" if role.per_host else "all hosts"
    assert found[role.name] == f"{place} | {role.help}"
