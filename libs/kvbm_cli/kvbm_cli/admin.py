"""Commands that ask the metrics service: what is there, which jobs run, and what was changed."""

from __future__ import annotations

import typer
from kvbm_common.errors import ConfigError

from kvbm_cli.admin_client import Client
from kvbm_cli.asking import AS_JSON, URL, Json, Rows, job_tables, only, picked, run


def status(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Show the whole system at a glance."""
    run(lambda api: api.get("/v1/status"), _status_tables, url, as_json)


def services(as_json: bool = AS_JSON, url: str = URL) -> None:
    """List every registered instance of a service."""
    columns = ("kind", "host", "instance", "up", "ready", "epoch", "pid", "reasons")
    run(lambda api: api.get("/v1/services"), lambda told: [picked(told, columns)], url, as_json)


def tiers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Show bytes, policy, leases, hit rate, sizes of blocks and rates of every tier."""
    columns = ("tier", "host", "instance", "ready", "occupancy", "bytes_used", "bytes_total",
               "fragmentation", "waste_percent", "policy", "leases", "hit_rate")  # fmt: skip
    keys = ("tier", "host", "instance")

    def tables(told: Json) -> list[Rows]:
        rates = [only(one, keys) | one["rates"] for one in told]
        return [picked(told, columns), _sizes(told, keys), rates]

    run(lambda api: api.get("/v1/tiers"), tables, url, as_json)


def workers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """List every engine worker that is attached, and engines without a cache with the reason."""
    columns = ("host", "engine", "rank", "world_size", "model", "block_tokens", "block_bytes",
               "verify", "seen_ms_ago", "passes_through")  # fmt: skip
    run(lambda api: api.get("/v1/workers"), lambda told: [picked(told, columns)], url, as_json)


def audit(
    last: int = typer.Option(20, help="So many of the newest."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Show who has changed what."""
    columns = ("ts_ms", "actor", "verb", "kind", "host", "instance", "outcome")
    run(lambda api: api.get("/v1/audit", last=last),
         lambda told: [picked(told["entries"], columns)], url, as_json)  # fmt: skip


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
        return api.post(f"/v1/jobs/{job}/cancel", {}) if cancel else api.get(f"/v1/jobs/{job}")

    run(ask, lambda told: job_tables(told.get("jobs", [told])), url, as_json)


def _status_tables(told: Json) -> list[Rows]:
    summary = {
        "version": told["version"],
        "ready": told["ready"],
        "engines": told["engines"],
        "workers": told["workers"],
        "reasons": told["reasons"],
    }
    figures = [{"figure": name, "value": value} for name, value in told["kvbm"].items()]
    tiers = [{name: one[name] for name in one if name != "sizes"} for one in told["tiers"]]
    sizes = _sizes(told["tiers"], ("tier",))
    return [[summary], told["services"], tiers, sizes, told["flows"], figures]


def _sizes(tiers: Rows, keys: tuple[str, ...]) -> Rows:
    """Return a row for each size of slots that tiers have."""
    return [only(one, keys) | size for one in tiers for size in one["sizes"]]
