"""`kvbm events tail`, and every example of docs/events.md, on the real NATS."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from kvbm_cli.creds.embedded import authorization_of
from kvbm_cli.events import Wanted, checked, json_line_of, kind_of, line_of, lines_of, tail
from kvbm_cli.printing import clock
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN, CONSUMER
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, RequestFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.since import start_of
from kvbm_common.nats.snapshots import pages_of
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import CONSOLIDATED, EVENTS
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import (
    CONSOLIDATED_PREFIX,
    SUBJECT_PREFIX,
    Cleared,
    Event,
    Removed,
    Run,
    Stored,
    event_codec,
    event_subject,
)
from kvbm_common.wire.verbs import SnapshotReply, SnapshotRequest

from tests.libs.helpers import block, names

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "events.md").read_text()
KVBM = Path(sys.executable).parent / "kvbm"
DEADLINE_S = 15.0
NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Source:
    """A tier that answers for a snapshot, and what it has announced."""

    def __init__(self, name: str = "host-tier-0", host: str = "gpu-a", epoch: int = 5) -> None:
        self.announcer = Announcer(host=host, source=name, tier="host", epoch=epoch)
        self.events: list[Event] = [self.announcer.cleared("start")]

    def store(self, *numbers: int) -> None:
        """Store blocks."""
        self.events += self.announcer.stored([block(number) for number in numbers])

    def remove(self, *numbers: int) -> None:
        """Remove blocks."""
        self.events += self.announcer.removed([block(number) for number in numbers], "evicted")

    def clear(self) -> None:
        """Remove all."""
        self.events.append(self.announcer.cleared("admin"))


async def publish(bus: Bus, *events: Event, packed: bool = False) -> None:
    """Put events on both streams, and wait until they are kept."""
    publishers = [
        (bus.event_publisher("test"), SUBJECT_PREFIX),
        (bus.event_publisher("test", spec=CONSOLIDATED), CONSOLIDATED_PREFIX),
    ]
    for publisher, prefix in publishers:
        running = asyncio.create_task(publisher.run())
        for event in events:
            event = msgspec.structs.replace(event, ts_ms=1_900_000_000_000)
            if not packed:
                payload = event_codec.encode(event)
                subject = event_subject(event).replace(SUBJECT_PREFIX, prefix)
                publisher.publish(subject, payload, epoch=event.epoch, seq=event.seq)
            else:
                publisher.publish_event(event)
        await publisher.flush(deadline_s=5.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def history(bus: Bus) -> list[Event]:
    """Two sources: stores, removals, a clear."""
    one, two = Source(), Source("disk-tier-0", "gpu-b", 6)
    one.store(1, 2, 3)
    one.remove(2)
    two.store(1)
    two.clear()
    events = one.events + two.events
    await publish(bus, *events)
    return events


async def shown(bus: Bus, **wanted: object) -> list[str]:
    """The lines of a tail of the history."""
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        await tail(bus, Wanted(follow=False, **wanted), lines.append)  # type: ignore[arg-type]
    return lines


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("now", "new"),
        ("all", "all"),
        ("90s", NOW - timedelta(seconds=90)),
        ("2h", NOW - timedelta(hours=2)),
        ("1d", NOW - timedelta(days=1)),
        ("#17", 17),
        ("#1", 1),
        (f"#{2**63 - 2}", 2**63 - 2),
        ("2029-12-31T23:00:00+00:00", NOW - timedelta(hours=1)),
    ],
)
def test_since(text: str, start: object) -> None:
    assert start_of(text, NOW) == start


@pytest.mark.parametrize(
    "text",
    [
        "yesterday", "", "5", "#x", "10 m", "#0", f"#{2**63 - 1}", "#99999999999999999999",
        "#" + "9" * 5000, "9" * 5000 + "s", "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
    ],
)  # fmt: skip
def test_a_since_that_is_none_is_named(text: str) -> None:
    """Goal: the text names the option and what it takes; nothing is handed to NATS to refuse."""
    with pytest.raises(ConfigError, match=r"--since.* from #1 to #9223372036854775806"):
        start_of(text, NOW)


def test_filters_are_names_and_kinds() -> None:
    assert (checked("*", "host"), kind_of("*")) == ("*", "*")
    with pytest.raises(ConfigError, match="--host"):
        checked("a.b", "host")
    with pytest.raises(ConfigError, match="--kind"):
        kind_of("lost")


async def test_history_and_filters(bus: Bus, history: list[Event]) -> None:
    """1. Everything, in order. 2. By host, source and kind. 3. From a position. 4. Raw messages."""
    lines = await shown(bus, since="all")
    assert len(lines) == len(history)
    assert lines[1] == (
        "#2 17:46:40.000 gpu-a host-tier-0 host epoch 5 seq 2 "
        f"stored 3 {' '.join(name.hex() for name in names(1, 2, 3))}"
    )
    assert lines[2].endswith(f"removed 1 {2:032x} evicted")
    assert lines[-1].endswith("cleared admin")
    assert await shown(bus, since="all", host="gpu-a") == lines[:3]
    assert await shown(bus, since="all", source="disk-tier-0", kind="stored") == lines[4:5]
    assert await shown(bus, since=5) == lines[4:]
    assert len(await shown(bus, since="all", consolidated=True)) == len(history)
    raw = await shown(bus, since="all", as_json=True)
    assert [json.loads(line)["seq"] for line in raw] == [event.seq for event in history]
    assert await shown(bus, since=datetime.now(UTC) + timedelta(hours=1)) == []


async def test_packed_events_are_shown_one_by_one(bus: Bus) -> None:
    """Goal: a tail says the same of both forms, with the position of the message.

    1. Lines, of both streams. 2. By kind. 3. As JSON.
    """
    source = Source()
    for number in range(1, 4):
        source.store(number)
    source.remove(2, 3)
    await publish(bus, *source.events, packed=True)
    lines = await shown(bus, since="all")
    assert [line.partition(" epoch ")[2] for line in lines] == [
        "5 seq 1 cleared start",
        *(f"5 seq {seq} stored 1 {seq - 1:032x}" for seq in (2, 3, 4)),
        f"5 seq 5 removed 2 {2:032x} {3:032x} evicted",
    ]
    assert {line.partition(" ")[0] for line in lines[1:]} == {"#2"}
    assert await shown(bus, since="all", consolidated=True) == lines
    assert await shown(bus, since="all", kind="removed") == lines[4:]
    raw = await shown(bus, since="all", kind="stored", as_json=True)
    assert [json.loads(line) for line in raw] == [
        json.loads(event_codec.encode(msgspec.structs.replace(one, ts_ms=1_900_000_000_000)))
        for one in source.events[1:4]
    ]


def test_what_cannot_be_read_says_so() -> None:
    for kind in ("stored", "packed"):
        subject = f"kvbm.v1.events.h.s.{kind}"
        (line,) = lines_of(EventMessage(subject, b"{", 9), Wanted())
        assert line.startswith(f"#9 {subject}: malformed:")


def test_long_events_are_shortened_and_ranks_shown() -> None:
    run = Run(parent="0" * 32, hashes=[name.hex() for name in names(1, 2, 3, 4)])
    event = Stored(host="h", source="e", tier="device", epoch=1, seq=2, ts_ms=0, rank=3,
                   namespace="0" * 64, runs=[run])  # fmt: skip
    line = line_of(1, event)
    assert " rank 3 " in line
    assert line.endswith(f"{3:032x} … 1 more")


def test_times_are_in_the_time_zone_of_explain_and_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one tool, one clock; `--since` takes this time, too. The JSON form has `ts_ms`."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        event = Cleared(host="h", source="e", tier="device", epoch=1, seq=2, ts_ms=3_600_007)
        assert line_of(1, event).startswith("#1 06:30:00.007 h e device ")
        assert clock(3_600_007) == "06:30:00.007"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("ts_ms", [2**63 - 1, 10**15, 10**18])
def test_a_time_that_is_no_date_is_shown_as_it_is(ts_ms: int) -> None:
    event = Cleared(host="h", source="e", tier="device", epoch=1, seq=2, ts_ms=ts_ms)
    assert line_of(1, event).startswith(f"#1 {ts_ms} ms h e device ")


# ---- the document ----------------------------------------------------------------------------


def _interruptible() -> None:
    """What a shell starts in its background ignores the interrupt, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Running:
    """A process, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *command: str | Path, url: str, **more: str) -> Running:
        """Start it against a NATS, with more variables."""
        environ = os.environ | {"NATS_URL": url, "KVBM_NATS_URL": url} | more
        return cls(
            await asyncio.create_subprocess_exec(
                *command, env=environ, stdout=asyncio.subprocess.PIPE, preexec_fn=_interruptible
            )
        )

    async def wait_line(self, wanted: str) -> str:
        """Read on until a line holds this."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while True:
                line = (await self.process.stdout.readline()).decode()
                assert line, f"it ended before it said {wanted!r}"
                if wanted in line:
                    return line

    async def end(self) -> int:
        """Interrupt it."""
        self.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


