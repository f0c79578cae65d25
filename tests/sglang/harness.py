"""Ranks as processes: what the SGLang tests work with. The stack is the vLLM suite's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbm_common.config.settings import Settings

from tests.line_process import LineProcess
from tests.sglang.conversation import Command, Pool, Reply

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
"""Of the environment that `make_env.py` makes; the services run in ours."""
REPLY_S = 100.0
"""The first one includes importing SGLang: half a minute from a cold disk."""
PATIENCE_MS = 10_000
"""For lookups and offers, unless time is the subject."""


class RankProcess(LineProcess[Command, Reply]):
    """See rank_process."""

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        assert PYTHON.exists(), "`make test-sglang` makes the environment"
        super().__init__(
            [PYTHON, "-m", "tests.sglang.rank_process"],
            reply=Reply,
            log=log,
            environ=ENVIRON | dict(environ or {}),
            reply_deadline_s=REPLY_S,
        )

    def ask(self, what: str, **fields: Any) -> Reply:
        """Send a command and wait; what it raises there is raised here."""
        reply = self.say(Command(what=what, **fields))
        assert not reply.error, f"{reply.error}{self.tail()}"
        return reply

    def attach(
        self, settings: Settings, pools: Mapping[str, Pool] | None = None, **fields: Any
    ) -> None:
        """Attach our storage, and wait until it has found the services."""
        extra = extra_of(settings) | fields.pop("extra", {})
        reply = self.ask("attach", extra=extra, pools=dict(pools or {"kv": Pool()}), **fields)
        assert reply.flags == [True], self.tail()


ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "UCX_MODULES": "^ib",
}


def extra_of(settings: Settings) -> dict[str, Any]:
    """What `--hicache-storage-backend-extra-config` says in a test."""
    return {
        "backend_name": "kvbm",
        "module_path": "kvbm_connectors.sglang",
        "class_name": "KvbmHiCacheStorage",
        "interface_v1": 1,
        "revision": "of a test",
        "runtime_dir": str(settings.runtime_dir),
        "state_dir": str(settings.state_dir),
        "onboard_deadline_ms": PATIENCE_MS,
        "offer_deadline_ms": PATIENCE_MS,
    }


def keys_of(seed: str, count: int) -> list[str]:
    """Page keys of a sequence."""
    return [f"{seed}-{page:04d}".encode().hex().ljust(64, "0") for page in range(count)]


def pages(first: int, count: int) -> list[int]:
    """Some pages of a pool."""
    return list(range(first, first + count))
