"""The command `kvbm`.

Each verb of operators is a command (`kvbm_cli.verb_commands`). Other packages add commands through
the entry point group `kvbm.commands` (a function that typer understands) and services through
`kvbm.services` (a function without arguments). A command is imported only when it is called, or for
the list of all; one that cannot be imported says so and leaves the others alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import TYPE_CHECKING, Any, TypeVar

from kvbm_common.errors import ConfigError, KvbmError

from kvbm_cli.command_line import (
    REFUSED,
    WRONG,
    code_of,
    drop_output,
    exit_with,
    one_line,
    prepare_streams,
    printable,
    require_text,
    run_line,
    take_shell,
)
from kvbm_cli.doctor.finding import Finding
from kvbm_cli.examples import epilog_of
from kvbm_cli.printing import Cell, print_table

if TYPE_CHECKING:
    import typer
    from kvbm_common.config.schema import Setting

    from kvbm_cli.admin_client import Client
    from kvbm_cli.stack import Stack

Result = TypeVar("Result")

COMMANDS = "kvbm.commands"
SERVICES = "kvbm.services"
OWN = ("up", "serve", "config", "doctor", "--version")
"""First words that need no command of another module."""


def main() -> None:
    """Run the command `kvbm`: serve one kind at once, or parse the command line."""
    arguments = sys.argv[1:]
    prepare_streams()
    require_text(arguments)
    take_shell(arguments)
    if len(arguments) == 2 and arguments[0] == "serve" and not arguments[1].startswith("-"):
        # A service needs no command line library, and five of them start at once.
        serve_kind(arguments[1])
        return
    try:
        app = make_app(arguments)
    except KeyboardInterrupt:  # The modules are being imported: nothing runs yet.
        sys.exit(128 + signal.SIGINT)
    run_line(app, arguments)


def serve_kind(kind: str) -> None:
    """Run the service of this kind in this process; exits with 2 for an unknown kind."""
    found = {entry.name: entry for entry in entry_points(group=SERVICES)}
    if kind not in found:
        known = ", ".join(sorted(found)) or "none; is kvbm installed?"
        exit_with(f"kvbm: no service {kind!r}; there are {known}", WRONG)
    found[kind].load()()


def make_app(arguments: list[str]) -> typer.Typer:
    """Make the command line application, with those commands of other packages that are needed."""
    import typer

    app = typer.Typer(
        name="kvbm",
        help="KVBM: a KV-cache block manager.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options())
    own = {
        "up": _up_command(), "serve": _serve_command(), "config": _config_command(),
        "doctor": _doctor_command(),
    }  # fmt: skip
    for name, command in own.items():
        app.command(name, epilog=epilog_of(name))(command)
    wanted = arguments[0] if arguments else ""
    if wanted not in OWN:
        for name, command in sorted(_further_commands(wanted).items()):
            app.command(name, epilog=epilog_of(name))(command)
    return app


def _options() -> Callable[..., None]:
    """Return the function that typer makes the options before a command of."""
    import typer

    def print_version(wanted: bool) -> None:
        if wanted:
            print(f"kvbm {version('kvbm-cli')}")
            raise typer.Exit

    def options(
        _version: bool = typer.Option(
            False, "--version", is_eager=True, callback=print_version, help="Print the version."
        ),
    ) -> None: ...

    return options


def _further_commands(wanted: str) -> dict[str, Callable[..., Any]]:
    """Return the command that is wanted; all of them for a list, or where none has this name."""
    entries = {entry.name: entry for entry in entry_points(group=COMMANDS)}
    entry = entries.get(wanted)
    if entry is not None and entry.module.startswith("kvbm_cli."):  # No verb has its name.
        return {wanted: _load(entry, wanted=True)}
    from kvbm_cli import verb_commands

    verbs = verb_commands.commands()
    if wanted in verbs:
        return {wanted: verbs[wanted]}
    if entry is not None:
        return {wanted: _load(entry, wanted=True)}
    return verbs | {
        name: _load(other, wanted=False) for name, other in entries.items() if name not in verbs
    }


def _config_command() -> Callable[..., None]:
    import typer

    def config(
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """Print the configuration in force and where each value comes from."""
        print_configuration(as_json=as_json)

    return config


def print_configuration(*, as_json: bool) -> None:
    """Print every setting with its value and origin; exits with 2 if one is wrong."""
    from kvbm_common.config.declarations import all_settings
    from kvbm_common.config.settings import Settings

    settings = _settings_or_exit(Settings.load)
    rows = [
        {
            "section": declared.section,
            "name": declared.name,
            "variable": declared.variable,
            "value": _shown(declared, getattr(settings, declared.name)),
            "from": settings.provenance(declared.name),
        }
        for declared in all_settings()
    ]
    if as_json:
        print(json.dumps({"settings": rows, "warnings": list(settings.warnings)}, indent=2))
        return
    columns = ("variable", "value", "from")
    styles = ["" if row["from"] == "default" else "bold" for row in rows]
    cells = [
        [(row[name], style) for name in columns] for row, style in zip(rows, styles, strict=True)
    ]
    print_table(columns, cells, whole_first=True)
    for warning in settings.warnings:
        print(one_line(f"warning: {warning}"), file=sys.stderr)


def _shown(declared: Setting, value: object) -> str:
    from kvbm_common.config.schema import redacted, text_of

    return "(set)" if declared.secret and value else redacted(text_of(value))


def _doctor_command() -> Callable[..., None]:
    import typer

    def doctor(
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        live: bool = typer.Option(False, help="Look at the running services instead."),
        url: str = typer.Option("", help="With --live: the admin API, if not the configured one."),
    ) -> None:
        """Check this host, or what runs, and say what to change; exits with 1 if it is wrong."""
        if url and not live:
            exit_with(f"kvbm: {ConfigError('--url', url, '--live beside it')}", WRONG)
        print_findings(_live_findings(url) if live else _host_findings(), as_json=as_json)

    return doctor


def _host_findings() -> list[Finding]:
    """Return what this host lacks; exits with 2 for bad settings."""
    from kvbm_common.config.settings import Settings

    from kvbm_cli.doctor.checks import examine
    from kvbm_cli.doctor.directories import silent_directories
    from kvbm_cli.doctor.gather import LOOK_S, gather

    settings = _settings_or_exit(Settings.load)
    silent = silent_directories(settings, within_s=LOOK_S)
    return silent or examine(gather(settings), settings)


def _live_findings(url: str) -> list[Finding]:
    """Return what the running services lack; exits with 2 for a wrong line, 1 for a refusal."""
    from kvbm_cli.asking import asked
    from kvbm_cli.doctor.live_checks import examine_live, reasons_of, services_of

    def examined(api: Client) -> list[Finding]:
        reasons = reasons_of(api.get("/v1/status"))
        return examine_live(services_of(api.get("/v1/bounds")), reasons)

    return asked(examined, url)


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print every finding; exits with 1 if one is wrong."""
    from dataclasses import asdict

    code = 1 if any(finding.level == "wrong" for finding in findings) else 0
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        sys.exit(code)
    rows: list[list[Cell]] = []
    styles = {"ok": "green", "better": "yellow", "wrong": "bold red"}
    for finding in findings:
        rows.append([(finding.level, styles[finding.level]), finding.check, finding.found])
        if finding.advice:
            rows.append(["", "", (f"→ {finding.advice}", "dim")])
    print_table(("", "check", "found, and what to change"), rows)
    sys.exit(code)


