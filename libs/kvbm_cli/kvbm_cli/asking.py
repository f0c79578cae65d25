"""How commands of operators run: they ask the admin API, and print its answer as tables or JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError

from kvbm_cli.admin_client import ApiError, Client
from kvbm_cli.command_line import REFUSED, WRONG, exit_with
from kvbm_cli.printing import cell, console

JOB_POLL_S = 0.1
SAY_S = 5.0
"""How often a line says how far a job has come that is waited for."""

Json = Any
Rows = list[dict[str, Any]]

AS_JSON = typer.Option(False, "--json", help="Print the answer as JSON.")
URL = typer.Option("", help="The admin API, instead of the configured one.")
WAIT = typer.Option(True, help="Wait until the job has ended.")
DEADLINE = typer.Option(600.0, min=0, help="How many seconds to wait for it.")


def run(
    ask: Callable[[Client], Json],
    tables: Callable[[Json], Iterable[Rows]],
    url: str,
    as_json: bool,
    failed: Callable[[Json], bool] = lambda _: False,
) -> None:
    """Ask and print; exits with 2 for a wrong line, 1 for a refusal or a change that failed."""
    told = asked(ask, url)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print_tables(tables(told))
    if failed(told):
        raise typer.Exit(1)


def asked(ask: Callable[[Client], Json], url: str) -> Json:
    """Return an answer of the API; exits with 2 for a wrong line or setting, 1 for the rest."""
    try:
        return ask(Client.of(Settings.load(), url))
    except ConfigError as error:
        exit_with(f"kvbm: {error}", WRONG)
    except ApiError as error:
        exit_with(f"kvbm: {error.code}: {error}", WRONG if error.is_callers else REFUSED)
    except KvbmError as error:
        exit_with(f"kvbm: {error.code}: {error}", REFUSED)


def run_change(path: str, body: Json, url: str, as_json: bool) -> None:
    """Make a change, and print what became of it at each instance."""

    def failed(told: Json) -> bool:
        return not all(one["ok"] for one in told["outcomes"])

    run(lambda api: api.post(path, body), outcome_tables, url, as_json, failed)


def run_job(path: str, body: Json, url: str, as_json: bool, deadline_s: float) -> None:
    """Start a job, and print it when it has ended; a deadline of 0 does not wait."""
    if not math.isfinite(deadline_s):
        exit_with(f"kvbm: --deadline-s is {deadline_s}, but accepts a number of seconds", WRONG)

    def ask(api: Client) -> Json:
        job = api.post(path, body)
        started_s = said_s = time.monotonic()
        while deadline_s and job["state"] == "running":
            now_s = time.monotonic()
            if now_s > started_s + deadline_s:
                raise DeadlineExceeded(f"job {job['id']} still runs after {deadline_s:g} s")
            if now_s > said_s + SAY_S:
                said_s = now_s
                print(job_line(job, now_s - started_s), file=sys.stderr, flush=True)
            time.sleep(JOB_POLL_S)
            job = api.get(f"/v1/jobs/{job['id']}")
        return job

    def failed(job: Json) -> bool:
        return bool(job["state"] in ("failed", "cancelled"))

    run(ask, lambda job: job_tables([job]), url, as_json, failed)


def job_line(job: Json, seconds: float) -> str:
    """Return how far a job has come, while it is waited for."""
    progress = f": {_inline(job['progress'])}" if job["progress"] else ""
    return f"{job['verb']} runs for {seconds:.0f} s, job {job['id']}{progress}"


def picked(rows: Rows, columns: Sequence[str]) -> Rows:
    """Return these columns of some rows."""
    return [only(row, columns) for row in rows]


def only(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return these columns of a row."""
    return {name: row[name] for name in columns}


def outcome_tables(told: Json) -> list[Rows]:
    """Return what became of a change at each instance."""
    return [
        [
            {"kind": one["kind"], "host": one["host"], "instance": one["instance"],
             "ok": one["ok"], "answer": _inline(one["reply"]) or f"{one['code']}: {one['message']}"}
            for one in told["outcomes"]
        ]
    ]  # fmt: skip


def job_tables(found: Rows) -> list[Rows]:
    """Return jobs with their progress."""
    columns = ("id", "verb", "state", "actor")
    return [
        [
            {**{name: job[name] for name in columns}, "progress": _inline(job["progress"]),
             "errors": _inline(job["errors"])}
            for job in found
        ]
    ]  # fmt: skip


def _inline(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={cell(name, value)}" for name, value in values.items())


def print_tables(tables: Iterable[Rows]) -> None:
    """Print those that have a row."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    shown = [rows for rows in tables if rows]
    if not shown:
        out.print("nothing")
    for rows in shown:
        table = Table(*rows[0], box=None)
        for row in rows:
            # `Text`: what services say is not markup.
            table.add_row(*(Text(cell(name, value)) for name, value in row.items()))
        out.print(table)