async def example_running(guarded: Settings, directory: Path) -> Running:
    """Start the documented consumer, with the credential of one."""
    example = directory / "example.py"
    example.write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    shown = str(guarded.creds_dir / f"{CONSUMER}.creds")
    return await Running.start(
        sys.executable, example, url=guarded.nats_url, KVBM_NATS_CREDS_FILE=shown
    )


@pytest.fixture
async def source(bus: Bus) -> Source:
    """A tier that answers for snapshots."""
    return await serving(Source(), bus)


async def serving(source: Source, bus: Bus, kind: str = "host-tier", instance: str = "0") -> Source:
    """Answer for snapshots of a source, as this service: of four blocks, a block a page."""
    held = [block(number) for number in range(1, 5)]
    kept: list[SnapshotReply] = []

    async def snapshot(payload: bytes) -> bytes:
        request = msgspec.json.decode(payload, type=SnapshotRequest)
        if not request.page:
            kept[:] = pages_of(source.announcer.snapshot(held), page_bytes=100)
            assert len(kept) == len(held)
        page = kept[request.page]
        assert not request.page or (request.epoch, request.seq) == (page.epoch, page.seq)
        return msgspec.json.encode(page)

    await bus.add_verbs(kind, instance, "gpu-a", {"snapshot": snapshot})
    return source


