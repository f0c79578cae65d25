"""The driver: starts sim engines as processes, sends them requests, collects what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio
from kvbm_common.config.secret_variables import environ_for
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.identity import SequenceHash, unpack_hashes
from kvbm_common.runtime.processes import dying_with_parent

from kvbm_connectors.sim.control import (
    Ask,
    Done,
    Dump,
    EngineConfig,
    Finished,
    Started,
    Stats,
    Submit,
    from_engine,
    to_engine,
)
from kvbm_connectors.sim.workload import Turn

START_DEADLINE_S = 20.0
REQUEST_DEADLINE_S = 60.0
"""No simulated request takes longer, whatever is killed: the engines never wait for a cache."""
ANSWER_DEADLINE_S = 10.0
STOP_DEADLINE_S = 3.0

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", Started, Dump, Stats, Done)


class EngineDied(KvbmError):
    """A sim engine's process has ended by itself."""

    code = "engine_died"


class EngineHandle:
    """One engine process and the socket to it."""

    def __init__(self, config: EngineConfig, *, log_path: Path | None = None) -> None:
        self.config = config
        self._log_path = log_path
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[str, asyncio.Future[Finished]] = {}
        self._answers: asyncio.Queue[Started | Dump | Stats | Done | EngineDied] = asyncio.Queue(64)
        self._died: EngineDied | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def start(self) -> bool:
        """Start the process; returns whether its connector has attached."""
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kvbm_connectors.sim.process",
                msgspec.json.encode(self.config).decode(),
                env=environ_for("engine", os.environ),
                stderr=stderr,
                preexec_fn=dying_with_parent(),
            )
        self._socket.connect(f"ipc://{self.config.directory}/{self.config.name}.sock")
        self._reader = asyncio.create_task(self._read(), name=f"{self.config.name} reader")
        self._watcher = asyncio.create_task(self._watch(), name=f"{self.config.name} watcher")
        try:
            started = await self._ask("hello", Started, deadline_s=START_DEADLINE_S)
        except asyncio.CancelledError:  # Those who started it do not know of it yet.
            await self.kill()
            await self._let_go()
            raise
        return started.attached

    async def _read(self) -> None:
        while True:
            message = from_engine.decode(await self._socket.recv())
            if isinstance(message, Finished):
                waiting = self._waiting.pop(message.request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            else:
                self._answers.put_nowait(message)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        where = f", see {self._log_path.name}" if self._log_path is not None else ""
        self._died = EngineDied(f"{self.config.name} ended with {code}{where}")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._died)
        self._answers.put_nowait(self._died)

    async def request(self, submit: Submit) -> Finished:
        """Run one request; raises DeadlineExceeded, EngineDied."""
        if self._died is not None:
            raise self._died
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._waiting[submit.request] = future
        await self._socket.send(to_engine.encode(submit))
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.config.name}: request {submit.request}") from error

    async def dump(self) -> set[SequenceHash]:
        """Return the blocks that can be found on the device."""
        dump = await self._ask("dump", Dump)
        return set(unpack_hashes(dump.names))

    async def stats(self) -> Stats:
        """Return what the engine process has counted."""
        return await self._ask("stats", Stats)

    async def reset(self) -> bool:
        """Reset the prefix cache; False: not while requests run."""
        return (await self._ask("reset", Done)).ok

    async def _ask(
        self, what: str, kind: type[Reply], *, deadline_s: float = ANSWER_DEADLINE_S
    ) -> Reply:
        async with self._asking:
            await self._socket.send(to_engine.encode(Ask(what=what)))
            try:
                async with asyncio.timeout(deadline_s):
                    while not isinstance(answer := await self._answers.get(), kind):
                        if isinstance(answer, EngineDied):
                            raise answer
                        # To a question before, whose asker was ended or had no more time.
                        log.debug("%s answered %s to %s", self.config.name, answer, what)
                    return answer
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.config.name}: {what}") from error

    async def kill(self) -> None:
        """Kill the process with SIGKILL, as the out-of-memory killer would."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the process, in order if it can be: its answer and its end have a deadline each."""
        process = self._process
        try:
            if process is not None and process.returncode is None:
                await self._end(process, deadline_s)
        finally:
            await self._let_go()

    async def _end(self, process: asyncio.subprocess.Process, deadline_s: float) -> None:
        try:
            with contextlib.suppress(KvbmError):
                await self._ask("stop", Done, deadline_s=deadline_s)
            async with asyncio.timeout(deadline_s):
                await process.wait()
        except TimeoutError:
            await self.kill()
        except BaseException:  # Cancelled: those who stop it have no time left.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise

    async def _let_go(self) -> None:
        """End what reads from the process, close its socket, and remove those of a killed one."""
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._socket.close()
        self._context.term()
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        for of_what in ("", "-events", "-replay"):
            path = Path(f"{self.config.directory}/{self.config.name}{of_what}.sock")
            path.unlink(missing_ok=True)


async def stop_all(engines: Sequence[EngineHandle], *, deadline_s: float = STOP_DEADLINE_S) -> None:
    """End the processes of all engines, side by side: one that hangs has its deadlines alone.

    One that cannot be ended in order keeps no other from its end; its error is raised after them.
    """
    stops = [asyncio.ensure_future(engine.stop(deadline_s=deadline_s)) for engine in engines]
    for ended in await asyncio.gather(*stops, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


async def run_turns(
    engines: Sequence[EngineHandle],
    turns: Iterable[Turn],
    *,
    concurrency: int,
    on_finished: Callable[[Turn, Finished], None],
    prefix: str = "r",
) -> None:
    """Send every turn, each conversation to one engine and in order, so many at a time.

    First turns of conversations come first, in their order; a later one goes to the end of the
    queue when the one before has finished. Raises the first error of an engine.
    """
    ready: deque[tuple[int, Turn]] = deque()
    later: dict[int, deque[tuple[int, Turn]]] = {}
    """The turns of a conversation that come after one in the queue, or one that runs."""
    for number, turn in enumerate(turns):
        waiting = later.get(turn.conversation)
        if waiting is None:
            ready.append((number, turn))
            later[turn.conversation] = deque()
        else:
            waiting.append((number, turn))
        await asyncio.sleep(0)  # To make a hundred thousand of them takes seconds.

    async def work() -> None:
        while ready:  # A turn adds one at most: those who have left are not missed.
            number, turn = ready.popleft()
            engine = engines[turn.conversation % len(engines)]
            submit = Submit(
                request=f"{prefix}{number}",
                prompt=turn.prompt.tobytes(),
                outputs=turn.outputs.tobytes(),
            )
            on_finished(turn, await engine.request(submit))
            if waiting := later[turn.conversation]:
                ready.append(waiting.popleft())

    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(concurrency):
                tasks.create_task(work(), name=f"turns {number}")
    except ExceptionGroup as errors:
        if not all(isinstance(error, KvbmError) for error in errors.exceptions):
            raise
        raise errors.exceptions[0] from None
