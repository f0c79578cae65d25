"""Ranks as processes: what the SGLang tests work with. The stack is the vLLM suite's."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from kvbm_common.config import Settings

from tests.sglang.conversation import Command, Pool, Reply

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
"""Of the environment that `make_env.py` makes; the services run in ours."""
REPLY_S = 100.0
"""The first one includes importing SGLang: half a minute from a cold disk."""
PATIENCE_MS = 10_000
"""For lookups and offers, unless time is the subject."""


class RankProcess:
    """See rank_process."""

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        assert PYTHON.exists(), "`make test-sglang` makes the environment"
        self._log_path = log
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.sglang.rank_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | ENVIRON | dict(environ or {}),
            cwd=ROOT,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, name=f"read {log.stem}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def begin(self, what: str, **fields: Any) -> None:
        """Send a command without waiting for its reply."""
        assert self._process.stdin is not None
        command = Command(what=what, **fields)
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def wait_reply(self) -> Reply:
        """The reply to the oldest command that has none."""
        try:
            line = self._lines.get(timeout=REPLY_S)
        except queue.Empty:
            line = b""
        assert line, f"no reply: {self.log()[-4000:]}"
        return msgspec.json.decode(line, type=Reply)

    def ask(self, what: str, **fields: Any) -> Reply:
        """Send a command and wait; what it raises there is raised here."""
        reply = self.say(what, **fields)
        assert not reply.error, f"{reply.error}: {self.log()[-4000:]}"
        return reply

    def say(self, what: str, **fields: Any) -> Reply:
        """Send a command and wait."""
        self.begin(what, **fields)
        return self.wait_reply()

    def attach(
        self, settings: Settings, pools: Mapping[str, Pool] | None = None, **fields: Any
    ) -> None:
        """Attach our storage, and wait until it has found the services."""
        extra = extra_of(settings) | fields.pop("extra", {})
        reply = self.ask("attach", extra=extra, pools=dict(pools or {"kv": Pool()}), **fields)
        assert reply.flags == [True], self.log()[-4000:]

    def log(self) -> str:
        """All that it has logged."""
        return self._log_path.read_text(errors="replace")

    def stop(self) -> None:
        """End it in order; killed when it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._log.close()


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
        "runtime_dir": str(settings.runtime_dir),
        "state_dir": str(settings.state_dir),
        "verify_host_reads": "always",
        "onboard_deadline_ms": PATIENCE_MS,
        "offer_deadline_ms": PATIENCE_MS,
    }


def keys_of(seed: str, count: int) -> list[str]:
    """Page keys of a sequence."""
    return [f"{seed}-{page:04d}".encode().hex().ljust(64, "0") for page in range(count)]


def pages(first: int, count: int) -> Sequence[int]:
    """Some pages of a pool."""
    return list(range(first, first + count))
