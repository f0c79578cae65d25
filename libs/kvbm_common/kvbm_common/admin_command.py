"""The commands of operators: what the admin API says and does, as tables or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvbm_common.admin_client import Client
from kvbm_common.config import Settings
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError

JOB_POLL_S = 0.1
WIDTH = 140

Json = Any
Rows = list[dict[str, Any]]

AS_JSON = typer.Option(False, "--json", help="Print the answer as JSON.")
URL = typer.Option("", help="The admin API, instead of the configured one.")
TIER = typer.Option(..., help="host, disk, object or all.")
HOST = typer.Option(None, help="Only on this host.")
INSTANCE = typer.Option(None, help="Only this instance.")
HASHES = typer.Argument(None, help="Names of blocks, 32 hex digits, prefix first.")
PREFIX = typer.Option(None, help="This block and all behind it.")
NAMESPACE = typer.Option(None, help="Everything of this namespace: its digest, 64 hex digits.")
EVERYTHING = typer.Option(False, help="Everything.")
WAIT = typer.Option(True, help="Wait until the job has ended.")
DEADLINE = typer.Option(600.0, help="How many seconds to wait for it.")


# --- questions ------------------------------------------------------------------------------


def status(as_json: bool = AS_JSON, url: str = URL) -> None:
    """The whole system at a glance."""
    _run(lambda api: api.get("/v1/status"), _status_tables, url, as_json)


def services(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Every registered instance of a service."""
    columns = ("kind", "host", "instance", "up", "ready", "epoch", "pid", "reasons")
    _run(lambda api: api.get("/v1/services"), lambda told: [_picked(told, columns)], url, as_json)


def tiers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Slots, bytes, policy, leases, hit rate and rates of every tier."""
    columns = ("tier", "host", "instance", "ready", "occupancy", "bytes_used", "bytes_total",
               "fragmentation", "policy", "leases", "hit_rate")  # fmt: skip
    keys = ("tier", "host", "instance")

    def tables(told: Json) -> list[Rows]:
        return [_picked(told, columns), [_only(one, keys) | one["rates"] for one in told]]

    _run(lambda api: api.get("/v1/tiers"), tables, url, as_json)


def workers(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Every engine worker that is attached."""
    columns = ("host", "engine", "rank", "world_size", "model", "block_tokens", "block_bytes",
               "seen_ms_ago")  # fmt: skip
    _run(lambda api: api.get("/v1/workers"), lambda told: [_picked(told, columns)], url, as_json)


