"""Runs one program on a lane, and says what was wrong."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvbm_common.errors import KvbmError

from tests.vllm.fuzz.engines import Engines, Plain
from tests.vllm.fuzz.judge import Failure, differences
from tests.vllm.fuzz.lane import Lane
from tests.vllm.fuzz.processes import FuzzEngine
from tests.vllm.fuzz.program import Act, Program, Request, Wave, prompt_of
from tests.vllm.fuzz.reference import NotJudged, Reference
from tests.vllm.fuzz.talk import Answer, Ask, Command
from tests.vllm.harness import wait_for

WAVE_DEADLINE_S = 60.0
QUIET_DEADLINE_S = 20.0
"""A lease ends after 5 s, an offer too."""
SPARE_TOKENS = 64
"""Of the model's length, for answers."""
ANSWERS = ("tokens", "logprobs", "prompt logprobs", "finish")
"""Failures that vLLM alone might show, too."""
WORST = (
    "answers", "hangs", "stuck", "dead", "gone", "engine", "held", "left over", "not attached",
    "broken", "traceback", "refused",
)  # fmt: skip
_nonces = itertools.count(time.time_ns())


@dataclass
class Result:
    """What came of one run."""

    failures: list[Failure] = field(default_factory=list)
    features: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    unusable: bool = False
    """The lane needs another engine and stack."""

    @property
    def worst(self) -> str:
        """The most serious class of its failures; empty without any."""
        found = classes(self.failures)
        return next((name for name in WORST if name in found), "")


@dataclass
class Judged:
    """One request that was answered, and what it should have been answered."""

    ask: Ask
    found: Answer
    content: int | None
    """Of its adapter."""
    weights: str


class Play:
    """One run of one program on some engines."""

    def __init__(self, program: Program, engines: Engines, key: str) -> None:
        self.answers: dict[str, Judged] = {}
        """By the request's name in the program."""
        self.problems: list[str] = []
        self._program, self._engines, self._key = program, engines, key
        self._spoken: dict[str, list[int]] = {}

    def wave(self, wave: Wave, act: Callable[[Act, bool], None]) -> list[str]:
        """Run one; the names of its requests. `act` is told whether requests are running."""
        engines = self._engines.engines
        for one in wave.acts:
            if not one.at:
                act(one, False)
        asks = [self._asks(wave, number) for number in range(len(engines))]
        acts = sorted((one for one in wave.acts if one.at), key=lambda one: one.at)
        pauses = sorted({one.at for one in acts})
        for engine, own in zip(engines, asks, strict=True):
            engine.begin(Command(
                what="run", asks=list(own.values()), deadline_s=WAVE_DEADLINE_S,
                pauses=pauses if engine is engines[0] else [],
            ))  # fmt: skip
        for engine, own in zip(engines, asks, strict=True):
            answers = self._answers(engine, acts if engine is engines[0] else [], act)
            self._take(own, answers)
        return [name for own in asks for name in own]

    def _answers(
        self, engine: FuzzEngine, acts: list[Act], act: Callable[[Act, bool], None]
    ) -> list[Answer]:
        """Of a run that has begun; acts at its pauses."""
        acts = list(acts)
        while (reply := engine.wait_reply()).at:
            while acts and acts[0].at <= reply.at:
                act(acts.pop(0), True)
            engine.begin(Command(what="go"))
        # vLLM refuses a reset while blocks are held for a load or an offer.
        if not reply.ok and "Failed to reset KV cache" not in reply.text:
            self.problems.append(reply.text)
        return reply.answers

    def _take(self, asks: dict[str, Ask], answers: list[Answer]) -> None:
        engines = self._engines
        for (name, ask), found in zip(asks.items(), answers, strict=False):
            content = engines.contents[ask.adapter_id] if ask.adapter else None
            self.answers[name] = Judged(ask, found, content, engines.weights)
            spoken = found.spoken[0].tokens if found.spoken else []
            self._spoken[name] = [*ask.tokens, *spoken]

    def _asks(self, wave: Wave, engine: int) -> dict[str, Ask]:
        last = len(self._engines.engines) - 1
        return {
            one.name: self._ask(one) for one in wave.requests if min(one.engine, last) == engine
        }

    def _ask(self, request: Request) -> Ask:
        engines, shape = self._engines, self._engines.shape
        # On CPU, vLLM answers wrongly without an adapter in a batch where others have one.
        adapter = (request.adapter or 1) if shape.adapters else 0
        limit = shape.model_tokens - SPARE_TOKENS
        return Ask(
            name=f"{self._key}/{request.name}",
            tokens=prompt_of(request, self._key, self._spoken, limit=limit),
            at=request.at, new=request.new, n=request.n,
            abort=request.abort, prompt_logprobs=request.prompt_logprobs, grammar=request.grammar,
            adapter=f"adapter{adapter}" if adapter else "", adapter_id=adapter,
            adapter_path=str(engines.paths[adapter]) if adapter else "",
            salt=f"{self._key}/{request.salt}" if request.salt else "",
            priority=request.priority if shape.priorities else 0,
        )  # fmt: skip


