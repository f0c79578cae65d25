"""Commands of operators: they ask the admin API, and print its answer as tables or JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import typer
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError

from kvbm_cli.admin_client import ApiError, Client, NotKvbm
from kvbm_cli.command_line import REFUSED, WRONG, exit_with, printable
from kvbm_cli.printing import cell, print_table

JOB_POLL_S = 0.1
SAY_S = 5.0
"""The interval of the lines that show the progress of an awaited job."""

Json = Any
Rows = list[dict[str, Any]]
Cells = list[list[str]]
Result = TypeVar("Result")
UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that an answer raises whose form is not that of the metrics service."""


class Effect(NamedTuple):
    """The reply's field that shows whether a change had an effect, and the line if none had."""

    field: str = ""
    otherwise: str = ""


NO_EFFECT = Effect()
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

    def answer(api: Client) -> tuple[Json, list[Cells], bool]:
        told = ask(api)
        return told, cells_of(tables(told)), failed(told)

    told, cells, has_failed = asked(answer, url)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print_cells(cells)
    if has_failed:
        raise typer.Exit(1)


def asked(ask: Callable[[Client], Result], url: str) -> Result:
    """Return what was asked for; exits with 2 for a wrong line or setting, 1 for the rest."""
    try:
        api = Client.of(Settings.load(), url)
        try:
            return ask(api)
        except UNEXPECTED as error:
            raise NotKvbm(api.url) from error
    except ConfigError as error:
        exit_with(f"kvbm: {error}", WRONG)
    except ApiError as error:
        exit_with(f"kvbm: {error.code}: {error}", WRONG if error.is_callers else REFUSED)
    except KvbmError as error:
        exit_with(f"kvbm: {error.code}: {error}", REFUSED)


def run_change(path: str, body: Json, url: str, as_json: bool, effect: Effect = NO_EFFECT) -> None:
    """Make a change, and print its outcome at each instance.

    One that was carried out everywhere without its effect ends with 1, too.
    """

    def failed(told: Json) -> bool:
        if not all(one["ok"] for one in told["outcomes"]):
            return True
        has_effect = not effect.field or any(one["reply"][effect.field] for one in told["outcomes"])
        if not has_effect:
            print(f"kvbm: {effect.otherwise}", file=sys.stderr)
        return not has_effect

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
    """Return the line that shows the progress of an awaited job."""
    progress = f": {_inline(job['progress'])}" if job["progress"] else ""
    return printable(f"{job['verb']} runs for {seconds:.0f} s, job {job['id']}{progress}")


def picked(rows: Rows, columns: Sequence[str]) -> Rows:
    """Return these columns of some rows; raises TypeError for what is no list."""
    if not isinstance(rows, list):
        raise TypeError(f"a list is expected, not {type(rows).__name__}")
    return [only(row, columns) for row in rows]


def only(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return these columns of a row."""
    return {name: row[name] for name in columns}


def outcome_tables(told: Json) -> list[Rows]:
    """Return the outcome of a change at each instance."""
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


def cells_of(tables: Iterable[Rows]) -> list[Cells]:
    """Return the headings and the texts of those tables that have a row."""
    return [
        [list(rows[0]), *([cell(name, value) for name, value in row.items()] for row in rows)]
        for rows in tables
        if rows
    ]


def print_cells(tables: Iterable[Cells]) -> None:
    """Print tables, each with its headings first; without any it says so."""
    shown = list(tables)
    if not shown:
        print("nothing")
    for headings, *rows in shown:
        print_table(headings, rows)
