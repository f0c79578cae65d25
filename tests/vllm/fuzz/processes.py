"""Engine processes of the fuzzer: vLLM with our connector as it is shipped, or vLLM alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvbm_common.config.settings import Settings

from tests.line_process import LineProcess
from tests.vllm.fuzz.shapes import Shape
from tests.vllm.fuzz.talk import Command, Reply
from tests.vllm.harness import ENVIRON, VLLM_PYTHON, wait_for

START_DEADLINE_S = 600.0
"""An idle machine needs 15 to 30 s, a starved one minutes."""
REPLY_DEADLINE_S = 100.0
"""A run has its own deadline, of a minute; without an answer after this the engine hangs."""
ATTACH_DEADLINE_S = 30.0
SHIPPED = {
    "kv_connector": "KvbmConnector",
    "kv_connector_module_path": "kvbm_connectors.vllm",
    "kv_role": "kv_both",
}
"""No more than a user must write."""


class FuzzEngine(LineProcess[Command, Reply]):
    """One engine; see engine.py. Without `settings` it has no connector."""

    def __init__(
        self,
        model: Path,
        shape: Shape,
        settings: Settings | None,
        *,
        log: Path,
        environ: Mapping[str, str],
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self.shape = shape
        self.has_connector = settings is not None
        options = shape.options
        if shape.drafts:
            options["speculative_config"] = {
                "method": "draft_model", "model": str(model), "num_speculative_tokens": shape.drafts
            }  # fmt: skip
        own = {"VLLM_CPU_OMP_THREADS_BIND": shape.threads, "TORCHDYNAMO_DISABLE": "1"}
        if shape.runner_v2:
            own |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
        if settings is not None:
            transfer: dict[str, object] = dict(SHIPPED)
            more = dict(shape.extra) | dict(extra or {})
            transfer |= {key: more.pop(key) for key in list(more) if key.startswith("kv_")}
            if more:
                transfer["kv_connector_extra_config"] = more
            options["kv_transfer_config"] = transfer
            own |= {"KVBM_RUNTIME_DIR": str(settings.runtime_dir)} | dict(shape.environ)
        super().__init__(
            [VLLM_PYTHON, "-m", "tests.vllm.fuzz.engine", model, json.dumps(options)],
            reply=Reply,
            log=log,
            environ=ENVIRON | own | dict(environ),
            reply_deadline_s=REPLY_DEADLINE_S,
        )

    @property
    def lives(self) -> bool:
        """Does the process run?"""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended, if it has."""
        return self._process.poll()

    def wait_started(self) -> FuzzEngine:
        """Wait until it serves."""
        assert self.line(START_DEADLINE_S) == b"ready\n", self.tail()
        return self

    def do(self, what: str, *, path: str = "", name: str = "", number: int = 0) -> Reply:
        """One command that is no run."""
        return self.say(Command(what=what, path=path, name=name, number=number))

    def wait_attached(self, epoch: int) -> None:
        """Wait until both halves know this life of the host tier."""

        def attached() -> bool:
            state = self.do("state")
            return state.attached and set(state.epochs) == {epoch}

        wait_for(attached, f"not attached to {epoch}", deadline_s=ATTACH_DEADLINE_S)

    def ask_to_stop(self) -> None:
        """By a command."""
        self.begin(Command(what="stop"))
