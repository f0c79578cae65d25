"""The commands `kvbm creds`, `kvbm nats-config` and `kvbm nats-streams`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from kvbm_common.access.curve import CLIENT_FILE, SERVER_FILE, write_keys
from kvbm_common.access.http_access import ADMIN_TOKEN
from kvbm_common.access.nats_access import SUFFIX, NatsAccess, nats_access, stream_limits
from kvbm_common.access.roles import ADMIN, ROLES
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import AS_THEY_COME, StreamLimits
from kvbm_common.nats.zone_sources import HangingSources

from kvbm_cli.command_line import REFUSED, code_of, exit_with
from kvbm_cli.creds.nats_config import CredentialPlan, names_of, read_plan, write_credentials
from kvbm_cli.creds.tls_files import write_certificates
from kvbm_cli.creds.zone_config import take_leaf
from kvbm_cli.printing import print_table

TOKEN_NAME = "admin-token"
CHECK_S = 5.0
"""The pause between two looks of `--follow`: a NATS that has lost its store has its streams again
soon."""
CONNECT_DEADLINE_S = 5.0

_log = logging.getLogger(__name__)


def creds(
    what: str = typer.Argument("", help="A role, or admin-token: print its file. Without: list."),
) -> None:
    """Show where credentials are: for NATS a file for each role, and the token of the HTTP API.

    `curve` makes keys for tcp:// sockets of engines and routers.
    """
    with errors_told():
        settings = Settings.load()
        if what == "curve":
            print(*_made_keys(settings.creds_dir), sep="\n")
            return
        files = files_of(settings)
        if what and what not in files:
            raise ConfigError("kvbm creds", what, f"one of {', '.join(files)}")
        if what:
            _print_file(files[what])
        else:
            _print_files(files)


def files_of(settings: Settings) -> dict[str, Path]:
    """Return the file of each credential by its name, whether it is there or not."""
    found = {role.name: settings.creds_dir / f"{role.name}{SUFFIX}" for role in ROLES}
    return found | {TOKEN_NAME: settings.admin_token_file or settings.creds_dir / ADMIN_TOKEN}


def _made_keys(directory: Path) -> tuple[Path, ...]:
    """Return the files of CURVE keys; one that is missing is made.

    Raises ConfigError, SecretUnreadable.
    """
    files = directory / SERVER_FILE, directory / CLIENT_FILE
    try:
        return files if all(file.exists() for file in files) else write_keys(directory)
    except OSError as error:
        raise ConfigError("KVBM_CREDS_DIR", directory, f"a directory of yours ({error})") from error


def _print_file(path: Path) -> None:
    if not path.exists():
        exit_with(f"kvbm: {path} is not there: kvbm up makes it", REFUSED)
    print(path)


def _print_files(files: dict[str, Path]) -> None:
    helps = {role.name: role.help for role in ROLES} | {TOKEN_NAME: "Changes over HTTP."}
    rows = [
        [name, str(path) if path.exists() else "–", helps[name]] for name, path in files.items()
    ]
    print_table(("name", "file", "for"), rows)


def nats_config(
    out: Path = typer.Option(..., help="Directory of everything that is written, mode 0700."),  # noqa: B008
    hosts: str = typer.Option("", help="Names of hosts (KVBM_HOST), commas between."),
    tenants: str = typer.Option("", help="Accounts that share nothing; kvbm unless given."),
    instances: int = typer.Option(
        0, min=0, max=64, help="Instances of a tier on one host; 8 unless given."
    ),
    names: str = typer.Option("", help="Names and addresses of NATS in its certificate: TLS."),
    etcd_names: str = typer.Option("", help="Names and addresses of etcd in its certificate."),
    listen: str = typer.Option("", help="Where nats-server listens; 0.0.0.0:4222 unless given."),
    store_dir: str = typer.Option("", help="Its data; /data unless given."),
    server_dir: str = typer.Option("", help="Where it finds its certificate, if not in OUT."),
    leaf_listen: str = typer.Option("", help="Where zones come (KVBM_ZONES); 0.0.0.0:7422."),
    zone: str = typer.Option("", help="Which zone of a fleet this NATS is."),
    fleet: str = typer.Option("", help="Where the fleet waits for it, as tls://HOST:7422."),
    leaf: Path = typer.Option(Path(), help="The directory zones/ZONE that the fleet has written."),  # noqa: B008
    rotate: bool = typer.Option(False, help="Replace every credential; old ones are good, too."),
    drop_old: bool = typer.Option(False, help="End what a rotation, or other partitions, left."),
) -> None:
    """Write a configuration of nats-server with a key for each role, and the files of the keys.

    What is not given is as in the run before; what is there stays.
    """
    given = {
        "hosts": names_of(hosts), "tenants": names_of(tenants), "instances": instances,
        "names": names_of(names), "etcd_names": names_of(etcd_names), "listen": listen,
        "store_dir": store_dir, "server_dir": server_dir, "leaf_listen": leaf_listen,
        "zone": zone, "fleet": names_of(fleet),
    }  # fmt: skip
    with errors_told():
        given |= stream_room(Settings.load())
        plan = plan_of(out, {name: value for name, value in given.items() if value})
        require_directory(out)
        if leaf != Path():
            take_leaf(out, leaf)
        print(write_all(out, plan, rotate=rotate, drop_old=drop_old))


def require_directory(out: Path) -> None:
    """Raise ConfigError unless a directory is named."""
    if out == Path():
        raise ConfigError("--out", "", "a directory: `--out .` would change this one's mode, too")


def stream_room(settings: Settings) -> dict[str, StreamLimits]:
    """Return what a plan has of the settings of streams; empty: nothing is set."""
    limits = stream_limits(settings)
    return {} if limits == AS_THEY_COME else {"streams": limits}


def plan_of(out: Path, given: dict[str, Any]) -> CredentialPlan:
    """Return the plan of the run before with what is given now; raises ConfigError."""
    before = read_plan(out) or CredentialPlan(hosts=())
    if "streams" in given:
        given = given | {"streams": before.streams.with_more(given["streams"])}
    return msgspec.structs.replace(before, **given).after(before).check()


def write_all(
    out: Path, plan: CredentialPlan, *, rotate: bool = False, drop_old: bool = False
) -> Path:
    """Write credentials and certificates; returns the server's configuration.

    Raises ConfigError.
    """
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        out.chmod(0o700)
        write_certificates(out, plan)
        return write_credentials(out, plan, rotate=rotate, drop_old=drop_old)
    except OSError as error:
        raise ConfigError("--out", out, f"a directory of yours ({error})") from error


def nats_streams(
    follow: bool = typer.Option(False, help="Stay, and make them again whenever they are gone."),
    nats: str = typer.Option("", help="Use this NATS instead of the configured one."),
) -> None:
    """Make the streams of KVBM, as the role admin: services may not."""
    with errors_told():
        settings = Settings.load(overrides={"nats_url": nats} if nats else None)
        access = nats_access(settings, ADMIN)
        asyncio.run(_follow(access) if follow else _set_up_once(access))


async def _set_up_once(access: NatsAccess) -> None:
    bus = await Bus.connect(access, "kvbm-nats-streams", deadline_s=CONNECT_DEADLINE_S)
    try:
        changed = await set_up_streams(bus)
    finally:
        await bus.close()
    print(f"the streams are there{': ' if changed else ''}{', '.join(changed)}", flush=True)


async def _follow(access: NatsAccess) -> None:
    """Look again and again until a signal comes; a NATS that is away is waited for."""
    from kvbm_common.runtime import logs

    logs.set_up("kvbm-nats-streams", "info")
    stopping = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
    bus: Bus | None = None
    sources: HangingSources | None = None
    while not stopping.is_set():
        try:
            bus = bus or await Bus.connect(
                access, "kvbm-nats-streams", deadline_s=CONNECT_DEADLINE_S
            )
            if changed := await set_up_streams(bus):
                _log.info("made or changed: %s", ", ".join(changed))
            sources = sources or HangingSources(bus)
            await sources.wake()
        except KvbmError as error:
            _log.warning("%s; again in %s s", error, CHECK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await stopping.wait()
    if bus is not None:
        await bus.close()


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Print an error of ours; exits with 2 for wrong options or settings, 1 for the rest."""
    try:
        yield
    except KvbmError as error:
        exit_with(f"kvbm: {error}", code_of(error))