def _up_command() -> Callable[..., None]:
    import typer

    def up(
        nats: str = typer.Option("", help="Use this NATS instead of starting one, e.g. nats://…"),
        only: str | None = typer.Option(
            None, help="Comma-separated kinds to start instead of all."
        ),
    ) -> None:
        """Start the whole stack on this machine, in the foreground."""
        from kvbm_common.runtime import logs

        from kvbm_cli import stack

        logs.set_up("kvbm-up", "info")
        kinds = stack.SERVICES if only is None else _kinds_of(only)
        whole = _settings_or_exit(
            lambda: stack.Stack(nats_url=nats or None, services=kinds, restart=True)
        )
        for warning in whole.settings.warnings:
            logging.getLogger(__name__).warning("%s", warning)
        try:
            asyncio.run(_stay_up(whole))
        except KvbmError as error:
            exit_with(f"kvbm: {error}", code_of(error))

    return up


def _kinds_of(text: str) -> list[str]:
    """Return the kinds of services in a text; exits with 2 for an unknown one, and for none."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    known = entry_points(group=SERVICES).names
    for kind in kinds or [text]:
        if kind not in known:
            accepted = f"kinds of services: {', '.join(sorted(known))}"
            exit_with(f"kvbm: {ConfigError('--only', kind, accepted)}", WRONG)
    return kinds


async def _stay_up(stack: Stack) -> None:
    """Run a stack until SIGINT, SIGTERM, or the end of its terminal (SIGHUP)."""
    started_s = time.monotonic()
    here = asyncio.current_task()
    assert here is not None
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        # During the start no task waits for the event yet, so the start is cancelled.
        if not stopping.is_set():
            stopping.set()
            here.cancel()

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As it is behind nohup.
        signals.append(signal.SIGHUP)
    for signal_number in signals:
        loop.add_signal_handler(signal_number, stop)
    try:
        async with stack:
            _print_stack(stack, time.monotonic() - started_s)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
        try:
            print("stopped", flush=True)
        except OSError:  # Its terminal is gone, or its pipe.
            drop_output()


def _print_stack(stack: Stack, seconds: float) -> None:
    from kvbm_cli.doctor.left_stores import unused_stores
    from kvbm_cli.stack_processes import without_size

    rows = [["nats", str(stack.pids.get("nats", "–")), stack.nats_url]]
    rows += [[kind, str(one.pid), one.description] for kind, one in stack.services.items()]
    print_table(("service", "pid", "where"), rows)
    for line in (
        *without_size(stack.settings),
        *unused_stores(stack.settings),
        f"credentials are in {stack.settings.creds_dir}; kvbm creds lists them",
        f"ready in {seconds:.1f} s; Ctrl-C stops",
    ):
        print(printable(line))
    sys.stdout.flush()


def _serve_command() -> Callable[..., None]:
    import typer

    def serve(
        kind: str = typer.Argument(
            help="index, host-tier, disk-tier, object-tier, metrics or consolidator"
        ),
    ) -> None:
        """Start one service against an existing NATS."""
        serve_kind(kind)

    return serve


def _load(entry: EntryPoint, *, wanted: bool) -> Callable[..., Any]:
    """Return the function of an entry point, or one that says why it cannot be loaded."""
    try:
        function: Callable[..., Any] = entry.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if wanted:
            exit_with(f"kvbm: {entry.name} cannot be loaded ({reason})", REFUSED)

        def unavailable() -> None: ...

        unavailable.__doc__ = f"(not available: {reason})"
        return unavailable
    return function


def _settings_or_exit(load: Callable[[], Result]) -> Result:
    try:
        return load()
    except ConfigError as error:
        exit_with(f"kvbm: {error}", code_of(error))


if __name__ == "__main__":
    main()