def classes(failures: Iterable[Failure]) -> set[str]:
    """Their kinds; a wrong answer is one, however it shows."""
    return {"answers" if one.kind in ANSWERS else one.kind for one in failures}


def certain(failure: Failure) -> bool:
    """What vLLM alone never does: ends in an error, and NaN."""
    return "(None)" in failure.text or "in error" in failure.text


class Run:
    """One run of one program with our connector, and the verdict."""

    def __init__(
        self, program: Program, lane: Lane, reference: Reference, plain: Callable[[], Plain]
    ) -> None:
        """`plain` is only called, and started, where an answer differs."""
        self._program, self._lane = program, lane
        self._reference, self._plain = reference, plain
        self._key = f"{program.shape}/{program.seed}/{next(_nonces)}"
        self._play = Play(program, lane, self._key)
        self._result = Result()

    def result(self) -> Result:
        """Run it."""
        started_s = time.monotonic()
        lane, result = self._lane, self._result
        lane.counts.clear()
        sizes = lane.log_sizes()
        before: Counter[str] = Counter()
        try:
            lane.prepare()
            before = self._counts()
            for wave in self._program.waves:
                self._wave(wave)
            self._quiet()
            result.features += self._counts() - before
        except NotJudged as error:
            result.features["not judged"] += 1
            print(f"not judged: {error}", file=sys.stderr)
        except (AssertionError, OSError) as error:
            self._broken(error)
        for name in lane.dead():
            self._fail("dead", f"{name} has ended")
            result.unusable = True
        for text in lane.new_tracebacks(sizes):
            self._fail("traceback", text)
        result.features += lane.counts
        self._excuse()
        result.seconds = time.monotonic() - started_s
        return result

    def _fail(self, kind: str, text: str, request: str = "") -> None:
        self._result.failures.append(Failure(kind=kind, text=text, request=request))

    def _broken(self, error: BaseException) -> None:
        """The lane is of no use any more."""
        text = str(error)
        kind = "hangs" if "no answer after" in text else "broken"
        self._fail(kind, text[-3000:] or repr(error))
        self._result.unusable = True

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for engine in self._lane.engines:
            counts.update(engine.do("state").counts)
        return counts

    # --- a wave -----------------------------------------------------------------------------

    def _wave(self, wave: Wave) -> None:
        lane = self._lane
        names = self._play.wave(wave, self._act)
        for problem in self._play.problems:
            self._fail("engine", problem)
            self._result.unusable = True
        self._play.problems.clear()
        lane.undo()
        self._judge([self._play.answers[name] for name in names if name in self._play.answers])
        for engine in lane.engines:
            reply = engine.do("settle")
            if not reply.ok:
                self._fail("held", reply.text)
                self._result.unusable = True
        if any(act.what in ("kill", "stop") for act in wave.acts):
            self._recover()

    def _act(self, act: Act, within: bool) -> None:
        problem = self._lane.act(act)
        if problem and not within:  # While requests run, vLLM may refuse a reset.
            self._fail("refused", problem)

    def _recover(self) -> None:
        """After services were killed: caching must resume, or nothing is tested from here on."""
        try:
            wait_for(self._serves, "the host tier does not answer", deadline_s=QUIET_DEADLINE_S)
            self._lane.attach()
        except (AssertionError, TimeoutError) as error:
            self._fail("not attached", str(error))
            self._result.unusable = True

    def _serves(self) -> bool:
        try:
            return bool(self._lane.stack.epoch("host-tier"))
        except Exception:
            return False

    # --- answers ----------------------------------------------------------------------------

    def _judge(self, judged: list[Judged]) -> None:
        contents = {one.ask.name: one.content for one in judged if one.content is not None}
        weights = self._lane.weights
        wanted = self._reference.answers([one.ask for one in judged], weights, contents)
        for one, right in zip(judged, wanted, strict=True):
            self._result.features["requests"] += 1
            self._result.features["cached tokens"] += one.found.cached
            self._compare(one, right)

    def _compare(self, one: Judged, right: Answer) -> None:
        aborted = bool(one.ask.abort)
        rounding = self._lane.shape.rounding
        failures, ties = differences(one.found, right, aborted=aborted, rounding=rounding)
        if failures and failures[0].kind in ANSWERS:
            self._result.features["compared alone"] += 1
            alone = self._reference.alone(one.ask, one.weights, one.content)
            failures, ties = differences(one.found, alone, aborted=aborted, rounding=rounding)
        self._result.features["near ties"] += ties
        self._result.failures += failures

    def _excuse(self) -> None:
        """Where vLLM alone, asked the same in the same order, is as far from its own answer."""
        suspects = {
            one.request for one in self._result.failures if one.kind in ANSWERS and not certain(one)
        }
        if not suspects:
            return
        try:
            excused = suspects & self._plain_differs()
        except (NotJudged, AssertionError, OSError) as error:
            print(f"vLLM alone cannot be asked: {error!r}", file=sys.stderr)
            return
        for one in self._result.failures:
            if one.request in excused:
                print(f"vLLM alone differs, too: {one.request} {one.text}", file=sys.stderr)
        self._result.features["vLLM alone differs, too"] += len(excused)
        self._result.failures = [
            one for one in self._result.failures
            if one.kind not in ANSWERS or one.request not in excused
        ]  # fmt: skip

    def _plain_differs(self) -> set[str]:
        """The requests whose answers differ without our connector."""
        plain = self._plain()
        plain.prepare()
        play = Play(self._program, plain, self._key)

        def act(one: Act, _within: bool) -> None:
            plain.act(one)

        for wave in self._program.waves:
            play.wave(wave, act)
        found: set[str] = set()
        for one in play.answers.values():
            contents = {} if one.content is None else {one.ask.name: one.content}
            (right,) = self._reference.answers([one.ask], one.weights, contents)
            aborted = bool(one.ask.abort)
            rounding = plain.shape.rounding
            if differences(one.found, right, aborted=aborted, rounding=rounding)[0]:
                found.add(one.ask.name)
        return found

    # --- the end ----------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Nothing is left over in the host tier."""
        left = ""

        def quiet() -> bool:
            nonlocal left
            stats = self._lane.stack.call(self._lane.stack.view.stats("host-tier"))
            names = ("offers", "lookups_waiting")
            found = {name: stats.figures.get(name, 0) for name in names}
            found |= {"leases": stats.leases, "staged": stats.slots.get("staged", 0)}
            left = str({name: number for name, number in found.items() if number})
            return not any(found.values())

        try:
            wait_for(quiet, "quiet", deadline_s=QUIET_DEADLINE_S)
        except (AssertionError, TimeoutError):
            self._fail("left over", f"the host tier holds {left}")
        except KvbmError as error:  # It ended, and no act of the program had ended it.
            self._fail("gone", f"the host tier does not answer: {error}")
            self._result.unusable = True
