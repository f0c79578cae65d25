"""Checks of access: one line for each port and socket, who may use it, and what to close.

`access:` begins a line about what the settings name, `open:` one about what a process has open.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvbm_common.access.addresses import is_loopback
from kvbm_common.config.schema import redacted
from kvbm_common.config.settings import Settings

from kvbm_cli.doctor.facts import Facts, ListenerFacts
from kvbm_cli.doctor.finding import Finding

OFF = "off"
ADVICE_NATS_OPEN = (
    "Set KVBM_NATS_CREDS_FILE: `kvbm up` and `kvbm nats-config` give each role its own."
)
PRIVATE = "chmod 600, and the directory 700."


def access_checks(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Yield each port and socket with who may use it, and what should not be as it is."""
    for text in facts.refusals:
        yield Finding("access", "wrong", text, "Set what the text names.")
    for secret in facts.secrets:
        if not secret.is_private:
            found = f"{settings.creds_dir}/{secret.name} can be read by other users"
            yield Finding("credentials", "better", found, PRIVATE)
    yield _nats(facts, settings)
    yield _api(settings)
    yield from _service_ports(settings)
    yield from _sockets(settings)
    yield from (_listener(one, settings) for one in _unplanned(facts, settings))


def _nats(facts: Facts, settings: Settings) -> Finding:
    name = f"access: {redacted(settings.nats_url)}"
    if facts.nats.error:
        return Finding(name, "ok", "no NATS answers")
    how = "over TLS" if facts.nats.has_tls else "in plaintext"
    if facts.nats.wants_credentials:
        return Finding(name, "ok", f"NATS, {how}: needs credentials of a role")
    found = f"NATS, {how}: every process that reaches it may read and change the cache"
    return Finding(name, "better", found, ADVICE_NATS_OPEN)


def _api(settings: Settings) -> Finding:
    name = f"access: {settings.metrics_bind}:{settings.metrics_port}"
    open_to = settings.admin_open or "none"
    who = {
        "none": "needs a token; /metrics is readable from this machine",
        "read": "every process that reaches it may ask; changes need a token",
        "admin": "every process that reaches it may ask and change",
    }[open_to]
    if not is_loopback(settings.metrics_bind) and open_to == "none":
        who = "needs a token" + ("; /metrics is readable by all" if settings.metrics_open else "")
    found = f"HTTP API: {who}"
    if open_to == "none":
        return Finding(name, "ok", found)
    return Finding(
        name, "better", found, "Unset KVBM_ADMIN_OPEN: a token is then made, or set one."
    )


def _service_ports(settings: Settings) -> Iterator[Finding]:
    if not settings.service_port:
        return
    name = f"access: {settings.service_bind}:{settings.service_port} and above"
    if is_loopback(settings.service_bind):
        yield Finding(name, "ok", "/metrics of each service: readable from this machine")
    elif settings.metrics_open:
        found = "/metrics of each service: readable by every process that reaches it"
        yield Finding(name, "better", found, "KVBM_SCRAPE_TOKEN_FILE instead of KVBM_METRICS_OPEN.")
    else:
        yield Finding(name, "ok", "/metrics of each service: needs the token for scrapes")


def _sockets(settings: Settings) -> Iterator[Finding]:
    """Yield the ZMQ sockets of engines and routers."""
    for what, endpoint, is_open, variable in (
        ("engines", settings.host_tier_endpoint, settings.engines_open, "KVBM_ENGINES_OPEN"),
        ("engines", settings.consolidator_endpoint, settings.engines_open, "KVBM_ENGINES_OPEN"),
        ("routers", settings.router_endpoint, settings.router_open, "KVBM_ROUTER_OPEN"),
        ("routers", settings.router_replay_endpoint, settings.router_open, "KVBM_ROUTER_OPEN"),
    ):
        if endpoint == OFF:
            continue
        name = f"access: {endpoint}"
        if endpoint.startswith("ipc://"):
            yield Finding(name, "ok", f"{what}: processes of the services' own user")
        elif settings.curve_server_file is not None:
            yield Finding(name, "ok", f"{what}: need a key that KVBM_CURVE_SERVER_FILE names")
        elif is_open:
            found = f"{what}: every process that reaches it"
            advice = f"Keys (`kvbm creds curve`) instead of {variable}."
            yield Finding(name, "better", found, advice)


def _unplanned(facts: Facts, settings: Settings) -> Iterator[ListenerFacts]:
    """Yield the sockets that no setting names: those of UCX."""
    planned = {settings.metrics_port}
    for endpoint in (settings.nats_url, settings.router_endpoint, settings.router_replay_endpoint,
                     settings.host_tier_endpoint, settings.consolidator_endpoint):  # fmt: skip
        port = endpoint.rpartition(":")[2]
        planned |= {int(port)} if port.isdigit() else set()
    first = settings.service_port
    for one in facts.listeners:
        is_service_port = first and first <= one.port < first + 100
        if one.process != "nats" and one.port not in planned and not is_service_port:
            yield one


def _listener(one: ListenerFacts, settings: Settings) -> Finding:
    name = f"open: {one.address}:{one.port}"
    # Compared as paths: a process keeps the text as it was given, with a slash at its end or not.
    if one.runtime_dir and Path(one.runtime_dir) != settings.runtime_dir:
        found = f"{one.process} of the stack in {one.runtime_dir}"
        if is_loopback(one.address):
            return Finding(name, "ok", f"{found}: processes of this machine")
        advice = "kvbm doctor with the settings of that stack says who may use it."
        return Finding(name, "better", f"{found}: every process that reaches it", advice)
    if is_loopback(one.address):
        return Finding(name, "ok", f"{one.process}, UCX: processes of this machine")
    return Finding(
        name,
        "better",
        f"{one.process}, UCX: every process that reaches it; UCX asks for no credentials",
        "A network of KVBM's own; KVBM_PEER_DEVICES and UCX_NET_DEVICES name its devices, or lo.",
    )
