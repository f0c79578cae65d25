"""The command `kvbm events tail`: the event stream as lines, from now on or from the past."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import typer
from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.consumers import Start
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.marked_messages import UNMARKED
from kvbm_common.nats.since import start_of
from kvbm_common.nats.streams import CONSOLIDATED
from kvbm_common.wire import packed_events
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import (
    CONSOLIDATED_PREFIX,
    SUBJECT_PREFIX,
    Cleared,
    Event,
    Removed,
    Stored,
    event_codec,
)
from kvbm_common.wire.packed_events import PACKED, events_on

from kvbm_cli.command_line import code_of, exit_with, one_line, printable
from kvbm_cli.printing import clock

CLEARED = "cleared"
KINDS = ("stored", "removed", CLEARED)
NAMES_MAX = 3
"""Names of blocks in a line; `--json` has all."""
DATES_END_MS = 253_402_214_400_000
"""The last day of the year 9999: a later number is no time stamp."""
HISTORY_DEADLINE_S = 60.0
"""A full stream of 256 MiB takes some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The selection of events to show."""

    host: str = "*"
    source: str = "*"
    kind: str = "*"
    since: Start = "new"
    consolidated: bool = False
    as_json: bool = False
    follow: bool = True

    @property
    def prefix(self) -> str:
        """The prefix of the stream's subjects."""
        return CONSOLIDATED_PREFIX if self.consolidated else SUBJECT_PREFIX

    @property
    def subject(self) -> str:
        """The NATS subject of the selection: one message may carry stored and removed blocks."""
        kind = self.kind if self.kind == CLEARED else "*"
        return f"{self.prefix}.{self.host}.{self.source}.{kind}"


def events(
    action: str = typer.Argument("tail", help="tail"),
    host: str = typer.Option("*", help="Only events of this host."),
    source: str = typer.Option("*", help="Only of this source: host-tier-0, an engine's name."),
    kind: str = typer.Option("*", help="Only stored, removed or cleared."),
    since: str = typer.Option(
        "now", help="Where to begin: now, all, 90s, 10m, 6h, an ISO time, or #SEQUENCE."
    ),
    consolidated: bool = typer.Option(False, help="The consolidated streams of engines instead."),
    as_json: bool = typer.Option(False, "--json", help="Print each event as JSON."),
    follow: bool = typer.Option(True, help="Stay for what is still to come."),
    nats: str = typer.Option("", help="Use this NATS instead of the configured one."),
) -> None:
    """Print the events of all tiers and engines, from now on or with history (`--since`)."""
    try:
        if action != "tail":
            raise ConfigError("kvbm events", action, "tail")
        wanted = Wanted(
            host=checked(host, "host"), source=checked(source, "source"), kind=kind_of(kind),
            since=start_of(since, datetime.now(UTC)), consolidated=consolidated, as_json=as_json,
            follow=follow,
        )  # fmt: skip
        settings = Settings.load(overrides={"nats_url": nats} if nats else None)
        asyncio.run(_until_signal(nats_access(settings, ADMIN), wanted))
    except KvbmError as error:
        exit_with(f"kvbm: {error}", code_of(error))


def checked(text: str, option: str) -> str:
    """Return a host or source that may stand in a subject; raises ConfigError otherwise."""
    if not re.fullmatch(r"\*|[A-Za-z0-9_-]{1,64}", text):
        raise ConfigError(f"--{option}", text, "1 to 64 letters, digits, '-' or '_'")
    return text


def kind_of(text: str) -> str:
    """Return a kind of event, or `*`; raises ConfigError for any other text."""
    if text not in (*KINDS, "*"):
        raise ConfigError("--kind", text, f"one of {', '.join(KINDS)}")
    return text


def lines_of(message: EventMessage, wanted: Wanted) -> list[str]:
    """Format the wanted events of a message as lines; that of an unreadable one gives the error."""
    if message.payload == UNMARKED:
        return []
    is_packed = message.subject.endswith(f".{PACKED}")
    if wanted.as_json and not is_packed:
        kind = message.subject.rpartition(".")[2]
        return [json_line_of(message.payload)] if wanted.kind in ("*", kind) else []
    try:
        events = events_on(message.subject, message.payload, prefix=wanted.prefix)
    except WireError as error:
        return [one_line(f"#{message.sequence} {message.subject}: {error.kind}: {error}")]
    events = [one for one in events if wanted.kind in ("*", packed_events.kind_of(one))]
    if wanted.as_json:
        return [json_line_of(event_codec.encode(one)) for one in events]
    return [line_of(message.sequence, one) for one in events]


def line_of(sequence: int, event: Event) -> str:
    """Format an event as a line for people; `sequence` is its message's position."""
    where = f"{event.host} {event.source} {event.tier}"
    rank = f" rank {event.rank}" if event.rank else ""
    position = f"epoch {event.epoch} seq {event.seq}"
    return one_line(f"#{sequence} {_time_of(event.ts_ms)} {where}{rank} {position} {_what(event)}")


def _time_of(ts_ms: int) -> str:
    """Return the time of day as `explain` and `audit` show it; the number where it is no date."""
    return clock(ts_ms) if ts_ms < DATES_END_MS else f"{ts_ms} ms"


def json_line_of(payload: bytes) -> str:
    """Return an event as it came, in one line that no terminal interprets."""
    text = payload.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    try:
        return json.dumps(json.loads(payload))
    except (ValueError, RecursionError):
        return printable(text)


def _what(event: Event) -> str:
    match event:
        case Stored():
            hashes = [name for run in event.runs for name in run.hashes]
            return f"stored {len(hashes)} {_some(hashes)}"
        case Removed():
            return f"removed {len(event.hashes)} {_some(event.hashes)} {event.reason}".rstrip()
        case Cleared():
            return f"cleared {event.reason}" + (" (rank only)" if event.rank_only else "")


def _some(hashes: list[str]) -> str:
    """Return the hashes as other commands take them, and the number of those left out."""
    left_out = len(hashes) - NAMES_MAX
    return " ".join(hashes[:NAMES_MAX]) + (f" … {left_out} more" if left_out > 0 else "")


async def tail(bus: Bus, wanted: Wanted, show: Callable[[str], None]) -> None:
    """Show messages until cancelled, or until the history is over."""
    spec = CONSOLIDATED if wanted.consolidated else bus.limits.events_of(wanted.host)
    async with (
        bus.event_subscription(start=wanted.since, subject=wanted.subject, spec=spec) as messages,
        asyncio.TaskGroup() as tasks,
    ):
        if not wanted.follow:
            tasks.create_task(_close_after_history(messages), name="history")
        async for batch in messages:
            for message in batch:
                for line in lines_of(message, wanted):
                    show(line)


async def _close_after_history(messages: EventSubscription) -> None:
    with contextlib.suppress(DeadlineExceeded):
        await messages.wait_caught_up(deadline_s=HISTORY_DEADLINE_S)
    await messages.close()


async def _until_signal(access: NatsAccess, wanted: Wanted) -> None:
    bus = await Bus.connect(access, "kvbm-events")
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    assert here is not None
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, here.cancel)
    failed: BaseException | None = None
    try:
        await tail(bus, wanted, lambda line: print(line, flush=True))
    except* (asyncio.CancelledError, BrokenPipeError):
        pass  # Ctrl-C, or `| head`: both are how a tail ends.
    except* OSError as group:
        failed = group.exceptions[0]
    finally:
        await bus.close()
    if failed is not None:
        raise failed  # Outside: what an `except*` raises is a group again.