@pytest.fixture
async def guarded_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """The NATS of `kvbm up`: a password for each role."""
    users = authorization_of(tmp_path / "creds", host="gpu-a", instances=["0"])
    async with NatsServer(tmp_path / "nats", more={"authorization": users}) as server:
        yield server


@pytest.fixture
async def guarded(guarded_server: NatsServer, tmp_path: Path) -> Settings:
    """The settings of clients of that NATS."""
    return Settings.load({}, {"nats_url": guarded_server.url, "creds_dir": tmp_path / "creds"})


@pytest.fixture
async def admin(guarded: Settings) -> AsyncIterator[Bus]:
    """A bus of the role admin, which has made the streams."""
    bus = await Bus.connect(nats_access(guarded, ADMIN), "test")
    await set_up_streams(bus)
    yield bus
    await bus.close()


@pytest.mark.parametrize("packed", [False, True])
async def test_the_consumer_in_python(
    guarded: Settings, admin: Bus, tmp_path: Path, packed: bool
) -> None:
    """Goal: the example is right, gaps and added fields included, with a consumer's credentials.

    1. It reads the history. 2. An event is lost: it asks for the snapshot. 3. A field of next year
    changes nothing.
    """
    source = await serving(Source(), admin)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    take = code[code.index("async def snapshot_of") : code.index("async def main")]
    assert len(take.strip().splitlines()) < 40
    source.store(1, 2)
    await publish(admin, *source.events, packed=packed)
    running = await example_running(guarded, tmp_path)
    await running.wait_line("{'gpu-a/host-tier-0': 2}")
    source.store(3)  # Lost.
    source.store(4)
    await publish(admin, source.events[-1], packed=packed)
    await running.wait_line("{'gpu-a/host-tier-0': 4}")
    source.store(5)
    source.store(6)
    source.remove(6)
    await publish(admin, *source.events[-3:], packed=packed)
    await running.wait_line("{'gpu-a/host-tier-0': 5}")
    source.remove(1)
    later = json.loads(event_codec.encode(source.events[-1])) | {"novelty": {"a": [1]}}
    await admin.publish(event_subject(source.events[-1]), json.dumps(later).encode())
    await running.wait_line("{'gpu-a/host-tier-0': 4}")
    source.clear()
    await publish(admin, source.events[-1], packed=packed)
    await running.wait_line("{'gpu-a/host-tier-0': 0}")
    await running.end()


@pytest.mark.parametrize(
    ("name", "kind", "instance"),
    [
        ("host-tier-1", "host-tier", "1"),
        ("disk-tier-0", "disk-tier", "0"),
        ("disk-tier-0-1", "disk-tier", "0-1"),
        ("object-tier-0", "object-tier", "0"),
        ("vllm-0-1", "consolidator", "0"),
    ],
)
async def test_the_consumer_asks_who_answers_for_each_source(
    guarded: Settings, admin: Bus, tmp_path: Path, name: str, kind: str, instance: str
) -> None:
    """Of a second disk directory, of the object tier and of an engine: an event is lost."""
    source = await serving(Source(name), admin, kind, instance)
    source.store(1)
    source.store(2)
    await publish(admin, source.events[0], source.events[-1])
    running = await example_running(guarded, tmp_path)
    await running.wait_line(f"{{'gpu-a/{name}': 4}}")
    await running.end()


