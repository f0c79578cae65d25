"""`kvbm explain`: why a request missed, or which requests did lately."""

from __future__ import annotations

from typing import Any

import typer
from kvbm_common.errors import ConfigError
from kvbm_common.tier.reasons import MEANINGS
from kvbm_common.wire.explain import REQUEST_CHARS_MAX

from kvbm_cli.admin_client import ApiError, Client
from kvbm_cli.asking import AS_JSON, URL, Json, Rows, picked, run
from kvbm_cli.printing import clock


def explain(
    request: str | None = typer.Argument(None, help="The engine's own id of the request."),
    reason: str | None = typer.Option(
        None, help="Without an id: those that missed for this, as `evicted`."
    ),
    engine: str | None = typer.Option(None, help="Without an id: those of this engine."),
    missed: bool = typer.Option(False, help="Without an id: those that missed a block."),
    last: int = typer.Option(20, min=1, max=1000, help="Without an id: so many of the newest."),
    as_json: bool = AS_JSON,
    url: str = URL,
) -> None:
    """Show where the blocks of a request came from, why others missed; or the latest requests."""

    def ask(api: Client) -> Json:
        if request is None:
            return _latest(api, limit=last, missed=missed or None, reason=reason, engine=engine)
        if not request:
            raise ConfigError("kvbm explain", request, "the id of a request")
        return api.get("/v1/explanation", request=request[:REQUEST_CHARS_MAX])

    tables = _list_tables if request is None else _explain_tables
    run(ask, tables, url, as_json)


def _latest(api: Client, *, reason: str | None, **query: object) -> Json:
    """Return the latest requests; raises ConfigError for a reason that does not exist.

    A newer host tier may have reasons of its own: one that is in an answer exists.
    """
    is_known = reason is None or reason in MEANINGS
    try:
        told = api.get("/v1/explain", reason=reason, **query)
    except ApiError as error:
        if is_known or not error.is_callers:
            raise
        told = {"requests": []}
    if not (is_known or told["requests"]):
        raise ConfigError("--reason", reason, f"one of {', '.join(MEANINGS)}")
    return told


def _list_tables(told: Json) -> list[Rows]:
    rows = [
        {"when": clock(one["ts_ms"]), "request": one["request_id"], "engine": one["engine"],
         "blocks": one["blocks"], **{tier: one["by_tier"][tier] for tier in one["by_tier"]},
         "missed": one["missed_blocks"], "reason": one["reason"], "unused": one["outcome"]}
        for one in told["requests"]
    ]  # fmt: skip
    return [rows, _silent(told)]


def _explain_tables(told: Json) -> list[Rows]:
    tables: list[Rows] = []
    for lookup in told["lookups"]:
        columns = ("engine", "host", "instance", "blocks", "hit_blocks", "missed_blocks", "reason")
        head = {"when": clock(lookup["ts_ms"])} | picked([lookup], columns)[0]
        if lookup["trace"]:
            head["trace"] = lookup["trace"]
        tables += [[head], [_segment_row(one) for one in lookup["segments"]]]
        if lookup["outcome"]:
            tables.append(
                [{"unused": lookup["lost_blocks"], "outcome": lookup["outcome"],
                  "meaning": lookup["outcome_meaning"]}]
            )  # fmt: skip
    return [*tables, _silent(told)]


def _segment_row(one: dict[str, Any]) -> dict[str, Any]:
    facts = [
        one["detail"],
        f"policy {one['policy']}" if one["policy"] else "",
        f"at {clock(one['at_ms'])}" if one["at_ms"] else "",
    ]
    return {
        "blocks": one["blocks"],
        "": "hit" if one["hit"] else "miss",
        "tier": one["tier"],
        "reason": one["reason"],
        "meaning": one["meaning"],
        "more": ", ".join(fact for fact in facts if fact),
        "first block": one["hash"],
    }


def _silent(told: Json) -> Rows:
    return [{"silent": one} for one in told["silent"]]
