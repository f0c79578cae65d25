"""Links: their states on a clock of ours, and on real ZMQ what comes from a confused service."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from kvbm_common.access.curve import ServerKeys, write_keys
from kvbm_common.access.secret_files import write_secret
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, SOCKET_BYTES_MAX
from kvbm_common.wire.local import (
    Alive,
    Beat,
    Confirm,
    FromHostTier,
    Hello,
    Pulled,
    Refused,
    ToHostTier,
    from_host_tier,
    to_host_tier,
)
from kvbm_connectors.client import link as links
from kvbm_connectors.client import link_thread
from kvbm_connectors.client.link import (
    BEAT_MS,
    GREET_EVERY_MS,
    SILENCE_BEATS,
    Link,
    LinkState,
)
from kvbm_connectors.client.link_thread import LinkThread

from tests.connectors.endpoints import host_tier, welcome
from tests.connectors.helpers import INCARNATION, NAMESPACE, of
from tests.waiting import wait_for

HELLO = Hello(engine="ada", incarnation=INCARNATION, role="scheduler", namespace=NAMESPACE)
BEAT = Beat(engine="ada", incarnation=INCARNATION)
LAST = Beat(engine="last", incarnation=INCARNATION)
PULLED = Pulled(offer=1, pulled=1, skipped=0)


class Socket:
    """What a Link needs of a ZMQ DEALER."""

    def __init__(self) -> None:
        self.sent: list[ToHostTier] = []
        self.inbox: deque[bytes] = deque()
        self.full = False

    def send(self, data: bytes, _flags: int = 0) -> None:
        if self.full:
            raise zmq.Again
        self.sent.append(to_host_tier.decode(data))

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return [self.inbox.popleft()]


class Driven:
    """A link, its socket and its clock."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.downs = 0
        self.socket = Socket()
        self.now_ms = 1_000_000
        self.link = make_link("ipc://unused", self.heard.append, self._down)
        self.link.socket = cast("zmq.Socket[bytes]", self.socket)

    def _down(self) -> None:
        self.downs += 1

    def state(self) -> LinkState:
        return self.link.state

    def wait(self, ms: int = 0) -> list[ToHostTier]:
        """What the link says when so much time has passed."""
        self.now_ms += ms
        before = len(self.socket.sent)
        self.link.tick(self.now_ms)
        return self.socket.sent[before:]

    def reopen(self) -> None:
        """Do what the thread does with a link that moves: open another socket."""
        assert self.link.needs_socket(self.now_ms)
        self.link.opened(cast("zmq.Socket[bytes]", self.socket), self.now_ms)

    def hear(self, message: FromHostTier) -> None:
        self.socket.inbox.append(from_host_tier.encode(message))
        self.link.receive(self.now_ms)


def make_link(endpoint: str, on_message: Any, on_down: Any = lambda: None) -> Link:
    """An engine's link to its host tier."""
    return Link(
        "ada: host tier", endpoint, to_host_tier, from_host_tier, lambda: HELLO, BEAT,
        on_message, on_down,
    )  # fmt: skip


# --- states -------------------------------------------------------------------------------------


def test_a_link_greets_until_it_is_welcomed_and_then_beats() -> None:
    driven = Driven()
    assert driven.wait() == [HELLO]
    assert driven.wait(GREET_EVERY_MS - 1) == []
    assert driven.wait(1) == [HELLO]
    assert driven.state() is LinkState.GREETING
    driven.hear(welcome())
    assert driven.state() is LinkState.UP
    assert driven.heard == [welcome()]
    assert driven.wait(BEAT_MS - 1) == []
    assert driven.wait(1) == [BEAT]


def test_a_greeting_that_changes_before_its_answer_is_sent_again() -> None:
    """Goal: what an engine says of itself between a greeting and its answer is not lost.

    A service that starts again is greeted just then. Nothing is sent while messages are read: then
    the socket may be an engine thread's. What the tick sends is the latest.
    """
    driven = Driven()
    changed = msgspec.structs.replace(HELLO, world_size=2)
    driven.wait()
    driven.link.hello = lambda: changed
    driven.link.outbox.append(changed)
    assert driven.wait(1) == []
    driven.hear(welcome())
    assert driven.socket.sent == [HELLO]
    latest = msgspec.structs.replace(HELLO, world_size=3)
    driven.link.hello = lambda: latest
    driven.link.outbox.append(latest)
    assert driven.link.flush()  # An engine thread's, before the tick.
    assert driven.wait() == [latest]
    driven.hear(welcome())
    assert driven.wait() == []