@pytest.mark.slow
async def test_the_consumer_leaves_out_a_source_that_cannot_say_what_it_holds(
    guarded: Settings, admin: Bus, tmp_path: Path
) -> None:
    """Goal: a stream without an engine's beginning ends no consumer, whoever answers for it.

    1. The consolidator knows the engine no more, nothing answers for the tier of host gpu-b, and
    the disk tier is silent. 2. The host tier is read. 3. The disk tier answers at its next event.
    """
    gone, away = Source("vllm-0", epoch=6), Source(host="gpu-b", epoch=7)
    late, source, silent = Source("disk-tier-0", epoch=8), Source(), asyncio.Event()

    async def refuse(_payload: bytes) -> bytes:
        raise RequestFailed("unknown_source", "vllm-0 is not here")

    async def answer(_payload: bytes) -> bytes:
        await silent.wait()
        return msgspec.json.encode(late.announcer.snapshot([block(n) for n in range(1, 5)]))

    await admin.add_verbs("consolidator", "0", "gpu-a", {"snapshot": refuse})
    await admin.add_verbs("disk-tier", "0", "gpu-a", {"snapshot": answer})
    for one in (gone, away, late):
        one.store(1, 2)
        await publish(admin, one.events[-1])
    source.store(1)
    await publish(admin, *source.events)
    running = await example_running(guarded, tmp_path)
    await running.wait_line("{'gpu-a/host-tier-0': 1}")
    silent.set()
    late.store(3)
    await publish(admin, late.events[-1])
    await running.wait_line("{'gpu-a/host-tier-0': 1, 'gpu-a/disk-tier-0': 4}")
    await running.end()


@pytest.mark.slow
async def test_the_consumer_hears_the_events_after_nats_has_lost_its_store(
    guarded_server: NatsServer, guarded: Settings, admin: Bus, tmp_path: Path
) -> None:
    """Goal: the example is not deaf until the new stream has as many messages as the lost one.

    1. It reads the events of two sources. 2. NATS comes back with an empty store. 3. It hears the
    next event, and knows anew what the source holds that says nothing more.
    """
    source = await serving(Source(), admin)
    quiet = await serving(Source("disk-tier-0", epoch=6), admin, "disk-tier")
    quiet.store(1)
    await publish(admin, *quiet.events)
    for _ in range(20):
        source.store(1)
    await publish(admin, *source.events)
    running = await example_running(guarded, tmp_path)
    await running.wait_line("{'gpu-a/disk-tier-0': 1, 'gpu-a/host-tier-0': 1}")
    guarded_server.kill()
    shutil.rmtree(guarded_server.directory / "jetstream")
    await guarded_server.start()
    async with asyncio.timeout(DEADLINE_S):
        await admin.wait_connected()
    await set_up_streams(admin)
    source.store(1)
    await publish(admin, source.events[-1])
    await running.wait_line("{'gpu-a/disk-tier-0': 4, 'gpu-a/host-tier-0': 4}")
    await running.end()


def commands(program: str) -> list[list[str]]:
    """The document's command lines of a program."""
    found = re.findall(rf"^    {program} (.*)$", TEXT, re.MULTILINE)
    assert found
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize("arguments", commands("kvbm"), ids=" ".join)
async def test_the_kvbm_commands(
    bus: Bus, nats_url: str, history: list[Event], arguments: list[str]
) -> None:
    """Each shows the events it is about; what follows is published until it has been seen."""
    running = await Running.start(KVBM, *arguments, url=nats_url)
    if "--no-follow" in arguments:
        await running.wait_line('"seq":1')
        await running.process.communicate()
        assert running.process.returncode == 0
        return
    more = asyncio.create_task(_publish_more(bus))
    await running.wait_line("removed" if "removed" in arguments else "gpu-a")
    more.cancel()
    await asyncio.gather(more, return_exceptions=True)
    assert await running.end() == 0


