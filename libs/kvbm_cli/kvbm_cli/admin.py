"""Commands that ask the metrics service: what is there, which jobs run, and what was changed."""

from __future__ import annotations

import json
import re
from typing import Any

import typer
from kvbm_common.errors import ConfigError

from kvbm_cli.admin_client import Client
from kvbm_cli.asking import AS_JSON, URL, Json, Rows, job_tables, only, picked, run
from kvbm_cli.command_line import one_line
from kvbm_cli.printing import byte_rate, count, date_and_clock, percent, rate

TENANT_COLUMNS = ("blocks", "bytes", "share_bytes", "waiting")


def status(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Show the whole system at a glance; exits with 1 while it is not ready."""
    run(
        lambda api: api.get("/v1/status"), _status_tables, url, as_json,
        failed=lambda told: not told["ready"],
    )  # fmt: skip


def services(as_json: bool = AS_JSON, url: str = URL) -> None:
    """List every registered instance of a service."""
    columns = ("kind", "host", "instance", "up", "ready", "epoch", "pid", "reasons")
    run(lambda api: api.get("/v1/services"), lambda told: [picked(told, columns)], url, as_json)


def tiers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Show bytes, policy, leases, hit rate, sizes of blocks, rates, tenants of every tier."""
    columns = ("tier", "host", "instance", "ready", "occupancy", "bytes_used", "bytes_total",
               "fragmentation", "waste_percent", "policy", "leases", "hit_rate")  # fmt: skip
    keys = ("tier", "host", "instance")

    def tables(told: Json) -> list[Rows]:
        rates = [only(one, keys) | _rates(one["rates"]) for one in told]
        return [picked(told, columns), _sizes(told, keys), rates, _loads(told, keys),
                _tenants(told, keys)]  # fmt: skip

    run(lambda api: api.get("/v1/tiers"), tables, url, as_json)


def workers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """List every engine worker that is attached, and engines without a cache with the reason."""
    columns = ("host", "engine", "rank", "world_size", "model", "block_tokens", "block_bytes",
               "verify", "prefill_tokens_per_s", "seen_ms_ago", "passes_through")  # fmt: skip
    run(lambda api: api.get("/v1/workers"), lambda told: [picked(told, columns)], url, as_json)


def audit(
    last: int = typer.Option(20, min=1, max=1000, help="So many of the newest."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Show who has changed what, with the parameters of each change."""
    run(lambda api: api.get("/v1/audit", last=last), _audit_tables, url, as_json)


def jobs(
    job: str | None = typer.Argument(None, help="Only this one."),
    cancel: bool = typer.Option(False, help="Stop it."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """List the jobs of the metrics service, or show one; with --cancel it is stopped."""

    def ask(api: Client) -> Json:
        if job is None:
            if cancel:
                raise ConfigError("kvbm jobs --cancel", "", "the id of a job")
            return api.get("/v1/jobs")
        if not re.fullmatch("[0-9a-f]{16}", job):
            raise ConfigError("kvbm jobs: job", job, "an id as `kvbm jobs` lists them")
        return api.post(f"/v1/jobs/{job}/cancel", {}) if cancel else api.get(f"/v1/jobs/{job}")

    run(ask, lambda told: job_tables(told.get("jobs", [told])), url, as_json)


def _loads(told: Any, keys: tuple[str, ...]) -> Rows:
    """Return what each host tier expects of a load, by medium."""
    rows: Rows = []
    for one in told:
        figures = one.get("figures", {})
        names = sorted(name for name in figures if name.startswith("load_estimate_ms_per_mib."))
        for medium in (name.partition(".")[2] for name in names):
            row = only(one, keys) | {
                "load_from": medium,
                "start_ms": round(figures[f"load_estimate_start_ms.{medium}"], 2),
                "ms_per_mib": round(figures[f"load_estimate_ms_per_mib.{medium}"], 3),
                "queued_bytes": int(figures.get(f"load_queued_bytes.{medium}", 0)),
            }
            rows.append(row)
    return rows


def _status_tables(told: Json) -> list[Rows]:
    summary = {
        "version": told["version"],
        "ready": told["ready"],
        "engines": told["engines"],
        "workers": told["workers"],
        "reasons": told["reasons"],
    }
    figures = [{"figure": name, "value": _figure(name, value)}
               for name, value in told["kvbm"].items()]  # fmt: skip
    nested = ("sizes", "tenants")
    tiers = [{name: one[name] for name in one if name not in nested} for one in told["tiers"]]
    own = [rows(told["tiers"], ("tier",)) for rows in (_sizes, _tenants, _loads)]
    return [[summary], told["services"], tiers, *own, _flows(told["flows"]), figures]


def _audit_tables(told: Json) -> list[Rows]:
    """Return the changes; what was asked for stands after the verb, without who asked."""
    return [
        [
            {"when": date_and_clock(one["ts_ms"]), "actor": one["actor"], "verb": one["verb"],
             "parameters": parameters_of(one["request"]), "kind": one["kind"],
             "host": one["host"], "instance": one["instance"], "outcome": one["outcome"]}
            for one in told["entries"]
        ]
    ]  # fmt: skip


def parameters_of(request: str) -> str:
    """Return the fields of a request as words; one that was cut is given as it is.

    >>> parameters_of('{"actor":"me","slots":3,"prefix":null}')
    'slots=3'
    """
    try:
        fields = dict(json.loads(request or "{}"))
    except (ValueError, TypeError):
        return one_line(request)
    given = {name: value for name, value in fields.items() if name != "actor" and value is not None}
    return " ".join(f"{name}={_parameter(value)}" for name, value in given.items())


def _parameter(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else json.dumps(value).strip('"')


def _figure(name: str, value: float) -> str:
    return percent(value) if name.endswith("_rate") else count(value)


def _flows(flows: Rows) -> Rows:
    return [
        {"source": one["source"], "target": one["target"], "blocks": rate(one["blocks"]),
         "bytes": byte_rate(one["bytes"])}
        for one in flows
    ]  # fmt: skip


def _rates(rates: dict[str, Any]) -> dict[str, str]:
    """Return what a tier moves per second, and over which time that was measured."""
    words = {name: byte_rate(value) if name.startswith("bytes") else rate(value)
             for name, value in rates.items() if name != "window_s"}  # fmt: skip
    return words | {"over": f"{rates['window_s']:.0f} s"}


def _sizes(tiers: Rows, keys: tuple[str, ...]) -> Rows:
    """Return a row for each size of slots that tiers have."""
    return [only(one, keys) | size for one in tiers for size in one["sizes"]]


def _tenants(tiers: Rows, keys: tuple[str, ...]) -> Rows:
    """Return a row for each tenant that tiers have blocks of."""
    return [
        only(one, keys) | {"tenant": tenant["name"] or "–"} | only(tenant, TENANT_COLUMNS)
        for one in tiers
        for tenant in one.get("tenants", ())
    ]