def test_a_silent_service_is_gone_and_greeted_again() -> None:
    """An answer to a beat is enough to be there."""
    driven = Driven()
    driven.wait()
    driven.hear(welcome())
    for _ in range(SILENCE_BEATS):
        assert driven.wait(BEAT_MS) == [BEAT]
    driven.hear(Alive(epoch=7))
    for _ in range(SILENCE_BEATS):
        assert driven.wait(BEAT_MS) == [BEAT]
    assert driven.wait(BEAT_MS - 1) == []
    assert driven.downs == 0
    assert driven.wait(1) == [HELLO]
    assert (driven.downs, driven.link.counts["lost.silence"]) == (1, 1)
    driven.hear(welcome(epoch=8))
    assert driven.link.state is LinkState.UP


def test_an_engine_that_had_to_wait_itself_asks_before_it_gives_up() -> None:
    """A machine that stands still for an hour: nobody was asked, so nobody was silent."""
    driven = Driven()
    driven.wait()
    driven.hear(welcome())
    assert driven.wait(3_600_000) == [BEAT]
    driven.hear(Alive(epoch=7))
    assert driven.wait(BEAT_MS) == [BEAT]
    assert driven.downs == 0


def test_a_service_that_has_forgotten_us_is_greeted_at_once() -> None:
    """It was restarted: nobody waits for beats."""
    driven = Driven()
    driven.wait()
    driven.hear(welcome())
    driven.hear(Refused(about="beat", code="unknown_engine", message="say hello first"))
    assert (driven.downs, driven.link.counts["lost.unknown_engine"]) == (1, 1)
    assert driven.wait() == [HELLO]


def test_a_beat_that_another_life_answers_is_followed_by_a_greeting() -> None:
    """Goal: no link goes by the arena of a life that has ended.

    1. A life welcomes the link late, and ends. 2. Its successor has taken earlier greetings, so
    that it knows the engine, but its own welcome was lost. 3. Its answer to a beat says who it is.
    """
    driven = Driven()
    driven.wait()
    driven.hear(welcome(epoch=7))
    driven.hear(Alive(epoch=8))
    assert (driven.downs, driven.link.counts["lost.other_life"]) == (1, 1)
    assert driven.wait() == [HELLO]
    driven.hear(Alive(epoch=8))
    assert driven.state() is LinkState.GREETING
    driven.hear(welcome(epoch=8))
    driven.hear(Alive(epoch=8))
    assert driven.state() is LinkState.UP
    assert driven.downs == 1


def test_a_refused_greeting_is_repeated_slowly_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong namespace is the operator's to mend."""
    driven = Driven()
    for _ in range(3):
        assert driven.wait(links.REFUSED_GREET_EVERY_MS) == [HELLO]
        driven.hear(Refused(about="hello", code="namespace", message="differs"))
        assert driven.wait(links.REFUSED_GREET_EVERY_MS - 1) == []
        driven.now_ms -= links.REFUSED_GREET_EVERY_MS - 1
    assert driven.link.counts["refused.namespace"] == 3
    assert len([record for record in caplog.records if "namespace" in record.message]) == 1


def test_the_reason_why_there_is_no_arena_is_logged_after_it_was_pending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first refusal says only "say hello again"; the second is news to the operator."""
    driven = Driven()
    for code, message in (("arena_pending", "hello again"), ("arena_refused", "9 bytes free")):
        driven.wait(links.REFUSED_GREET_EVERY_MS)
        driven.hear(Refused(about="hello", code=code, message=message))
    assert [text for text in ("hello again", "9 bytes free") if text in caplog.text] == [
        "hello again", "9 bytes free",
    ]  # fmt: skip


def test_what_is_said_to_a_service_that_is_away_is_dropped_and_counted() -> None:
    driven = Driven()
    driven.link.outbox.extend([BEAT, BEAT])
    assert driven.wait() == [HELLO]
    assert driven.link.counts["dropped.link_down"] == 2


def test_what_does_not_fit_into_the_socket_is_dropped_and_counted() -> None:
    driven = Driven()
    driven.wait()
    driven.hear(welcome())
    driven.socket.full = True
    driven.link.outbox.append(BEAT)
    assert driven.wait() == []
    assert driven.link.counts["dropped.send_queue_full"] == 1


def test_the_queue_of_a_link_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has not started: three fit."""
    monkeypatch.setattr(link_thread, "QUEUE_MAX", 3)
    link = make_link("inproc://nobody", lambda _: None)
    thread = LinkThread([link], name="bounded")
    for _ in range(5):
        thread.say(link, BEAT)
    assert len(link.outbox) == 3
    assert link.counts["dropped.queue_full"] == 2
    thread.start()
    thread.close()


