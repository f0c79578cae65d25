"""vLLM as its users run it: the OpenAI-compatible server, in processes of its own, over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbm_common.config.settings import Settings
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.vllm.conversation import Answer
from tests.vllm.harness import (
    BLOCK_TOKENS,
    ENVIRON,
    PATIENCE_MS,
    ROOT,
    VLLM_PYTHON,
    wait_for,
)

START_DEADLINE_S = 400.0
"""Two ranks and an API server at once, on two cores that others use, too."""
REQUEST_DEADLINE_S = 100.0
STOP_DEADLINE_S = 20.0

TRANSFER = {
    "kv_connector": "KvbmConnector",
    "kv_connector_module_path": "kvbm_connectors.vllm",
    "kv_role": "kv_both",
}
"""What docs/vllm.md says that a user writes."""


class ServerProcess:
    """One vLLM server. The connector is configured by the environment alone."""

    def __init__(
        self,
        model: str,
        settings: Settings,
        *,
        log: Path,
        transfer: Mapping[str, object] | None = TRANSFER,
        blocks: int = 64,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        shipped: bool = False,
    ) -> None:
        """Start it. `shipped`: the connector has the defaults of a user who has set nothing."""
        self.port = free_port()
        self.log_path = log
        self._log = log.open("ab")
        command = [
            str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server",
            "--model", model, "--served-model-name", "model", "--port", str(self.port),
            "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
            "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks),
            "--max-model-len", "1920", "--max-num-batched-tokens", "256",
            "--enable-prompt-tokens-details", *arguments,
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "KVBM_RUNTIME_DIR": str(settings.runtime_dir),
        }
        patience = {
            "KVBM_ONBOARD_DEADLINE_MS": str(PATIENCE_MS),
            "KVBM_OFFER_DEADLINE_MS": str(PATIENCE_MS),
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | ENVIRON | own | ({} if shipped else patience) | dict(environ or {}),
            cwd=ROOT,
            # Not a session: Linux schedules each as a group, and 6.18 let a spinning thread of one
            # (vLLM's NIXL has such) starve the others for minutes.
            process_group=0,
            preexec_fn=dying_with_parent(),
        )

    def wait_started(self) -> ServerProcess:
        """Wait until it serves."""
        wait_for(
            self._serves, "the server does not start", deadline_s=START_DEADLINE_S,
            details=self.tail,
        )  # fmt: skip
        return self

    def _serves(self) -> bool:
        assert self._process.poll() is None, f"the server has ended{self.tail()}"
        try:
            self._request("/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def wait_attached(self, *, engines: int = 1) -> None:
        """Wait until host tier and consolidator know each of its engines: it logs what they say."""
        links = (": host tier: ", r": worker \d+: ", r": consolidator, rank \d+: ")

        def attached(link: str) -> bool:
            log = self.log_text()
            lost = len(re.findall(f"{link}lost", log))
            return len(re.findall(f"{link}attached", log)) - lost >= engines

        wait_for(
            lambda: all(map(attached, links)),
            "the connector does not attach",
            deadline_s=30,
            details=self.tail,
        )

    def complete(
        self,
        tokens: Sequence[int],
        *,
        new_tokens: int = 8,
        rank: int | None = None,
        **more: object,
    ) -> tuple[Answer, dict[str, Any]]:
        """One greedy completion, and what vLLM says to a router (`kv_transfer_params`).

        `rank` is the data-parallel one that shall answer.
        """
        body = {
            "model": "model", "prompt": list(tokens), "max_tokens": new_tokens, "temperature": 0,
            "logprobs": 1, "return_token_ids": True, **more,
        }  # fmt: skip
        reply = json.loads(self._request("/v1/completions", body, rank=rank))
        choice = reply["choices"][0]
        details = reply["usage"].get("prompt_tokens_details") or {}
        answer = Answer(
            name=reply["id"],
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            cached=details.get("cached_tokens") or 0,
            seconds=0.0,
            finish=choice["finish_reason"],
        )
        return answer, reply.get("kv_transfer_params") or {}

    def reset(self) -> None:
        """Empty the device's prefix cache; it refuses as long as blocks are held."""
        self._request("/reset_prefix_cache", {})

    def metrics(self) -> dict[str, float]:
        """vLLM's own `/metrics`: samples by name and labels."""
        lines = self._request("/metrics").decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def counted(self, what: str) -> float:
        """The connector's counter of that name, over all engines of the server."""
        return sum(
            value
            for name, value in self.metrics().items()
            if name.startswith("vllm:kvbm_connector_total{") and f'what="{what}"' in name
        )

    def _request(self, path: str, body: object = None, *, rank: int | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            headers=headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()!r}{self.tail()}") from error

    def tail(self) -> str:
        """The end of the log."""
        return ":\n" + self.log_text()[-4000:]

    def log_text(self) -> str:
        """All that the server has logged."""
        return self.log_path.read_text(errors="replace")

    def stop(self) -> None:
        """End it in order; returns when all its processes are gone."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)
        self._log.close()