def block(
    name: str = typer.Argument(help="Name of a block, 32 hex digits."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """One block: who has it, who holds it there, and what has happened to it."""
    _run(lambda api: api.get(f"/v1/blocks/{name}"), _block_tables, url, as_json)


def pins(as_json: bool = AS_JSON, url: str = URL) -> None:
    """Every pin of every tier."""
    _run(lambda api: api.get("/v1/pins"), lambda told: [told["pins"]], url, as_json)


def audit(
    last: int = typer.Option(20, help="So many of the newest."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Who has changed what."""
    columns = ("ts_ms", "actor", "verb", "kind", "host", "instance", "outcome")
    _run(lambda api: api.get("/v1/audit", last=last),
         lambda told: [_picked(told["entries"], columns)], url, as_json)  # fmt: skip


def jobs(
    job: str | None = typer.Argument(None, help="Only this one."),
    cancel: bool = typer.Option(False, help="Stop it."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """The jobs of the metrics service, or one; with --cancel it is stopped."""

    def ask(api: Client) -> Json:
        if job is None:
            if cancel:
                raise ConfigError("kvbm jobs --cancel", "", "the id of a job")
            return api.get("/v1/jobs")
        return api.post(f"/v1/jobs/{job}/cancel", {}) if cancel else api.get(f"/v1/jobs/{job}")

    _run(ask, lambda told: _job_tables(told.get("jobs", [told])), url, as_json)


# --- changes --------------------------------------------------------------------------------


def evict(
    hashes: list[str] | None = HASHES, tier: str = TIER, prefix: str | None = PREFIX,
    namespace: str | None = NAMESPACE, everything: bool = EVERYTHING, host: str | None = HOST,
    instance: str | None = INSTANCE, wait: bool = WAIT, deadline_s: float = DEADLINE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Remove blocks that nobody is reading."""
    body = _removal(hashes, prefix, namespace, everything) | _where(tier, host, instance)
    _run_job("/v1/evict", body, url, as_json, deadline_s if wait else 0.0)


def reset(
    hashes: list[str] | None = HASHES, tier: str = TIER, prefix: str | None = PREFIX,
    namespace: str | None = NAMESPACE, everything: bool = EVERYTHING, host: str | None = HOST,
    instance: str | None = INSTANCE, wait: bool = WAIT, deadline_s: float = DEADLINE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Remove blocks, also those that are being read: nobody finds them again."""
    body = _removal(hashes, prefix, namespace, everything) | _where(tier, host, instance)
    _run_job("/v1/reset", body, url, as_json, deadline_s if wait else 0.0)


def prefetch(
    hashes: list[str] | None = HASHES,
    tokens: str = typer.Option("", help="Token ids instead: 1,2,3 or @FILE with a JSON list."),
    namespace: str = typer.Option("", help='With tokens: JSON or @FILE, {"model": …}.'),
    salt: str | None = typer.Option(None, help="Cache salt of the request, with tokens."),
    lora: str | None = typer.Option(None, help="LoRA name of the request, with tokens."),
    host: str | None = HOST, instance: str | None = INSTANCE, wait: bool = WAIT,
    deadline_s: float = DEADLINE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Bring a run of blocks from disk or bucket into host memory."""
    body: dict[str, Any] = _given(host=host, instance=instance, salt=salt, lora=lora)
    try:
        if tokens:
            body["tokens"] = _json_of(tokens if tokens.startswith("@") else f"[{tokens}]")
            body["namespace"] = _json_of(namespace or "null")
        else:
            body["hashes"] = hashes or []
    except (ValueError, OSError) as error:
        print(f"kvbm: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    _run_job("/v1/prefetch", body, url, as_json, deadline_s if wait else 0.0)


def pin(
    hashes: list[str] = typer.Argument(help="Names of blocks."),  # noqa: B008
    ttl_s: float = typer.Option(3600.0, help="For so many seconds."),
    tier: str = TIER, host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Keep blocks from eviction for a while."""
    body = {"hashes": hashes, "ttl_s": ttl_s} | _where(tier, host, instance)
    _run_change("/v1/pin", body, url, as_json)


def unpin(
    pin: int = typer.Argument(help="As `kvbm pins` lists it."),
    tier: str = TIER,
    host: str = typer.Option(..., help="The host of the pin."),
    instance: str = typer.Option("0", help="The instance of the pin."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """End a pin."""
    _run_change("/v1/unpin", {"pin": pin} | _where(tier, host, instance), url, as_json)


def drain(
    tier: str = TIER, host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Have tiers take no new blocks; reads go on."""
    _run_change("/v1/drain", _where(tier, host, instance), url, as_json)


def undrain(
    tier: str = TIER, host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Have tiers take new blocks again."""
    _run_change("/v1/undrain", _where(tier, host, instance), url, as_json)


def resize(
    slots: int = typer.Argument(help="So many slots of each instance that is meant."),
    tier: str = typer.Option(..., help="host or disk."), host: str | None = HOST,
    instance: str | None = INSTANCE, wait: bool = WAIT, deadline_s: float = DEADLINE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Use fewer or more slots of a tier's medium, until it is started again."""
    body = {"slots": slots} | _where(tier, host, instance)
    _run_job("/v1/resize", body, url, as_json, deadline_s if wait else 0.0)


def policy(
    name: str = typer.Argument(help="lru, lfu or prefix"),
    tier: str = TIER, host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Change the eviction policy of tiers; what they hold stays."""
    _run_change("/v1/policy", {"policy": name} | _where(tier, host, instance), url, as_json)


def filter_(
    tier: str = typer.Option(..., help="disk, object or all."),
    enabled: bool | None = typer.Option(None, "--on/--off", help="Whether it filters at all."),
    pass_count: int | None = typer.Option(None, help="A block passes from this count on."),
    decay_s: float | None = typer.Option(None, help="Counts lose 1 every so many seconds."),
    host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Change the filter that says which blocks deserve disk or bucket."""
    given = _given(enabled=enabled, pass_count=pass_count, decay_s=decay_s)
    _run_change("/v1/filter", given | _where(tier, host, instance), url, as_json)


def loglevel(
    level: str = typer.Argument(help="debug, info, warning or error"),
    kind: str | None = typer.Option(None, help="Only services of this kind."),
    host: str | None = HOST, instance: str | None = INSTANCE,
    as_json: bool = AS_JSON, url: str = URL,
) -> None:  # fmt: skip
    """Change the log level of running services."""
    body = {"level": level} | _given(kind=kind, host=host, instance=instance)
    _run_change("/v1/log_level", body, url, as_json)


# --- how they run ---------------------------------------------------------------------------


def _run(
    ask: Callable[[Client], Json],
    tables: Callable[[Json], Iterable[Rows]],
    url: str,
    as_json: bool,
    failed: Callable[[Json], bool] = lambda _: False,
) -> None:
    """Ask and print; exits with 2 for bad settings, 1 for a refusal or a change that failed."""
    try:
        told = ask(Client.of(Settings.load(), url))
    except ConfigError as error:
        print(f"kvbm: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KvbmError as error:
        print(f"kvbm: {error.code}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print(tables(told))
    if failed(told):
        raise typer.Exit(1)


def _run_change(path: str, body: Json, url: str, as_json: bool) -> None:
    def failed(told: Json) -> bool:
        return not all(one["ok"] for one in told["outcomes"])

    _run(lambda api: api.post(path, body), _outcome_tables, url, as_json, failed)


def _run_job(path: str, body: Json, url: str, as_json: bool, deadline_s: float) -> None:
    def ask(api: Client) -> Json:
        job = api.post(path, body)
        until_s = time.monotonic() + deadline_s
        while deadline_s and job["state"] == "running":
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"job {job['id']} still runs after {deadline_s} s")
            time.sleep(JOB_POLL_S)
            job = api.get(f"/v1/jobs/{job['id']}")
        return job

    def failed(job: Json) -> bool:
        return bool(job["state"] in ("failed", "cancelled"))

    _run(ask, lambda job: _job_tables([job]), url, as_json, failed)


def _removal(
    hashes: list[str] | None, prefix: str | None, namespace: str | None, everything: bool
) -> dict[str, Any]:
    body = _given(hashes=hashes or None, prefix=prefix, namespace=namespace)
    return body | ({"everything": True} if everything else {})


def _where(tier: str, host: str | None, instance: str | None) -> dict[str, Any]:
    return {"tier": tier} | _given(host=host, instance=instance)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _json_of(text: str) -> Any:
    return json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)


# --- tables ---------------------------------------------------------------------------------


def _picked(rows: Rows, columns: Sequence[str]) -> Rows:
    return [_only(row, columns) for row in rows]


def _only(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in columns}


def _status_tables(told: Json) -> list[Rows]:
    summary = {
        "version": told["version"],
        "ready": told["ready"],
        "engines": told["engines"],
        "workers": told["workers"],
        "reasons": told["reasons"],
    }
    figures = [{"figure": name, "value": value} for name, value in told["kvbm"].items()]
    return [[summary], told["services"], told["tiers"], told["flows"], figures]


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
    return [told["holders"], _picked(told["tiers"], columns), leases, story, silent]


def _outcome_tables(told: Json) -> list[Rows]:
    return [
        [
            {"kind": one["kind"], "host": one["host"], "instance": one["instance"],
             "ok": one["ok"], "answer": _inline(one["reply"]) or f"{one['code']}: {one['message']}"}
            for one in told["outcomes"]
        ]
    ]  # fmt: skip


def _job_tables(found: Rows) -> list[Rows]:
    columns = ("id", "verb", "state", "actor")
    return [
        [
            {**{name: job[name] for name in columns}, "progress": _inline(job["progress"]),
             "errors": _inline(job["errors"])}
            for job in found
        ]
    ]  # fmt: skip


def _inline(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(map(str, value))
        case None:
            return ""
        case _:
            return str(value)


def _print(tables: Iterable[Rows]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    shown = [rows for rows in tables if rows]
    if not shown:
        console.print("nothing")
    for rows in shown:
        table = Table(*rows[0], box=None)
        for row in rows:
            # `Text`: what services say is not markup.
            table.add_row(*(Text(_text(value)) for value in row.values()))
        console.print(table)