# --- on real ZMQ --------------------------------------------------------------------------------


class Linked:
    """A link in its thread, and what it has heard."""

    def __init__(self, endpoint: str) -> None:
        self.heard: list[Any] = []
        self.downs = threading.Semaphore(0)
        self.link = make_link(endpoint, self._on_message, self.downs.release)
        self.thread = LinkThread([self.link], name="linked")
        self.broken = False

    def _on_message(self, message: FromHostTier) -> None:
        if self.broken:
            raise ZeroDivisionError("a mistake of ours")
        self.heard.append(message)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/host.sock"


@pytest.fixture
def linked(endpoint: str) -> Iterator[Linked]:
    """A link whose thread runs."""
    linked = Linked(endpoint)
    linked.thread.start()
    yield linked
    linked.thread.close()


@pytest.mark.slow
def test_a_quiet_link_rests_between_its_beats(endpoint: str) -> None:
    """1. Ticks come with the beats, while nothing needs them. 2. What may wait for the next message
    still leaves before the next beat. 3. Who needs ticks has them again at once."""
    ticks: list[int] = []
    has_work = threading.Event()
    link = make_link(endpoint, lambda _: None)
    thread = LinkThread(
        [link], name="quiet", on_tick=ticks.append, may_rest=lambda: not has_work.is_set()
    )
    thread.start()
    with host_tier(endpoint) as host:
        host.hear(Hello)
        host.say(welcome())
        host.hear(Beat)
        host.say(Alive(epoch=7))
        before = len(ticks)
        host.hear(Beat)
        host.say(Alive(epoch=7))
        assert len(ticks) - before <= 5, "without a rest there are ten"
        wait_for(lambda: thread.is_resting)
        thread.say(link, LAST, ring=False)
        assert host.hear(object) == LAST
        wait_for(lambda: thread.is_resting)
        has_work.set()
        thread.wake()
        wait_for(lambda: len(ticks) - before >= 9 and not thread.is_resting)
        thread.close()