async def test_a_reader_that_has_seen_enough_is_no_error(
    bus: Bus, nats_url: str, history: list[Event]
) -> None:
    """`kvbm events tail | head -1`: the next line goes to a pipe that is closed."""
    command = f"{shlex.quote(str(KVBM))} events tail --since all | head -1"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, env=os.environ | {"KVBM_NATS_URL": nats_url},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    more = asyncio.create_task(_publish_more(bus))
    async with asyncio.timeout(DEADLINE_S):
        said, complaints = await process.communicate()
    more.cancel()
    await asyncio.gather(more, return_exceptions=True)
    assert (len(said.splitlines()), complaints) == (1, b"")


async def test_a_full_disk_behind_a_tail_is_one_line(nats_url: str, history: list[Event]) -> None:
    command = f"{shlex.quote(str(KVBM))} events tail --since all > /dev/full"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, env=os.environ | {"KVBM_NATS_URL": nats_url},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        _, complaints = await process.communicate()
    assert process.returncode == 1
    assert complaints.decode().splitlines() == ["kvbm events: No space left on device"]


async def _publish_more(bus: Bus) -> None:
    for number in range(1, 1_000):
        source = Source(epoch=10 + number)
        source.store(number)
        source.remove(number)
        await publish(bus, *source.events)


@pytest.mark.parametrize("arguments", commands("nats"), ids=" ".join)
async def test_the_nats_commands_ask_what_there_is(
    bus: Bus, history: list[Event], source: Source, arguments: list[str]
) -> None:
    """Goal: each subject, stream and payload of a `nats` line is right. Method: the same question
    through our client, since the tool itself is not a part of this project."""
    fill = {"HOST": "gpu-a", "ENGINE": "sim-0"}
    words = [re.sub(r"\b(HOST|ENGINE)\b", lambda m: fill[m[1]], word) for word in arguments]
    match words:
        case ["sub", option, subject]:
            start = {"--all": "all", "--last-per-subject": "last_per_subject"}[option]
            async with bus.event_subscription(start=start, subject=subject) as messages:  # type: ignore[arg-type]
                async with asyncio.timeout(DEADLINE_S):
                    assert len(await anext(messages)) > 0
        case ["stream", "info", name]:
            assert name == EVENTS.name
            found = json.loads(await call_api(bus, f"STREAM.INFO.{name}"))
            assert found["config"]["subjects"] == ["kvbm.v1.events.>"]
        case ["micro", "ls"]:
            reply = await bus.request("$SRV.INFO", b"", deadline_s=2.0)
            assert json.loads(reply)["name"] == "kvbm-host-tier"
        case ["req", subject, payload]:
            heard: list[bytes] = []

            async def answer(raw: bytes) -> bytes:
                heard.append(raw)
                return b"{}"

            kind = subject.split(".")[2]
            if kind != "host-tier":
                await bus.add_verbs(kind, "0", "gpu-a", {"snapshot": answer}, shared=False)
                await bus.add_verbs(kind, "0", "gpu-a", {"dump": answer}, shared=True)
            assert (
                json.loads(await bus.request(subject, payload.encode(), deadline_s=2.0)) is not None
            )
            assert "source" in json.loads(payload)
        case _:
            raise AssertionError(words)


async def test_a_wrong_option_ends_with_2_and_an_absent_nats_with_1() -> None:
    running = await Running.start(KVBM, "events", "tail", "--since", "x", url="nats://127.0.0.1:1")
    await running.process.communicate()
    assert running.process.returncode == 2


def test_removed_without_a_reason_has_no_trailing_blank() -> None:
    event = Removed(host="h", source="s", tier="disk", epoch=1, seq=2, ts_ms=0,
                    namespace="0" * 64, hashes=["0" * 32])  # fmt: skip
    assert line_of(1, event).endswith("00000000")


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"a": "\xc3\xa9"}', '{"a": "é"}'),
        ('{"a":\n"\x9b2J"}'.encode(), '{"a": "\\u009b2J"}'),
        (b"\x1b[2J\xff", "\\x1b[2J\\xff"),
        (b"[" * 100_000 + b"\n", "[" * 100_000 + "\\n"),
    ],
)
def test_a_payload_is_one_line_that_no_terminal_obeys(payload: bytes, shown: str) -> None:
    """Goal: JSON stays JSON, and what is none is escaped."""
    assert json_line_of(payload) == shown


def test_the_line_of_an_unreadable_event_is_printable() -> None:
    message = EventMessage("kvbm.\x1b[2J", b'{"\x1b', 1)
    (line,) = lines_of(message, Wanted())
    assert line.isprintable()
