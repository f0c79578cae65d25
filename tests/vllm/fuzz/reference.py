"""The reference: what vLLM alone answers, each request for all of its prompt, remembered."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.vllm.fuzz.processes import FuzzEngine
from tests.vllm.fuzz.shapes import reference
from tests.vllm.fuzz.talk import Answer, Ask, Command

KEPT_MAX = 20_000


class NotJudged(Exception):
    """vLLM alone cannot answer it: the program says nothing about our connector."""


class Reference:
    """Engines of one kind of model without a connector or a prefix cache; any checkpoint, any
    adapter.

    Adapters have an engine of their own, because on CPU vLLM cannot combine them with everything
    else (prompt logprobs).
    """

    def __init__(self, kind: str, fixtures: Path, work: Path) -> None:
        self._kind = kind
        self._fixtures, self._work = fixtures, work
        self._known: dict[str, Answer] = {}
        self._engines: dict[bool, FuzzEngine] = {}
        self._weights: dict[bool, str] = {}
        self.asked = 0
        self.computed = 0

    def begin(self) -> None:
        """Let the plain one start while others do."""
        self._engines[False] = self._start(adapters=False)

    def _start(self, *, adapters: bool) -> FuzzEngine:
        shape = reference(self._kind, adapters=adapters)
        log = self._work / f"{shape.name}.log"
        self._weights[adapters] = ""
        return FuzzEngine(self._fixtures / "a", shape, None, log=log, environ={})

    def _engine(self, *, adapters: bool, weights: str) -> FuzzEngine:
        if adapters not in self._engines:
            self._engines[adapters] = self._start(adapters=adapters)
        engine = self._engines[adapters]
        if not self._weights[adapters]:
            engine.wait_started()
            self._weights[adapters] = "a"
        if weights != self._weights[adapters]:
            assert engine.do("weights", path=str(self._fixtures / weights)).ok
            self._weights[adapters] = weights
        return engine

    def answers(self, asks: list[Ask], weights: str, contents: dict[str, int]) -> list[Answer]:
        """What each of them must answer. `contents` are the adapters', by request."""
        plain = [self._plain(ask, contents.get(ask.name)) for ask in asks]
        keys = [f"{weights} {_key(ask)}" for ask in plain]
        missing = {key: ask for key, ask in zip(keys, plain, strict=True) if key not in self._known}
        self.asked += len(asks)
        self._compute(missing, weights)
        return [
            msgspec.structs.replace(self._known[key], name=ask.name)
            for key, ask in zip(keys, asks, strict=True)
        ]

    def alone(self, ask: Ask, weights: str, content: int | None) -> Answer:
        """The same for one, in a batch of its own."""
        plain = self._plain(ask, content)
        self._known.pop(f"{weights} {_key(plain)}", None)
        self._compute({f"{weights} {_key(plain)}": plain}, weights)
        return msgspec.structs.replace(self._known[f"{weights} {_key(plain)}"], name=ask.name)

    def _compute(self, missing: dict[str, Ask], weights: str) -> None:
        if len(self._known) > KEPT_MAX:
            self._known.clear()
        for adapters in (False, True):
            own = {key: ask for key, ask in missing.items() if bool(ask.adapter) == adapters}
            if own:
                self._known |= self._computed(own, weights, adapters=adapters)
                self.computed += len(own)

    def _computed(
        self, missing: dict[str, Ask], weights: str, *, adapters: bool
    ) -> dict[str, Answer]:
        asks = [
            msgspec.structs.replace(ask, name=f"q{number}")
            for number, ask in enumerate(missing.values())
        ]
        engine = self._engine(adapters=adapters, weights=weights)
        try:
            reply = engine.say(Command(what="run", asks=asks))
        except (AssertionError, OSError) as error:
            self._drop(adapters=adapters)
            raise NotJudged(str(error)) from error
        ends = {spoken.finish for answer in reply.answers for spoken in answer.spoken}
        if not reply.ok or not ends <= {"length", "stop"}:
            self._drop(adapters=adapters)
            raise NotJudged(f"vLLM alone: {reply.text} {ends}")
        return dict(zip(missing, reply.answers, strict=True))

    def _drop(self, *, adapters: bool) -> None:
        self._engines.pop(adapters).kill()
        del self._weights[adapters]

    def _plain(self, ask: Ask, content: int | None) -> Ask:
        """As it is asked alone: at once, to its end, without a salt."""
        adapter = f"lora{content}" if content is not None else ""
        return Ask(
            name="", tokens=ask.tokens, new=ask.new, n=ask.n, grammar=ask.grammar,
            prompt_logprobs=ask.prompt_logprobs, adapter=adapter,
            adapter_id=0 if content is None else content + 1,
            adapter_path=str(self._fixtures / adapter) if adapter else "",
        )  # fmt: skip

    def stop(self) -> None:
        """End the engines."""
        for engine in self._engines.values():
            engine.stop()


def _key(ask: Ask) -> str:
    return msgspec.json.encode(ask).decode()