def test_a_thread_that_rests_is_woken_once(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: waking it costs an engine's step as much as an offer does."""
    link = make_link(endpoint, lambda _: None)
    thread = LinkThread([link], name="woken")
    thread.is_resting = True
    rings: list[int] = []
    monkeypatch.setattr(thread, "ring", lambda: rings.append(1))
    thread.wake()
    thread.say(link, LAST, ring=False)
    monkeypatch.undo()
    thread.close()
    assert len(rings) == 1


@pytest.mark.slow
def test_a_thread_rests_after_a_tick_without_work(endpoint: str) -> None:
    """Goal: calls between the ticks of a busy engine wake no thread."""
    ticks: list[tuple[int, bool]] = []
    has_work = threading.Event()

    def on_tick(now_ms: int) -> None:
        ticks.append((now_ms, has_work.is_set()))
        has_work.clear()

    thread = LinkThread(
        [make_link(endpoint, lambda _: None)], name="busy", on_tick=on_tick,
        may_rest=lambda: not has_work.is_set(),
    )  # fmt: skip
    thread.start()
    with host_tier(endpoint) as host:
        host.hear(Hello)
        host.say(welcome())
        host.hear(Beat)
        host.say(Alive(epoch=7))
        wait_for(lambda: thread.is_resting)
        has_work.set()
        thread.wake()
        host.hear(Beat)
        wait_for(lambda: ticks[-1][1] is False and any(worked for _, worked in ticks))
        thread.close()
    at = next(at for at, (_, worked) in enumerate(ticks) if worked)
    assert ticks[at + 1][0] - ticks[at][0] < BEAT_MS // 2, "it has rested until the next beat"


GOOD = from_host_tier.encode(PULLED)
BAD = [
    ((b"",), "malformed"),
    ((b"garbage",), "malformed"),
    ((b"\xc1",), "malformed"),
    ((GOOD[:-1],), "malformed"),
    ((GOOD + b"x",), "malformed"),
    ((GOOD, GOOD), "malformed"),
    ((from_host_tier.encode(cast("Any", HELLO)),), "malformed"),  # Nothing that a host tier says.
    ((GOOD.replace(b"\xa1v\x01", b"\xa1v\x09"),), "version"),
    ((bytes(MESSAGE_BYTES_MAX + 1),), "oversized"),
]


def test_bad_messages_are_counted_logged_once_per_kind_and_harm_nothing(
    linked: Linked, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Each of them, twice. 2. A good one is heard; nothing was believed, nothing was lost."""
    caplog.set_level(logging.INFO)
    with host_tier(endpoint) as host:
        host.hear(Hello)
        host.say(welcome())
        for frames, _ in 2 * BAD:
            host.send(*frames)
        host.say(PULLED)
        wait_for(lambda: PULLED in linked.heard)
        assert linked.heard == [welcome(), PULLED]
        kinds = [kind for _, kind in BAD]
        for kind in set(kinds):
            assert linked.link.counts[f"dropped.{kind}"] == 2 * kinds.count(kind), kind
            logged = [r for r in caplog.records if r.message.startswith(f"{kind}: ")]
            assert len(logged) == 1, kind
        assert linked.link.state is LinkState.UP


def test_a_message_beyond_all_bounds_costs_the_connection_and_no_more(
    linked: Linked, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ hangs up, and never connects that socket again: the silent link takes another one."""
    monkeypatch.setattr(links, "BEAT_MS", 50)
    with host_tier(endpoint) as host:
        host.hear(Hello)
        host.say(welcome())
        wait_for(lambda: linked.heard)
        known = host.peer
        host.send(bytes(SOCKET_BYTES_MAX + 1))
        host.welcome(Hello, welcome(epoch=8), lambda: welcome(epoch=8) in linked.heard)
        assert host.peer != known


def test_greetings_do_not_pile_up_while_nobody_listens(
    linked: Linked, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a night without a host tier there is one greeting for it, not a hundred thousand."""
    monkeypatch.setattr(links, "GREET_EVERY_MS", 5)
    monkeypatch.setattr(links, "BEAT_MS", 10)
    monkeypatch.setattr(link_thread, "POLL_MS_MAX", 5)
    opened_ms = linked.link.opened_ms
    wait_for(lambda: linked.link.opened_ms > opened_ms + 200)
    monkeypatch.setattr(links, "BEAT_MS", 10_000)
    monkeypatch.setattr(links, "GREET_EVERY_MS", 10_000)
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)
        linked.thread.say(linked.link, LAST)
        host.hear(Beat)
        assert len(linked.heard) < 20


def test_a_service_that_dies_and_comes_back_is_found_again(
    linked: Linked, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but its silence says that it is gone."""
    monkeypatch.setattr(links, "BEAT_MS", 50)
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(epoch=7), lambda: welcome(epoch=7) in linked.heard)
    assert linked.downs.acquire(timeout=10)
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(epoch=8), lambda: welcome(epoch=8) in linked.heard)


def test_keys_that_come_late_are_taken(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: keys are exchanged, or mounted, while engines run. A link without keys is opened again
    until it has some; others of its thread go on, and `close` returns."""
    monkeypatch.setattr(links, "BEAT_MS", 50)
    server_file, client_file = write_keys(tmp_path)
    kept = client_file.read_bytes()
    client_file.unlink()
    monkeypatch.setenv("KVBM_CURVE_CLIENT_FILE", str(client_file))
    keys = msgspec.json.decode(server_file.read_bytes(), type=ServerKeys)
    heard: list[Any] = []
    link = make_link(f"tcp://127.0.0.1:{free_port()}", heard.append)
    other = make_link(endpoint, heard.append)
    thread = LinkThread([link, other], name="late keys")
    thread.start()
    try:
        with host_tier(endpoint) as host:
            host.welcome(Hello, welcome(epoch=7), lambda: heard)
        with host_tier(link.endpoint, keys) as host:
            wait_for(lambda: link.counts["dropped.no_keys"] >= 2)
            assert [one for one in caplog.messages if "cannot be reached now" in one]
            assert not link.counts["dropped.send_queue_full"]
            write_secret(client_file, kept.decode())
            host.welcome(Hello, welcome(epoch=8), lambda: welcome(epoch=8) in heard)
    finally:
        thread.close()
    assert "late keys" not in {one.name for one in threading.enumerate()}


def test_a_link_that_cannot_say_its_last_keeps_no_other_from_its_end(endpoint: str) -> None:
    """A mistake of ours in the first link; `close` returns, and a second thread can begin."""

    def broken() -> Hello:
        raise ZeroDivisionError("a mistake of ours")

    first, second = (make_link(endpoint, lambda _: None) for _ in range(2))
    first.hello = broken
    thread = LinkThread([first, second], name="broken")
    thread.start()
    thread.close()
    assert second.socket is not None
    assert second.socket.closed


def test_a_lone_surrogate_is_dropped_and_counted(linked: Linked, endpoint: str) -> None:
    """JSON lets one through, so that a session may be called so."""
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)
        linked.thread.say(linked.link, Beat(engine="\ud800", incarnation=INCARNATION))
        linked.thread.say(linked.link, LAST, ring=False)
        assert host.hear(Beat)
    wait_for(lambda: linked.link.counts["dropped.no_text"] == 1)


def test_what_is_queued_is_said_before_the_end(endpoint: str) -> None:
    """Good-bye is said after close() was called."""
    linked = Linked(endpoint)
    with host_tier(endpoint) as host:
        linked.thread.start()
        host.hear(Hello)
        host.say(welcome())
        wait_for(lambda: linked.heard)
        for _ in range(10):
            linked.thread.say(linked.link, LAST)
        linked.thread.close()
        for _ in range(10):
            host.hear(type(LAST))


def test_a_mistake_of_ours_lets_the_engine_pass_through(
    linked: Linked, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread has ended: the engine must not wait for answers, and `close` returns."""
    with host_tier(endpoint) as host:
        host.hear(Hello)
        host.say(welcome())
        wait_for(lambda: linked.heard)
        linked.broken = True
        host.say(PULLED)
        assert linked.downs.acquire(timeout=10)
    assert of([r.exc_info[1] for r in caplog.records if r.exc_info], ZeroDivisionError)


# --- who sends ----------------------------------------------------------------------------------


def confirm(offer: int) -> Confirm:
    """A message with a number."""
    return Confirm(engine="ada", incarnation=INCARNATION, offer=offer, held=True)


@pytest.mark.slow
def test_a_message_is_sent_by_the_thread_that_says_it(
    linked: Linked, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread is not woken for it, and hears the answer all the same."""
    rings: list[None] = []
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)
        monkeypatch.setattr(linked.thread, "ring", lambda: rings.append(None))
        monkeypatch.setattr(link_thread, "USING_S_MAX", 10)
        for number in range(50):
            linked.thread.say(linked.link, confirm(number))
            assert host.hear(Confirm).offer == number
            host.say(Pulled(offer=number, pulled=1, skipped=0))
            wait_for(lambda wanted=number + 2: len(linked.heard) == wanted)  # type: ignore[misc]
    assert len(rings) < 50, "some messages were there when it had sent, but not each time"


def test_a_message_waits_for_the_link_thread_while_the_socket_is_in_use(
    linked: Linked, endpoint: str
) -> None:
    """The engine's thread goes on, and what it has said leaves in its order."""
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)
        with linked.link.using:
            linked.thread.say(linked.link, confirm(1))
            linked.thread.say(linked.link, confirm(2))
        linked.thread.say(linked.link, confirm(3))
        assert [host.hear(Confirm).offer for _ in range(3)] == [1, 2, 3]


def test_what_many_threads_say_leaves_once_and_in_their_order(
    linked: Linked, endpoint: str
) -> None:
    """Four threads, while answers come in."""
    threads, count = 4, 200
    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)

        def say_all(first: int) -> None:
            for number in range(first, first + count):
                linked.thread.say(linked.link, confirm(number))

        sayers = [threading.Thread(target=say_all, args=(1_000 * one,)) for one in range(threads)]
        for sayer in sayers:
            sayer.start()
        said: dict[int, list[int]] = {}
        for _ in range(threads * count):
            offer = host.hear(Confirm).offer
            said.setdefault(offer // 1_000, []).append(offer)
            host.say(Pulled(offer=offer, pulled=1, skipped=0))
        for sayer in sayers:
            sayer.join()
        wait_for(lambda: len(linked.heard) == threads * count + 1)
    for one, offers in said.items():
        assert offers == list(range(1_000 * one, 1_000 * one + count))


def test_nothing_is_sent_on_a_closed_link(endpoint: str) -> None:
    """An engine's thread may say something while another one closes."""
    with host_tier(endpoint) as host:
        linked = Linked(endpoint)
        linked.thread.start()
        host.welcome(Hello, welcome(), lambda: linked.heard)
        linked.thread.close()
        linked.thread.say(linked.link, confirm(1))
        linked.thread.ring()
        assert list(linked.link.outbox) == [confirm(1)], "it left after the end"


def test_what_the_link_thread_says_leaves_behind_what_it_has_taken_in(
    linked: Linked, endpoint: str
) -> None:
    """The engine must know that an offer has ended by the time its confirmation is heard."""
    waiting: list[int] = []

    def answer(message: FromHostTier) -> None:
        linked.thread.say(linked.link, confirm(1))
        waiting.append(len(linked.link.outbox))

    with host_tier(endpoint) as host:
        host.welcome(Hello, welcome(), lambda: linked.heard)
        linked.link.on_message = answer
        host.say(PULLED)
        assert host.hear(Confirm).offer == 1
        assert waiting == [1]
